"""The record of a run that is killed and resumed: nothing of what was recorded is lost or counted twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.running.directory import LOCK, locked
from dataflow.running.record import Record, finish_killed
from dataflow.running.summary import SUMMARY, read_summary
from dataflow.timeline import perfetto
from dataflow.timeline.spans import Mark, Span
from tests.rigs.checkpoints import Child, killed_before_each_operation
from tests.rigs.logs import logged

STEPS, POINT, AHEAD = 4, 2, 1
META = {"status": "running", "resources": {"gpu": 1, "reward": None}, "started": 100.0}


def opened(directory: Path) -> Record:
    record = Record(directory)
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
    with locked(directory):  # removes what the killed process left aside
        record = Record(directory)
    record.load()
    record.cut(POINT, frozenset({"rollout"}), AHEAD)
    record.open(META)
    record.begin(200.0)
    return record


def facts(record: Record) -> dict[str, Any]:
    """Returns what the files of a record and its summary say, once it is closed."""
    record.end("finished", 1.0)
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
    record.end("failed", 1.0)


def test_a_resumed_run_has_each_task_each_row_and_each_request_once(killed: Path) -> None:
    record = go_on(killed)
    evaluate(record, POINT)
    for step in range(POINT + 1, STEPS + 1):
        train(record, step)
    found = facts(record)
    assert found["rows"] == [0, 1, 2, POINT, 3, 4]
    assert sorted(found["tasks"]) == sorted({*found["tasks"]})
    assert (found["rewards"]["requested"], found["rewards"]["retried"]) == (2 + STEPS, STEPS), "of this process's own"
    assert found["rewards"]["tokens"] == 10 * STEPS
    assert found["evaluations"] == {0: 0.5, POINT: 0.5 + POINT}
    assert read_summary(killed)["resumed"] == [POINT]
    # From the same checkpoint again: the evaluation is kept.
    assert facts(go_on(killed))["evaluations"] == {0: 0.5, POINT: 0.5 + POINT}


def test_the_time_in_all_of_a_resumed_run_counts_all_its_processes(killed: Path) -> None:
    record = go_on(killed)
    record.end("failed", 7.0)
    traced = STEPS + 1  # of the killed process, from second 0 to the end of its last task
    assert record.summary["total_s"] == traced + 7.0
    again = go_on(killed)
    again.end("finished", 3.0)
    assert again.summary["total_s"] == traced + 7.0 + 3.0


def test_the_summary_of_a_killed_run_is_made_from_its_files_and_is_of_its_last_attempt(killed: Path) -> None:
    said = finish_killed(killed, "failed", STEPS + 2)
    again = f"'dataflow run' with name={killed.name} and resume=auto begins it again"
    drawn = f"'dataflow timeline {killed} -o {killed}.html' draws what it did"
    assert said == f"stopped after {STEPS} of {STEPS + 2} steps; {again}, {drawn}"
    summary = read_summary(killed)
    assert (summary["status"], summary["steps"], summary["rewards"]["requested"]) == ("failed", STEPS, STEPS)
    assert summary["rewards"]["tokens"] == 10 * STEPS
    record = go_on(killed)
    assert not (killed / SUMMARY).exists(), "it was of the process before"
    record.end("failed", 1.0)  # as the trainer died
    record.cut(POINT, frozenset({"rollout"}), AHEAD)
    record.open(META)
    for step in range(POINT + 1, STEPS):
        train(record, step)
    assert finish_killed(killed, "failed", STEPS).startswith(f"stopped after {STEPS - 1} of {STEPS} steps")


@pytest.mark.parametrize("file", ["trace.json", "metrics.jsonl", SUMMARY])
def test_a_run_goes_on_without_a_file_that_cannot_be_read(killed: Path, file: str) -> None:
    (killed / file).write_text("[1")
    assert facts(go_on(killed))["rewards"].get("requested", 0) == (0 if file == "trace.json" else POINT)


@pytest.mark.parametrize(
    ("most", "warned"),
    [([0, 0, 0, 0, 0], ["steps 1 to 3 trained nothing"]), ([0, 0, 0.5, 0, 0], [])],
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
    record.end("failed", 1.0)


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
        assert found["rewards"]["requested"] == POINT, kills
        assert [file.name for file in directory.glob(".*")] == [LOCK], kills
        for name, content in whole.items():
            (directory / name).write_bytes(content)
    assert kills > 8


@pytest.mark.slow
def test_a_kill_while_the_files_are_cut_loses_nothing(killed: Path) -> None:
    assert Child(cut_under_kills, str(killed)).wait() == 0
