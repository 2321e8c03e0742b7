"""The critical path: a chain back from the end, along the last dependency of each task."""

from __future__ import annotations

from dataflow.timeline.causes.critical import critical_path
from dataflow.timeline.spans import Trace
from tests.timeline.causes.test_attribution import step, task


def names(trace: Trace) -> list[str]:
    return [span.task for span in critical_path(trace)]


def test_along_dependencies_and_along_the_slot() -> None:
    trace = step(
        task("rollout[1]", "gpu", 0, 2),
        task("reward_collect[1]", "reward", 2, 6, "rollout[1]"),
        task("rollout[2]", "gpu", 2, 7, "rollout[1]"),
        task("actor_update[1]", "gpu", 7, 9, "reward_collect[1]"),
    )
    trace.meta["resources"] = {"gpu": 1, "reward": None}
    assert names(trace) == ["rollout[1]", "rollout[2]", "actor_update[1]"]
    trace.meta["resources"] = {"gpu": None, "reward": None}
    assert names(trace) == ["rollout[1]", "reward_collect[1]", "actor_update[1]"]


def test_validation_behind_the_end_is_not_on_it_but_what_held_up_training_is() -> None:
    trace = step(
        task("actor_update[1]", "gpu", 0, 1),
        task("val_rollout[1]", "gpu", 1, 5, "actor_update[1]", optional=True),
        task("actor_update[2]", "gpu", 5, 6, "actor_update[1]"),
        task("val_score[1]", "reward", 5, 9, "val_rollout[1]", optional=True),
    )
    assert names(trace) == ["actor_update[1]", "val_rollout[1]", "actor_update[2]"]


def test_of_a_streaming_rollout_only_what_was_waited_for() -> None:
    trace = step(
        task("rollout[1]", "rollout", 0, 9, emitted_s=[4, 9]),
        task("actor_update[1.1]", "train", 5, 10, "rollout[1.1]"),
    )
    first, last = critical_path(trace)
    assert (first.task, first.begin, first.end, last.task) == ("rollout[1.1]", 0, 4, "actor_update[1.1]")
