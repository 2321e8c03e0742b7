"""docs/rewards.md and docs/tools.md are correct: files they show, Python they run, questions to the ledger.

``python tests/docs/test_shown.py`` updates the files in them.
"""

from __future__ import annotations

import contextlib
import io
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dataflow.reward_agent import RewardAgent
from dataflow.rewards.failure import KINDS
from dataflow.rewards.ledger import Ledger
from tests.docs.test_example_rewards import batch, rewards, run

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
PAGES = {page: (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("rewards.md", "tools.md")}
# A link to an example, and the block behind it that shows the file.
SHOWN = re.compile(r"(\(\.\./(examples/\w+/\S+)\)[^`]*?\n```(?:python|text)\n)(.*?)(\n```)", re.DOTALL)
BLOCK = re.compile(r"^```(\w*)\n(.*?)\n```$(?:\n\n```text\n(.*?)\n```)?", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[tuple[str, str, str]]:
    """Returns page, text and what the block of text behind it says, of each block that shows no file."""
    found = [(page, *match.groups()) for page, text in PAGES.items() for match in BLOCK.finditer(text)]
    shown = {match[3] for text in PAGES.values() for match in SHOWN.finditer(text)}
    return [(page, code, said or "") for page, name, code, said in found if name == language and code not in shown]


def test_the_files_that_a_page_shows_are_the_files() -> None:
    shown = {match[2]: match[3] for text in PAGES.values() for match in SHOWN.finditer(text)}
    assert len(shown) >= 3
    for name, text in shown.items():
        assert text == (ROOT / name).read_text(encoding="utf-8").strip(), f"run python {Path(__file__).name}"


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_blocks_print_what_is_said(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, code, said = blocks("python")[number]
    monkeypatch.chdir(ROOT if page == "tools.md" else tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"{page}, block {number}", "exec"), {"__name__": "__main__"})
    assert printed.getvalue().strip() == said


def test_each_failure_rule_is_in_the_table() -> None:
    text = PAGES["rewards.md"]
    lines = text[text.index("`reward.on_failure` says") :].split("\n|", 1)[1].split("\n\n")[0].splitlines()[2:]
    assert [line.split("|")[1].strip().strip("`").partition(":")[0] for line in lines] == list(KINDS)


def test_questions_to_the_ledger_have_answers(tmp_path: Path) -> None:
    async def judged(solution_str: str, **_: Any) -> tuple[float, str, str]:
        if solution_str == "bad":
            raise ValueError("no number in 'bad'")
        return float(solution_str), "3 + 4?", f"it says {solution_str}"

    path = tmp_path / "rewards.sqlite"
    agent = RewardAgent(judged, ledger=Ledger(path), on_failure="drop_sample", max_failed_share=1)
    run(lambda: rewards(agent, batch([["bad", "0"], ["0.25", "1"]])))
    questions = "".join(code for _page, code, _said in blocks("sql")).split(";")[:-1]
    with contextlib.closing(sqlite3.connect(path)) as db:
        why, again, low = [db.execute(question).fetchall() for question in questions]
    assert [(count, "no number in 'bad'" in story) for story, count in why] == [(1, True)]
    assert [(sample, "ValueError" in tries) for *_, sample, tries in again] == [(0, True)]
    assert low == [(0, 1, 0.0, "it says 0"), (1, 0, 0.25, "it says 0.25")]


if __name__ == "__main__":
    for page, text in PAGES.items():
        now = SHOWN.sub(lambda m: m[1] + (ROOT / m[2]).read_text(encoding="utf-8").strip() + m[4], text)
        (ROOT / "docs" / page).write_text(now, encoding="utf-8")
