"""The record of a run that is killed and resumed: nothing of what was recorded is lost or counted twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.running.directory import remove_temporary
from dataflow.running.record import Backends, Record
from dataflow.running.remains import EVALUATIONS, finish
from dataflow.testing import grpo_pipeline
from dataflow.timeline import perfetto
from dataflow.timeline.spans import Mark, Span
from tests.rigs.checkpoints import Child, killed_before_each_operation
from tests.rigs.logs import logged

STEPS, POINT, AHEAD = 4, 2, 1
META = {"status": "running", "resources": {"gpu": 1, "reward": None}, "started": 100.0}


def opened(directory: Path) -> Record:
    record = Record(directory, Backends([]))
    record.open(META)
    return record


def evaluate(record: Record, step: int = 0) -> None:
    """Adds an evaluation outside of the run's clock, with two requests."""
    marks = [Mark("reward", "reward", at, at + 0.5, {"step": step, "how": "call", "tries": 1}) for at in (0.0, 0.25)]
    record.before.add(Span("val_score", step, 0, 1, "reward", 0.0, 1.0, {"requests": 2}), *marks)
    record.step(step, {"val-core/score": 0.5 + step}, 10)


def train(record: Record, step: int, **metrics: float) -> None:
    """Adds a step with further metrics, with the rollout of the next one."""
    mark = Mark("reward", "reward", step, step + 0.5, {"step": step, "how": "call", "tries": 2})
    record.trace.add(Span("reward_collect", step, 0, 1, "reward", step, step + 0.5, {"requests": 1}), mark)
    record.trace.add(Span("rollout", step + AHEAD, 0, 1, "gpu", step, step + 0.9))
    record.trace.add(Span("actor_update", step, 0, 1, "gpu", step + 0.9, step + 1.0))
    record.step(step, {"reward/tokens": 10, **metrics}, 10)


def go_on(directory: Path) -> Record:
    """Opens the record as a process does that resumes the run from step POINT."""
    remove_temporary(directory)
    record = Record(directory, Backends([]))
    record.load()
    record.cut(POINT, frozenset({"rollout"}), AHEAD)
    record.open(META)
    record.begin(200.0)
    return record


def facts(record: Record) -> dict[str, Any]:
    """Returns what the files of a record and its summary say, once it is closed."""
    record.summarise(1.0)
    record.leave(1.0)
    record.close()
    trace = perfetto.load(str(record.directory))
    rows = [json.loads(line) for line in (record.directory / "metrics.jsonl").read_text().splitlines()]
    return {
        "tasks": [span.task for span in trace.spans],
        "marks": len(trace.marks),
        "rows": [row["step"] for row in rows],
        "evaluations": record.evaluations,
        "rewards": record.summary["rewards"],
    }


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """The directory of a run whose process ended after STEPS steps, without closing anything."""
    record = opened(tmp_path)
    evaluate(record)
    record.begin(100.0)
    for step in range(1, STEPS + 1):
        train(record, step)
    yield tmp_path
    record.leave(1.0)
    record.close()


def test_the_summary_counts_the_evaluation_before_the_kill(killed: Path) -> None:
    record = go_on(killed)
    for step in range(POINT + 1, STEPS + 1):
        train(record, step)
    found = facts(record)
    assert found["rewards"]["requested"] == 2 + STEPS
    assert found["rewards"]["retried"] == STEPS
    assert found["evaluations"] == {0: 0.5}
    assert found["rows"] == [0, *range(1, STEPS + 1)]


def test_the_time_in_all_of_a_resumed_run_counts_all_its_processes(killed: Path) -> None:
    record = go_on(killed)
    record.summarise(7.0)
    assert record.summary["total_s"] == STEPS + 1 + 7.0, "the killed process, from second 0 to the end of its last task"
    record.leave(7.0)
    record.close()
    again = go_on(killed)
    again.summarise(3.0)
    assert again.summary["total_s"] == STEPS + 1 + 7.0 + 3.0
    again.leave(3.0)
    again.close()


def test_the_summary_of_a_killed_run_counts_it_too(killed: Path) -> None:
    finish(killed, "failed", STEPS)
    summary = json.loads((killed / "summary.json").read_text())
    assert summary["rewards"]["requested"] == 2 + STEPS
    assert summary["status"] == "failed"


def test_a_summary_is_of_the_last_attempt(killed: Path) -> None:
    record = go_on(killed)
    record.leave(1.0)  # as the trainer died
    record.cut(POINT, frozenset({"rollout"}), AHEAD)
    record.open(META)
    for step in range(POINT + 1, STEPS + 1):
        train(record, step)
    assert finish(killed, "failed", STEPS + 2).startswith(f"stopped after {STEPS} of {STEPS + 2} steps")
    record.leave(1.0)
    record.close()


