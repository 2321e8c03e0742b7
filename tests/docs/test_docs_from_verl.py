"""docs/from_verl.md has the table of verl's keys as it is, and commands that are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from dataflow.config.keys.overrides import fields
from dataflow.config.run import RunConfig
from dataflow.importing.command import run, table

PAGE = Path(__file__).parents[2] / "docs" / "from_verl.md"
TEXT = PAGE.read_text(encoding="utf-8")
MARK = "<!-- dataflow import-verl --keys -->"
WORDS = TEXT.partition(MARK)[0]


def test_the_table_is_that_of_the_package() -> None:
    shown = TEXT.partition(MARK)[2].strip()
    assert shown == table() == run(["--keys"]), f"write what 'dataflow import-verl --keys' prints below {MARK}"


def test_commands_have_the_options_that_exist() -> None:
    lines = re.findall(r"^    dataflow import-verl (.*?)(?:  +#.*)?$", WORDS, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        assert {word for word in shlex.split(line) if word.startswith("-")} <= {"-o", "-m", "--keys", "--json"}


def test_keys_exist() -> None:
    ours = {".".join(path) for path, _ in fields(RunConfig)}
    for key in re.findall(r"`((?:engine|custom_reward_function|trainer\.world)[\w.]*)", WORDS):
        assert key in ours, key


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert "://" in target or (PAGE.parent / target).exists(), target
    assert (PAGE.parents[1] / "tests/config/keys/test_verl_keys.py").is_file()
