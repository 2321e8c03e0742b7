"""docs/rewards.md is correct: its code and command lines work; its files, keys and names exist.

``python tests/docs/test_docs_rewards.py`` updates the files in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import shlex
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.config.keys.overrides import fields
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.config.run import parse_overrides
from dataflow.planning.config import PlanConfig
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.failure import KINDS
from dataflow.rewards.ledger import Ledger
from dataflow.rewards.results import RESERVED
from dataflow.running.services.agent import build_agent

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "rewards.md"
EXAMPLES = ROOT / "examples" / "rewards"
PIPELINE = ROOT / "pipelines" / "gsm8k_grpo.py"
TEXT = DOC.read_text(encoding="utf-8") if DOC.exists() else ""

# A link to an example, and the block behind it that shows the file.
SHOWN = re.compile(r"(\(\.\./examples/rewards/(\S+)\)[^`]*?\n```(?:python|text)\n)(.*?)(\n```)", re.DOTALL)
BLOCK = re.compile(r"^```(\w*)\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[tuple[str, str]]:
    """Returns each block of a language that shows no file, with what the block of text right behind it says."""
    shown = {match[3] for match in SHOWN.finditer(TEXT)}
    found = [*BLOCK.finditer(TEXT)]
    said = {match.start(): match[2] for match in found if match[1] == "text"}
    mine = [match for match in found if match[1] == language and match[2] not in shown]
    return [(match[2], said.get(match.end() + 2, "")) for match in mine]


def commands(program: str) -> list[list[str]]:
    """Returns the words of each command line that begins so."""
    text = "\n".join(code for code, _ in blocks("")).replace("\\\n", "")
    starts = re.split(r"^(?=dataflow )", text, flags=re.MULTILINE)
    return [shlex.split(start) for start in starts if start.startswith(program)]


def table(heading: str) -> list[list[str]]:
    """Returns the rows of the first table behind a line that holds some text."""
    lines = TEXT[TEXT.index(heading) :].split("\n|", 1)[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture(scope="module")
def pipeline() -> ModuleType:
    return load_pipeline_file(PIPELINE)


def run(body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(20):
            return await body()

    return asyncio.run(limited())


def batch(texts: list[list[str]], truth: str = "7") -> Batch:
    """One group for each list."""
    rows = [(group, text) for group, some in enumerate(texts) for text in some]
    columns: dict[str, Any] = {"response_text": [text for _, text in rows], "data_source": ["d"] * len(rows)}
    chat = [{"role": "user", "content": "3 + 4?"}]
    columns |= {"ground_truth": [truth] * len(rows), "raw_prompt": [chat] * len(rows)}
    return Batch([group for group, _ in rows], columns)


async def rewards(agent: RewardAgent, samples: Batch, spare: int = 0) -> Batch:
    """Returns what the agent makes of one step."""
    try:
        agent.submit(1, samples, extra_groups=spare)
        return await agent.collect(1)
    finally:
        await agent.close()


# --- the text ---------------------------------------------------------------------------------------------------


def test_the_files_it_shows_are_the_files() -> None:
    shown = {match[2]: match[3] for match in SHOWN.finditer(TEXT)}
    assert len(shown) >= 2
    for name, text in shown.items():
        assert text == (EXAMPLES / name).read_text(encoding="utf-8").strip(), f"run python {Path(__file__).name}"


def test_each_example_is_linked_and_each_link_leads_somewhere() -> None:
    assert set(re.findall(r"\(\.\./examples/rewards/(\S+)\)", TEXT)) == {
        file.name for file in EXAMPLES.iterdir() if file.is_file()
    }
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (DOC.parent / target).exists(), target
    prose = BLOCK.sub("", TEXT)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_blocks_print_what_is_said(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = blocks("python")[number]
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"{DOC.name}, block {number}", "exec"), {"__name__": "__main__"})
    assert printed.getvalue().strip() == said


@pytest.mark.parametrize("words", commands("dataflow run"), ids=lambda words: " ".join(words[3:5]))
def test_runs_have_valid_options_and_agents_that_can_be_built(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    pipeline = load_pipeline_file(words[2])
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.setattr("dataflow.running.services.agent.load_tokenizer", lambda path, where: object())
    monkeypatch.setattr("dataflow.rewards.processes.Pool.start", lambda self: None)
    if words[3:] == ["--keys"]:
        return
    config = parse_overrides(pipeline.Config, words[3:])
    config.judge.url = config.judge.url or "http://127.0.0.1:1"  # a run starts one
    options = {**pipeline.pipeline(config).hosts()["reward"].options, "ledger": None}
    options["options"] = options["options"].model_copy(update={"cache": None, "router_address": "127.0.0.1:1"})
    run(build_agent(**options).close)


def test_plans_have_valid_options() -> None:
    for words in commands("dataflow plan"):
        knobs = [word.partition("=")[2].split(":")[0] for word in words[3:] if word.startswith("sweep=")]
        parse_overrides(PlanConfig, [word for word in words[3:] if not word.startswith("sweep=")])
        assert set(knobs) <= {".".join(path) for path, _ in fields(PlanConfig)}


def test_keys_named_in_the_text_are_keys(pipeline: ModuleType) -> None:
    keys = {".".join(path) for path, _ in fields(pipeline.Config)}
    sections = "|".join(sorted({key.partition(".")[0] for key in keys if "." in key}))
    prose = BLOCK.sub("", TEXT)
    named = re.findall(rf"`((?:{sections})\.[\w.]+)(=[^`]*)?`", prose)
    assert len(named) > 30
    for key, value in named:
        assert key in keys, key
        if value:
            parse_overrides(pipeline.Config, [key + value])


# --- what it says of failures --------------------------------------------------------------------------------------


def test_names_of_columns_that_are_taken() -> None:
    said = TEXT[TEXT.index("a reserved key") :].partition(".")[0]
    assert set(re.findall(r"`(\w+)`", said)) == RESERVED


async def fragile(solution_str: str, **_: Any) -> float:
    if solution_str == "bad":
        raise ValueError("no number in 'bad'")
    return float(solution_str)


def test_each_rule_is_in_the_table() -> None:
    named = [row[0].strip("`").partition(":")[0] for row in table("`reward.on_failure` says")]
    assert named == list(KINDS)


# --- names -----------------------------------------------------------------------------------------------------


class Costly:
    """A reward object with all that makes metrics."""

    async def compute_score(self, solution_str: str, **_: Any) -> dict[str, Any]:
        return {"score": await fragile(solution_str)}

    def usage(self) -> dict[str, float]:
        counts = dict.fromkeys(("truncated",), 1.0)  # of served models
        return {"tokens": 3.0, "cost": 0.1, "NAME": 2.0, **counts}


async def metrics() -> dict[str, float]:
    """Returns the metrics of a step and of a validation, some of it failed."""
    from dataflow.config.run import AlgorithmConfig
    from dataflow.graph import TaskInfo
    from dataflow.stages.advantage import advantage
    from dataflow.stages.reward import reward_collect, reward_request, val_score

    samples = batch([["bad", "1"], ["2", "3"]])
    agent = RewardAgent(Costly(), on_failure="drop_group", max_failed_share=1)
    task = TaskInfo(step=1)
    ticket = await reward_request(samples, agent=agent, task=task)
    found = await reward_collect(ticket, agent=agent, task=task)
    await val_score(samples, agent=agent, task=task)
    await agent.close()
    import torch

    # Groups without a sample that counts: what is logged of them needs no estimator.
    none = found.select([0])
    masks = samples.select([0]).like(response_mask=torch.ones(2, 3, dtype=torch.int64))
    advantage(masks, none, algorithm=AlgorithmConfig(), task=task)
    return task.metrics


def test_metrics_are_named_as_they_are_logged() -> None:
    logged = {name.replace("/d/", "/SOURCE/").replace("mean@2", "mean@N") for name in run(metrics)}
    section = TEXT[TEXT.index("\n## Metrics") :]
    named = set(re.findall(r"`((?:reward|val-core|val-aux)/[^`]+)`", section))
    assert named == logged | {"val-aux/accuracy"}, "the scores of the page are no accuracies"


def test_questions_to_the_ledger_have_answers(tmp_path: Path) -> None:
    async def judged(solution_str: str, **_: Any) -> tuple[float, str, str]:
        return await fragile(solution_str), "3 + 4?", f"it says {solution_str}"

    path = tmp_path / "rewards.sqlite"
    agent = RewardAgent(judged, ledger=Ledger(path, "run"), on_failure="drop_sample", max_failed_share=1)
    run(lambda: rewards(agent, batch([["bad", "0"], ["0.25", "1"]])))
    questions = "".join(code for code, _ in blocks("sql")).split(";")[:-1]
    with contextlib.closing(sqlite3.connect(path)) as db:
        why, again, low = [db.execute(question).fetchall() for question in questions]
    assert [(count, "no number in 'bad'" in story) for story, count in why] == [(1, True)]
    assert [(sample, "ValueError" in tries) for *_, sample, tries in again] == [(0, True)]
    assert low == [(0, 1, 0.0, "it says 0"), (1, 0, 0.25, "it says 0.25")]


def write() -> None:
    """Writes what the document takes from elsewhere into it."""
    DOC.write_text(
        SHOWN.sub(lambda m: m[1] + (EXAMPLES / m[2]).read_text(encoding="utf-8").strip() + m[4], TEXT), encoding="utf-8"
    )


if __name__ == "__main__":
    write()
