"""Every second in which the GPUs idle is charged to exactly one cause, the right one, and to who came last."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.timeline.causes import (
    Wait,
    critical_path,
    culprits,
    exposed_waits,
    linked,
    pool_waits,
    summary,
)
from dataflow.timeline.spans import Mark, Span, Trace

RESOURCES = ("gpu", "reward", "controller", "io", "sandbox")


def task(name: str, resource: str, begin: float, end: float, waited_for: str = "", **args: object) -> Span:
    stage, _, rest = name.partition("[")
    step, _, part = rest.rstrip("]").partition(".")
    return Span(
        stage, int(step), int(part or 1) - 1, 4 if part else 1, resource, begin, end, dict(args), waited_for
    )  # fmt: skip


def step(*spans: Span) -> Trace:
    trace = Trace()
    trace.add(*spans)
    return trace


def test_a_wait_for_rewards_is_seen_through_the_stage_between() -> None:
    trace = step(
        task("rollout[1]", "gpu", 1, 3),
        task("reward_collect[1]", "reward", 3, 10, "rollout[1]"),
        task("advantage[1]", "controller", 10.5, 11, "reward_collect[1]"),
        task("actor_update[1]", "gpu", 11.25, 14, "advantage[1]"),
    )
    assert exposed_waits(trace) == [
        Wait(3, 10, "rewards", "actor_update[1]", "reward_collect[1]"),
        Wait(10, 11, "controller", "actor_update[1]", "advantage[1]"),
        Wait(11, 11.25, "dispatch", "actor_update[1]", "actor_update[1]"),
    ]


def test_before_the_first_task_is_start_up() -> None:
    trace = step(task("load[1]", "io", 0, 2), task("rollout[1]", "gpu", 2.5, 3, "load[1]"))
    assert exposed_waits(trace) == [Wait(0, 2.5, "start-up", "rollout[1]")]


@pytest.mark.parametrize(
    ("waited_for", "cause"),
    [
        ("reward_collect[3.1]", "rewards"),
        ("val_score[3]", "rewards"),
        ("advantage[3.1]", "controller"),
        ("rollout[3]", "dispatch"),
        ("grade[3]", "grade"),
        ("", "dispatch"),
    ],
)
def test_a_task_that_left_no_span_is_judged_by_its_name(waited_for: str, cause: str) -> None:
    trace = step(task("rollout[1]", "gpu", 0, 1), task("actor_update[1]", "gpu", 2, 3, waited_for))
    assert exposed_waits(trace) == [Wait(1, 2, cause, "actor_update[1]", waited_for or "actor_update[1]")]


def test_a_wait_for_weights_is_no_wait_for_the_gpus_they_come_from() -> None:
    trace = step(
        task("rollout[1]", "rollout", 0, 1),
        task("actor_update[1]", "train", 1, 3, "rollout[1]"),
        task("gather_weights[1]", "train", 3, 4, "actor_update[1]"),
        task("sync_weights[1]", "rollout", 4.5, 5, "gather_weights[1]"),
        task("rollout[2]", "rollout", 5, 6, "sync_weights[1]"),
    )
    assert exposed_waits(trace, "rollout") == [
        Wait(1, 3, "train", "sync_weights[1]", "actor_update[1]"),
        Wait(3, 4, "weights", "sync_weights[1]", "gather_weights[1]"),
        Wait(4, 4.5, "dispatch", "sync_weights[1]", "sync_weights[1]"),
    ]


def test_a_chunk_of_a_streaming_rollout_ends_a_wait_for_it() -> None:
    trace = step(
        task("actor_update[1]", "train", 0, 1),
        task("rollout[2]", "rollout", 0, 9, emitted_s=[4, 9]),
        task("advantage[2.1]", "controller", 6, 7, "rollout[2.1]"),
        task("actor_update[2.1]", "train", 7, 8, "advantage[2.1]"),
    )
    assert exposed_waits(trace, "train")[:2] == [
        Wait(1, 4, "rollout", "actor_update[2.1]", "rollout[2.1]"),
        Wait(4, 7, "controller", "actor_update[2.1]", "advantage[2.1]"),
    ]


def test_a_late_write_is_charged_to_io_and_validation_to_nobody() -> None:
    trace = step(
        task("actor_update[1]", "gpu", 0, 1),
        task("checkpoint[1]", "io", 1, 2, "actor_update[1]"),
        task("val_rollout[1]", "gpu", 3, 5, "actor_update[1]", optional=True),
        task("val_score[1]", "reward", 5, 9, "val_rollout[1]", optional=True),
    )
    assert trace.wall == 2
    assert exposed_waits(trace) == [Wait(1, 2, "io", "checkpoint[1]", "checkpoint[1]")]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any spans: overlapping, empty, waiting for each other or for none."""
    trace = Trace()
    for i in range(draw(st.integers(0, 14))):
        # Whole 64ths: sums of them are exact, and equal times are likely.
        begin, length = draw(st.integers(0, 640)) / 64, draw(st.integers(0, 128)) / 64
        names = [s.task for s in trace.spans]
        trace.add(
            Span(
                draw(st.sampled_from(["rollout", "reward_collect", "advantage", "own"])),
                i,
                0,
                1,
                draw(st.sampled_from(RESOURCES)),
                begin,
                begin + length,
                {"optional": True} if draw(st.booleans()) else {},
                draw(st.sampled_from(["", "reward_collect[99]", "who[1]", *names])),
            )
        )
    return trace