def test_what_was_paid_never_falls_whenever_a_process_is_killed(killed: Path) -> None:
    def spent() -> tuple[int, int]:
        """Returns what a supervisor writes, and checks that the next process begins with it."""
        finish(killed, "failed", STEPS)
        counts = json.loads((killed / "summary.json").read_text())["rewards"]
        (killed / "summary.json").unlink()
        again = Record(killed, Backends([]))
        again.load()
        again.summarise(0.0)
        assert again.summary["rewards"] == counts
        return counts["tokens"], counts["hedged"]

    record = go_on(killed)
    record.leave(1.0, {"reward": {"tokens": 7, "hedged": 2}})  # interrupted: after the last row
    record.close()
    unopened = Record(killed, Backends([]))
    unopened.load()
    unopened.cut(POINT, frozenset({"rollout"}), AHEAD)  # killed while its services start
    assert json.loads((killed / "summary.json").read_text())["rewards"]["tokens"] == 10 * STEPS + 7
    record = go_on(killed)
    assert spent() == (10 * STEPS + 7, 2)
    train(record, POINT + 1)
    assert spent() == (10 * STEPS + 7 + 10, 2)
    record.leave(1.0, {"reward": {"tokens": 15, "hedged": 0}})  # the trainer died
    record.cut(POINT, frozenset({"rollout"}), AHEAD)
    record.open(META)
    assert spent() == (10 * STEPS + 7 + 15, 2)
    record.leave(1.0)
    record.close()


def test_evaluations_after_the_checkpoint_are_not_counted(killed: Path) -> None:
    record = go_on(killed)
    evaluate(record, POINT)
    evaluate(record, POINT + 1)
    record.leave(1.0)
    record.close()
    assert facts(go_on(killed))["rewards"]["requested"] == 2 + POINT + 2
    assert [span.step for span in perfetto.read(killed / EVALUATIONS).spans] == [0, POINT, POINT + 1]


def test_evaluations_that_cannot_be_read_are_left_out(killed: Path) -> None:
    (killed / EVALUATIONS).write_text("[1")
    assert facts(go_on(killed))["rewards"]["requested"] == POINT


def test_an_evaluation_that_was_not_scored_before_the_kill_is_said(tmp_path: Path) -> None:
    pipeline = grpo_pipeline(val_every=1)
    record = Record(tmp_path, Backends([]))
    record.open({**META, "job": {"pipeline": pipeline.facts()}})
    evaluate(record)
    record.begin(100.0)
    for step in range(1, STEPS + 1):
        train(record, step)
    evaluate(record, 2)  # those of steps 1 and 3 are still being scored
    for point, sentence in ((4, "no evaluation of step 1, 3: "), (2, "no evaluation of step 1: "), (1, None)):
        with logged() as warnings:
            record.cut(point, frozenset(), 0)
        assert [sentence in text for text in warnings if sentence] == [True] * bool(sentence), warnings
        assert sentence or not warnings
    record.open(META)
    record.leave(1.0)
    record.close()


@pytest.mark.parametrize(
    ("point", "said"),
    [(STEPS, {}), (STEPS + 1, {"metrics.jsonl": STEPS}),
     (STEPS + AHEAD + 1, {"metrics.jsonl": STEPS, "trace.json": STEPS + AHEAD})],
)  # fmt: skip
def test_a_record_that_ends_before_the_checkpoint_is_said(killed: Path, point: int, said: dict[str, int]) -> None:
    record = Record(killed, Backends([]))
    record.load()
    with logged() as warnings:
        record.cut(point, frozenset(), 0)
    assert len(warnings) == len(said)
    for warning, (name, last) in zip(warnings, said.items(), strict=True):
        assert f"{name} ends in step {last}, but the checkpoint is of step {point}: " in warning


def test_metrics_that_are_no_text_are_left_out(killed: Path) -> None:
    metrics = killed / "metrics.jsonl"
    metrics.write_bytes(b"\xff\xfe\n" + metrics.read_bytes())
    assert facts(go_on(killed))["rows"][-POINT:] == list(range(1, POINT + 1))


@pytest.mark.parametrize(
    ("most", "warned"),
    [([0, 0, 0, 0, 0], ["steps 1 to 3 trained nothing"]), ([0, 0, 0.5, 0, 0], []), ([1, 0, 0, 0], ["steps 2 to 4"])],
)
def test_steps_that_train_nothing_are_said_once(most: list[float], warned: list[str], tmp_path: Path) -> None:
    record = opened(tmp_path)
    record.begin(100.0)
    with logged() as warnings:
        for step, value in enumerate(most, 1):
            score = {"critic/score/mean": 0.25, "critic/advantages/max": value, "critic/advantages/min": -value}
            train(record, step, **score)
            record.step(step, {"late": 1.0}, 10)
    assert [text in line for text, line in zip(warned, warnings, strict=True)] == [True] * len(warned)
    assert all("score (mean 0.25); look" in line and f"'dataflow samples {tmp_path}'" in line for line in warnings)
    record.leave(1.0)
    record.close()


def cut_under_kills(place: str) -> None:
    """Resumes a run; checks what is left after a kill before each of its operations on files."""
    directory, first = Path(place), {"tasks": POINT * 3, "marks": POINT}
    whole = {file.name: file.read_bytes() for file in directory.iterdir()}

    def resume() -> None:
        record = go_on(directory)
        evaluate(record, POINT)
        train(record, POINT + 1)

    kills = 0
    for code in killed_before_each_operation(resume):
        assert code in (0, -9)
        kills += code == -9
        found = facts(go_on(directory))
        assert {name: found[name] if name == "marks" else len(found[name]) for name in first} == first, kills
        assert found["rows"][: POINT + 1] == [0, 1, 2], kills
        # With the second evaluation or without it.
        assert found["rewards"]["requested"] in (2 + POINT, 2 + POINT + 2), kills
        assert not list(directory.glob(".*")), kills
        for name, content in whole.items():
            (directory / name).write_bytes(content)
    assert kills > 8


@pytest.mark.slow
def test_a_kill_while_the_files_are_cut_loses_nothing(killed: Path) -> None:
    assert Child(cut_under_kills, str(killed)).wait() == 0
