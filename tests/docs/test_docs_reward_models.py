"""docs/reward_models.md is correct: its command lines, links, keys and tables.

``python tests/docs/test_docs_reward_models.py`` updates the tables of options in it.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.config.served import PromptConfig, ServedModelConfig
from dataflow.running.resume import MODEL_MAY_CHANGE
from tests.rigs.option_tables import TABLES, option_table

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "reward_models.md"
TEXT = DOC.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^dataflow run .*$", TEXT.replace("\\\n", ""), re.MULTILINE)


def tables() -> str:
    model = ServedModelConfig(path="DIR").model_copy(update={"path": None})
    parts = [("reward.models.NAME", model), ("reward.models.NAME.prompt", PromptConfig())]
    return "\n\n".join(option_table(prefix, section) for prefix, section in parts)


def test_the_tables_of_options_are_those_of_the_configuration() -> None:
    found = TABLES.search(TEXT)
    assert found is not None
    assert found[2] == tables(), f"run python {Path(__file__).name}"


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


if __name__ == "__main__":
    DOC.write_text(TABLES.sub(lambda found: found[1] + tables() + found[3], TEXT), encoding="utf-8")
