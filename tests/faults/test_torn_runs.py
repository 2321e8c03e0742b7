"""Runs whose directories were moved, torn or partly removed, or that are resumed with other keys."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataflow import resume
from dataflow.errors import ConfigError
from tests.rigs.toy_place import ToyPlace

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(100)]

STEPS, POINT = 6, 5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> ToyPlace:
    """A run with checkpoints of two steps, on-policy, so that a run that is made longer equals one that was longer."""
    place = ToyPlace(tmp_path_factory.mktemp("torn"), "mini-batch", POINT - 1)
    place.work()
    resume(place.run, steps=POINT)
    return place


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is known of a run that never stopped."""
    place = ToyPlace(tmp_path_factory.mktemp("whole"), "mini-batch", STEPS)
    place.work()
    return place.facts()


@pytest.fixture
def torn(place: ToyPlace, tmp_path: Path) -> ToyPlace:
    """A copy of the run at another place, as if it had been killed."""
    copy = ToyPlace(tmp_path, "mini-batch", STEPS)
    shutil.copytree(place.run, copy.run)
    summary = copy.run / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "status": "failed"}))
    return copy


def saved(run: Path) -> list[Path]:
    """Returns the checkpoints of a run, the newest last."""
    return sorted((run / "checkpoints").glob("step_*"))


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "trace torn": lambda run: halve(run / "trace.json"),
    "metrics gone": lambda run: (run / "metrics.jsonl").unlink(),
    "ledger gone": lambda run: [file.unlink() for file in run.glob("rewards.sqlite*")],
    "summary torn": lambda run: halve(run / "summary.json"),
    "last checkpoint torn": lambda run: halve(saved(run)[-1] / "states.pkl"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_is_resumed_to_the_same_weights(damage: str, torn: ToyPlace, whole: dict[str, Any]) -> None:
    DAMAGE[damage](torn.run)
    done = resume(torn.run, steps=STEPS)
    assert (done.summary["status"], done.summary["steps"]) == ("finished", STEPS)
    assert torn.facts()["weights"] == whole["weights"]
    assert torn.facts()["steps"] == [*range(POINT + 1 if damage == "metrics gone" else 1, STEPS + 1)]


def test_fewer_steps_than_the_checkpoint_are_refused(torn: ToyPlace) -> None:
    with pytest.raises(ConfigError, match=rf"steps=2: run '.*' has made step {POINT}; give as many steps or more"):
        resume(torn.run, steps=2)


def test_the_policy_may_be_changed_where_that_is_allowed(torn: ToyPlace) -> None:
    policy = "both+stream"
    with pytest.raises(ConfigError, match="leave it out, or allow it"):
        resume(torn.run, f"policy={policy}", steps=STEPS)
    done = resume(torn.run, f"policy={policy}", "policy.order=index", "resume.allow=[policy]", steps=STEPS)
    assert (done.summary["status"], done.summary["policy"]) == ("finished", policy)
    assert torn.facts()["steps"] == [*range(1, STEPS + 1)]
