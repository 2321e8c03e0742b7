"""A run that is killed, or interrupted, goes on as if nothing had happened, and pays for no answer twice."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import dataflow
from tests.contract.rig import PIPELINE, Ask, Command, Done, Judge, Record, Trainer, command, until, verdict

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

KEYS = ("policy=both", "policy.order=index", "steps=6", "checkpoint.every=2", "reward.timeout=200")


@pytest.fixture(scope="module")
def judged() -> Iterator[Judge]:
    judge = Judge()
    yield judge
    judge.close()


@pytest.fixture(scope="module")
def whole(train: Trainer, judged: Judge) -> Record:
    """A run that never stopped."""
    record = train(*KEYS, judge=judged)
    assert min(record.metrics[step]["actor/grad_norm"] for step in range(1, 7)) > 0
    return record


def holds(judge: Judge, problems: int) -> None:
    """Lets the judge answer nothing about problems that come after so many others, until its rule is changed."""

    def rule(ask: Ask) -> float:
        until(lambda: ask.problem in judge.order[:problems] or judge.rule is not rule, "the judge's release", 150)
        return verdict(ask)

    judge.rule = rule


@dataclass
class Killed:
    """A run that was killed with SIGKILL in its fourth step, and resumed by a command.

    Attributes:
        answered: what the judge had answered before.
        asked_again: what it was asked after the resume.
        left: processes that outlived the kill.
        resumed: the command that resumed it.
    """

    record: Record
    answered: set[str]
    asked_again: list[str]
    left: list[psutil.Process]
    resumed: Done


@pytest.fixture(scope="module")
def killed(train: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    folder, judge = tmp_path_factory.mktemp("killed"), Judge()
    record = Record(folder / "run")
    holds(judge, 14)  # of three steps, and half of the fourth
    running = Command("run", PIPELINE, *train.arguments(*KEYS, f"runs={folder}", "name=run", judge=judge))
    until(lambda: record.has("actor_update", 3, 1) and len(judge.answered) == 56, "the third step", 200)
    until(lambda: (folder / "run" / "checkpoints" / "step_000002" / "manifest.json").exists(), "the checkpoint")
    time.sleep(2)  # an answer is written down within some tens of milliseconds
    answered, processes = {ask.text for ask in judge.answered}, running.processes()
    running.kill()
    _ended, left = psutil.wait_procs(processes, timeout=30)
    before, judge.rule = len(judge.asked), verdict
    resumed = command("resume", record.directory, seconds=200)
    yield Killed(record, answered, [ask.text for ask in judge.asked[before:]], left, resumed)
    judge.close()


def test_a_killed_run_ends_with_the_weights_of_one_that_never_stopped(killed: Killed, whole: Record) -> None:
    """After a crash the result would be another one, or the run be lost."""
    assert killed.resumed.code == 0, killed.resumed.err
    assert killed.record.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert killed.record.summary["status"] == "finished"
    assert killed.record.summary["resumed"] == [2]


def test_no_answer_is_paid_for_twice(killed: Killed, whole: Record) -> None:
    """A judge would be paid again for each step that is trained again."""
    assert len(killed.answered) == 56
    assert not killed.answered & set(killed.asked_again)
    assert len(killed.asked_again) == len(set(killed.asked_again))
    found = killed.record.summary["rewards"]
    assert found["requested"] == found["scored"] + found["failed"] + found["cancelled"]
    assert (found["scored"], found["failed"]) == (96, 0)
    assert found["cached"] >= 24, "those of step 3, and half of step 4"
    assert [row["score"] for row in killed.record.samples] == [row["score"] for row in whole.samples]


def test_trace_and_metrics_are_those_of_one_run(killed: Killed, whole: Record) -> None:
    """Steps would be missing or twice in the curves, and the time of the kill count as a wait."""
    assert sorted(killed.record.metrics) == sorted(whole.metrics)
    for step, row in whole.metrics.items():
        assert killed.record.metrics[step]["critic/score/mean"] == row["critic/score/mean"]
        assert killed.record.metrics[step]["actor/pg_loss"] == row["actor/pg_loss"]
    lines = (killed.record.directory / "metrics.jsonl").read_text().splitlines()
    assert sum('"timing_s/step"' in line for line in lines) == 6

    def trained(record: Record) -> list[tuple[str, int, int]]:
        return sorted((t.stage, t.step, t.part) for t in record.tasks if t.stage in ("rollout", "actor_update"))

    assert trained(killed.record) == trained(whole)
    assert killed.record.summary["not_running_s"] > 0
    assert killed.record.meta["status"] == "finished"


def test_no_process_outlives_the_kill(killed: Killed) -> None:
    """GPUs would stay taken by what nobody can find."""
    assert not killed.left


def test_an_interrupted_run_saves_says_so_and_goes_on(train: Trainer, whole: Record, tmp_path: Path) -> None:
    """Whoever presses Ctrl-C, or is preempted, would lose all steps since the last checkpoint."""
    judge, record = Judge(), Record(tmp_path / "run")
    holds(judge, 12)
    more = ("checkpoint.every=100", f"runs={tmp_path}", "name=run")
    running = Command("run", PIPELINE, *train.arguments(*KEYS, *more, judge=judge))
    until(lambda: record.has("actor_update", 3) and len(judge.order) > 12, "step 4", 200)
    running.signal(signal.SIGTERM)
    judge.rule = verdict
    done = running.done()
    assert done.code == 143
    assert "dataflow resume" in done.err
    assert record.summary["status"] == "interrupted"
    assert dataflow.resume(record.directory, "checkpoint.every=100").summary["status"] == "finished"
    assert record.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert record.summary["resumed"][0] >= 3
    judge.close()
