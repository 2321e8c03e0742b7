"""Why each second of the GPUs was idle."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.rig import Ask, Judge, Record, Trainer, command, verdict

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def slow(train: Trainer) -> Iterator[tuple[Record, Ask]]:
    """A run whose judge takes two seconds for one sample of its second step; and that request."""
    chosen: list[Ask] = []

    def rule(ask: Ask) -> float:
        if len(judge.order) > 4 and not chosen:
            chosen.append(ask)
            time.sleep(2)
        return verdict(ask)

    judge = Judge(rule)
    yield train("policy=baseline", "steps=3", judge=judge), chosen[0]
    judge.close()


def test_the_causes_of_idle_time_sum_to_it(slow: tuple[Record, Ask]) -> None:
    """Nobody could tell whether rewards, the controller or a checkpoint hold the GPUs up."""
    found = slow[0].summary
    causes = found["exposed_wait_by_cause"]
    assert sum(causes.values()) == pytest.approx(found["exposed_wait_s"])
    assert found["gpu_busy_s"] + found["exposed_wait_s"] == pytest.approx(found["wall_s"], rel=1e-3)
    busy = sum(task.end - task.begin for task in slow[0].tasks if task.resource == "gpu")
    assert found["gpu_busy_s"] == pytest.approx(busy, rel=0.01)
    assert causes["rewards"] > 0.5


def test_the_sample_that_held_the_gpus_up_is_named(slow: tuple[Record, Ask]) -> None:
    """Nobody could find the request that a step waited for."""
    record, ask = slow
    shown = command("timeline", record.directory, "--json")
    assert shown.code == 0, shown.err
    waits: list[dict[str, Any]] = json.loads(shown.out)["worst_waits"]
    worst = next(wait for wait in waits if wait["cause"] == "rewards")
    row = next(r for r in record.samples if (r["prompt"], r["response"]) == (ask.question, ask.response))
    assert (worst["step"], worst["group"], worst["sample"]) == (2, row["group"], row["sample"])
    text = command("timeline", record.directory).out
    assert "waiting for rewards" in text
    assert f"step 2, group {row['group']}" in text


def test_the_record_can_be_read_by_the_commands(slow: tuple[Record, Ask], tmp_path: Path) -> None:
    """What the model said, and how two runs compare, could not be looked up after a run."""
    record, ask = slow
    shown = command("samples", record.directory, "step=2", "sort=-latency", "most=1", "--json")
    assert shown.code == 0, shown.err
    rows = json.loads(shown.out)
    rows = rows["samples"] if isinstance(rows, dict) else rows
    assert [row["response"] for row in rows] == [ask.response]
    copy = shutil.copytree(record.directory, tmp_path / "copy")
    compared = command("compare", record.directory, copy)
    assert compared.code == 0, compared.err
    assert compared.out.count("baseline") >= 2
