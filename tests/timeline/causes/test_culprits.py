"""A wait for rewards names the group that arrived last, and what happened to its request."""

from __future__ import annotations

from dataflow.timeline.causes.culprits import culprits, linked
from dataflow.timeline.spans import Mark, Span, Trace
from tests.timeline.causes.test_attribution import task


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
    trace.add(task("rollout[1]", "gpu", 0, 1))
    trace.add(
        task("reward_collect[1]", "reward", 1, 3, "rollout[1]"),
        Mark("reward", "reward", 1, 3, {"step": 1, "group": 7, "sample": 0}),
    )
    trace.add(task("actor_update[1]", "gpu", 3, 4, "reward_collect[1]"))
    late = Span("val_score", 1, 0, 1, "reward", 4, 9, {"optional": True}, "actor_update[1]")
    trace.add(late, Mark("reward", "reward", 4, 9, {"step": 1, "group": 2, "sample": 0, "validation": True}))
    trace.add(Span("write_val_samples", 1, 0, 1, "io", 9, 9.5, {"optional": True}, "val_score[1]"))
    (found, *_) = culprits(trace, ["gpu"], after=True)
    assert (found.wait.seconds, found.words) == (5, "step 1, evaluation, group 2")
    assert linked(trace) == [(1, 7)], "the page of samples holds those of training"