@settings(deadline=None)
@given(traces(), st.sampled_from(RESOURCES), st.floats(0, 1))
def test_of_any_trace_each_idle_second_is_charged_once(trace: Trace, resource: str, cut: float) -> None:
    waits = exposed_waits(trace, resource)
    begin, end = trace.window
    assert all(begin <= w.begin < w.end <= end for w in waits)
    assert all(one.end <= other.begin for one, other in pairwise(waits))
    idle = sum(w.seconds for w in waits)
    assert idle == trace.wall - trace.busy(resource)
    for wait in waits:
        assert not any(s.begin < wait.end and s.end > wait.begin and s.end > s.begin for s in trace.on(resource))
    at = round((begin + cut * (end - begin)) * 64) / 64
    parts = [*exposed_waits(trace, resource, (begin, at)), *exposed_waits(trace, resource, (at, end))]
    assert sum(w.seconds for w in parts) == idle, "windows that tile the run hold the same waits"
    facts = summary(trace)
    assert facts["gpu_busy_s"] + facts["exposed_wait_s"] == facts["wall_s"]
    assert sum(facts["exposed_wait_by_cause"].values()) == facts["exposed_wait_s"]
    assert math.fsum(c.wait.seconds for c in culprits(trace, [resource])) == idle
    path, training = critical_path(trace), [s for s in trace.spans if not s.optional]
    assert bool(path) == bool(training)
    if path:
        assert path[-1].end == max(s.end for s in training)
        assert len({s.task for s in path}) == len(path)


def test_of_two_pools_of_gpus_the_mean_counts() -> None:
    trace = step(
        task("rollout[1]", "rollout", 0, 4),
        task("actor_update[1]", "train", 4, 10, "rollout[1]"),
        task("rollout[2]", "rollout", 4, 6, "rollout[1]"),
        task("reward_collect[2]", "reward", 6, 9, "rollout[2]"),
        task("actor_update[2]", "train", 12, 16, "reward_collect[2]"),
    )
    facts = summary(trace)
    assert facts["busy"]["rollout"] == 6 / 16
    assert facts["busy"]["train"] == 10 / 16
    assert facts["gpu_busy_s"] == 8
    assert facts["gpu_busy_s"] + facts["exposed_wait_s"] == facts["wall_s"]
    assert pool_waits(trace, pools=["train"]) == {"start-up": 4, "dispatch": 2}


def test_the_summary_of_a_step() -> None:
    trace = step(
        task("rollout[1]", "gpu", 0, 2),
        task("reward_collect[1]", "reward", 2, 6, "rollout[1]"),
        task("actor_update[1]", "gpu", 6, 8, "reward_collect[1]"),
        task("rollout[2]", "gpu", 8, 10),
    )
    assert summary(trace) == {
        "wall_s": 10,
        "resumed": [],
        "not_running_s": 0,
        "step_s": 5,
        "after_training_s": 0,
        "gpu_busy_s": 6,
        "exposed_wait_s": 4,
        "exposed_wait_by_cause": {"rewards": 4},
        "busy": {"gpu": 0.6, "reward": 0.4},
        "stages": {
            "rollout": {"total_s": 4, "count": 2},
            "reward_collect": {"total_s": 4, "count": 1},
            "actor_update": {"total_s": 2, "count": 1},
        },
    }


