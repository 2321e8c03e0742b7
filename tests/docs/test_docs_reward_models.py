"""docs/reward_models.md is correct: its command lines, links and keys."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.running.resume import MODEL_MAY_CHANGE

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "reward_models.md"
TEXT = DOC.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^dataflow run .*$", TEXT.replace("\\\n", ""), re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_runs_have_valid_options(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)
    config = parse_overrides(load_pipeline_file(Path(words[2])).Config, words[3:])
    assert config.reward.models


def test_links_lead_somewhere() -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", TEXT):
        file = DOC.parent / target if target else DOC
        assert file.exists(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, anchor


def test_keys_that_may_change_are_named() -> None:
    sentence = TEXT[TEXT.index("starts the servers again. ") : TEXT.index(" may change there")]
    assert sorted(re.findall(r"`(\w+)`", sentence)) == sorted(MODEL_MAY_CHANGE)
