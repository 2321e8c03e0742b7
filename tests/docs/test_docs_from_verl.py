"""docs/from_verl.md has commands that are accepted, and keys that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from dataflow.config.keys.overrides import fields
from dataflow.config.run import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "from_verl.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_commands_have_the_options_that_exist_and_keys_exist() -> None:
    lines = re.findall(r"^    dataflow import-verl (.*?)(?:  +#.*)?$", TEXT, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        assert {word for word in shlex.split(line) if word.startswith("-")} <= {"-o", "-m", "--keys", "--json"}
    ours = {".".join(path) for path, _ in fields(RunConfig)}
    for key in re.findall(r"`((?:engine|custom_reward_function|trainer\.world)[\w.]*)", TEXT):
        assert key in ours, key
