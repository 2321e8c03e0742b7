"""docs/sandbox.md is correct: its options, command lines and statuses exist, and its example prints what it should."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.config.run import parse_overrides
from dataflow.rewards.naming import JUDGE
from dataflow.rewards.sandbox import local
from dataflow.rewards.sandbox.manager import Sandbox
from dataflow.rewards.sandbox.outcome import Status
from dataflow.running.services.agent import check_reward

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "sandbox.md").read_text(encoding="utf-8")


def test_the_table_of_options_is_the_signature() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", TEXT, re.MULTILINE)
    parameters = list(inspect.signature(Sandbox).parameters.values())[1:]
    assert [(name, yaml.safe_load(value)) for name, value in rows] == [(each.name, each.default) for each in parameters]


def test_the_statuses_are_named() -> None:
    for status in {*get_args(Status), "passed", "no_code", "wrong_answer"} - {"finished"}:
        assert f"`{status}`" in TEXT, status
    assert f"{local._FILE_MB} MB for a file and {local._FILES} open files" in TEXT
    assert f"wall clock {local.WALL} times" in TEXT
    assert all(f"`{name}`" in TEXT for name in local._ISOLATED if name != "rlimits")


def test_command_lines_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"^```\n(dataflow run.*?)\n```", TEXT, re.DOTALL | re.MULTILINE)
    commands = re.split(r"^(?=dataflow )", block.replace("\\\n", ""), flags=re.MULTILINE)[1:]
    assert len(commands) == 2
    for words in map(shlex.split, commands):
        config = parse_overrides(load_pipeline_file(words[2]).Config, words[3:])
        check_reward({"path": None}, {"target": JUDGE}, config.reward)
        # Generated problems have no test cases.
        assert config.data.train
        assert config.data.val


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https:)([^)#]+)", TEXT):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.slow
def test_the_example_scores_its_programs() -> None:
    made = subprocess.run(
        [sys.executable, "examples/rewards/programs.py"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert made.stdout.splitlines() == [
        "1.0 2 of 2: passed",
        "0.5 1 of 2: wrong_answer",
        "0.0 0 of 2: timeout",
        "0.0 0 of 2: no_code",
    ], made.stderr