def test_a_step_that_was_interrupted_counts_for_nothing() -> None:
    """Two steps of 4 s, a third of which the rollout had ended."""
    tasks = [
        task(f"{name}[{n}]", "gpu", 4 * n + begin, 4 * n + begin + 2)
        for n in range(3)
        for name, begin in (("rollout", 0), ("actor_update", 2))
    ]
    whole, cut = Trace(tasks, meta={"status": "finished"}), Trace(tasks[:-1], meta={"status": "interrupted"})
    assert (whole.steps, summary(whole)["step_s"], summary(whole)["wall_s"]) == (3, 4, 12)
    assert (cut.steps, summary(cut)["step_s"], summary(cut)["wall_s"]) == (2, 4, 10)
    names = ("rollout", "actor_update", "val")
    stages = [{"name": name, "on": "gpu", "every": 2 if name == "val" else None} for name in names]
    first = Trace(tasks[:1], meta={"status": "failed", "job": {"pipeline": {"stages": stages}}})
    assert (first.steps, summary(first)["step_s"], summary(first)["wall_s"]) == (0, 0, 2)


# --- who came last


def request(step: int, group: int, end: float, **facts: object) -> Mark:
    return Mark("reward", "reward", 1, end, {"step": step, "group": group, "sample": 0, **facts})


def two_parts() -> Trace:
    trace = Trace()
    trace.add(
        task("rollout[1]", "gpu", 0, 1),
        task("reward_collect[1.1]", "reward", 1, 4, "rollout[1]"),
        task("actor_update[1.1]", "gpu", 4, 6, "reward_collect[1.1]"),
        task("reward_collect[1.2]", "reward", 4, 11, "rollout[1]"),
        task("actor_update[1.2]", "gpu", 11, 12, "reward_collect[1.2]"),
        request(1, 7, 2.5, part=0),
        request(1, 3, 4, part=0, how="hedged"),
        request(1, 5, 11, part=1, tries=3, throttled=2, queued_s=1.25, held_by="rate"),
        request(1, 9, 30, validation=True),
    )
    return trace


def test_each_part_has_its_own_slowest_group_and_the_longest_wait_comes_first() -> None:
    found = culprits(two_parts())
    assert [(c.wait.seconds, c.request and c.request.args["group"]) for c in found] == [(5, 5), (3, 3)]
    assert [c.words for c in found] == [
        "step 1, group 5, 3 tries, throttled 2 times, queued 1.2 s, at last for the rate limit",
        "step 1, group 3, hedged",
    ]


def test_where_requests_have_no_part_the_last_of_the_step_is_meant() -> None:
    trace = Trace()
    trace.add(
        task("rollout[2]", "gpu", 0, 1),
        task("reward_collect[2]", "reward", 1, 4, "rollout[2]"),
        task("actor_update[2]", "gpu", 4, 6, "reward_collect[2]"),
        request(2, 1, 4, queued_s=0.5),
        request(2, 0, 3),
        request(1, 8, 5),
    )
    assert [c.words for c in culprits(trace)] == ["step 2, group 1, queued 0.5 s"]


def test_other_waits_name_what_was_waited_for() -> None:
    trace = Trace()
    trace.add(
        task("load[1]", "io", 0, 1),
        task("rollout[1]", "rollout", 1, 4),
        task("actor_update[1]", "train", 4, 5, "rollout[1]"),
        task("advantage[2]", "controller", 5, 7),
        task("actor_update[2]", "train", 8, 9, "advantage[2]"),
    )
    train = culprits(trace, ["train"])
    assert [(c.wait.cause, c.words) for c in train] == [
        ("start-up", ""),
        ("controller", "step 2, advantage"),
        ("dispatch", "step 2"),
    ]


def test_a_wait_for_an_evaluation_names_its_own_request() -> None:
    trace = Trace()
    val = Span("val_score", 1, 0, 1, "reward", 1, 6, {"optional": True}, "rollout[1]")
    trace.add(task("rollout[1]", "gpu", 0, 1), val, task("rollout[2]", "gpu", 6, 7, "val_score[1]"))
    trace.add(Mark("reward", "reward", 1, 3, {"step": 1, "group": 7, "sample": 0}))
    trace.add(Mark("reward", "reward", 1, 6, {"step": 1, "group": 2, "sample": 0, "validation": True}))
    assert [(c.wait.seconds, c.words) for c in culprits(trace)] == [(5, "step 1, evaluation, group 2")]
    assert linked(trace) == [], "the page of samples holds those of training"


# --- the critical path


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
