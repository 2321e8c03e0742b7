"""The record of submissions for a service that may be rebuilt: groups not yet collected, while they are needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dataflow.errors import DataflowError, RunError, ServiceLost
from dataflow.executors.base import StageCall
from dataflow.executors.ray.replays import Replays, Submission
from dataflow.executors.ray.worker_group import WorkerGroup
from dataflow.graph import Carried, Hosted, Pipeline, Stage, Task, TaskId, TaskInfo, stage
from dataflow.usercode.failures import causes_of

DESK = Hosted("desk", dict)
OTHER = Hosted("other", dict)
GROUPS = tuple(range(8))


@stage(writes="ticket", on="controller", per_chunk=True, replays=True)
def request(prompts, *, desk): ...


@stage(writes="rewards", on="reward", role="collects")
def collect(ticket, *, desk): ...


@stage(writes="through", on="controller")
def elsewhere(ticket): ...


@stage(writes="late", on="reward")
def collect_late(through, *, desk): ...


def replays(*stages: Stage) -> Replays:
    found = Replays("desk")
    found.learn(Pipeline(stages, inputs=["prompts"]))
    return found


def usual() -> Replays:
    return replays(request.bind(desk=DESK), collect.bind(desk=DESK))


def task(s: Stage, step: int, part: int = 0, parts: int = 1) -> Task:
    return Task(TaskId(step, s.name, part, parts), s, (), ())


def submitted(step: int, groups: tuple[int, ...] = GROUPS, part: int = 0, parts: int = 1) -> Submission:
    """A finished request; one of several names its groups in the call."""
    named = groups if parts > 1 else None
    call = StageCall("request", TaskInfo(step, "request", part, parts, named), (("prompts", 1, False),), named)
    return Submission(task(request, step, part, parts), call, (f"prompts {step}",), groups)


def submit(kept: Replays, submission: Submission) -> None:
    kept.ended(submission, submission.task, None)


def hand_out(kept: Replays, step: int, part: int, parts: int, groups: tuple[int, ...]) -> None:
    kept.ended(None, task(collect, step, part, parts), groups)


def test_what_was_not_returned_is_submitted_again_the_older_step_first() -> None:
    kept = usual()
    submit(kept, submitted(2))
    submit(kept, submitted(1))
    assert kept.left() == [submitted(1), submitted(2)]
    hand_out(kept, 1, 0, 4, (5, 2))
    hand_out(kept, 1, 1, 4, (0, 7))
    again, _later = kept.left()
    assert again.groups == again.call.groups == again.call.info.groups == (1, 3, 4, 6)
    assert (again.values, again.call.layout) == (("prompts 1",), submitted(1).call.layout)
    submit(kept, again)  # as it ends in the rebuilt service, which dies too
    assert kept.left() == [again, submitted(2)]
    hand_out(kept, 1, 2, 4, (3, 6))
    assert [s.groups for s in kept.left()] == [(1, 4), GROUPS]


def test_several_submissions_of_a_step_each_for_its_rest() -> None:
    kept = usual()
    submit(kept, submitted(1, (0, 1), 0, 3))
    submit(kept, submitted(1, (2, 3), 1, 3))
    hand_out(kept, 1, 0, 4, (0, 1, 2))
    assert [(s.task.id.part, s.groups) for s in kept.left()] == [(1, (3,))]
    # The third one had reached the service, which returned a group of it, but the answer was lost.
    hand_out(kept, 1, 1, 4, (4,))
    under_way = submitted(1, (4, 5), 2, 3)
    call = kept.narrowed(under_way.task, under_way.call)
    assert call.groups == call.info.groups == (5,)
    hand_out(kept, 1, 2, 4, (5,))
    call = kept.narrowed(under_way.task, under_way.call)
    assert call.groups == ()
    submit(kept, Submission(under_way.task, call, under_way.values, ()))
    assert [s.groups for s in kept.left()] == [(3,)]
    whole = submitted(2)
    assert kept.narrowed(whole.task, whole.call) is whole.call


def test_a_long_run_keeps_no_more_than_the_steps_in_flight() -> None:
    kept = usual()
    most = 0
    submit(kept, submitted(1))
    for step in range(1, 1000):
        submit(kept, submitted(step + 1))  # off-policy: the next step's before this one's are collected
        most = max(most, len(kept))
        for part in range(2):
            hand_out(kept, step, part, 2, (part,))  # not all groups: a failure rule may drop some
    assert most == 2
    assert len(kept) == 1


def test_who_collects_may_lie_behind_a_stage_elsewhere() -> None:
    kept = replays(request.bind(desk=DESK), elsewhere, collect_late.bind(desk=DESK))
    submit(kept, submitted(1))
    kept.ended(None, task(elsewhere, 1), None)
    assert [s.groups for s in kept.left()] == [GROUPS], "it returns nothing: it is not a stage of the service"
    kept.ended(None, task(collect_late, 1), None)
    assert len(kept) == 0


def test_what_no_stage_of_the_service_collects_is_not_kept() -> None:
    for stages in (
        (request.bind(desk=DESK),),
        (request.bind(desk=DESK), collect.bind(desk=OTHER)),
        (request.bind(desk=OTHER), collect.bind(desk=DESK)),
        (request.bind(desk=DESK), elsewhere, collect_late.bind(desk=DESK, every=2)),
    ):
        kept = replays(*stages)
        submit(kept, submitted(1))
        assert len(kept) == 0


@stage(writes="weights", on="gpu", replays=True)
def load(actor_weights, *, desk): ...


@stage(writes="responses", on="gpu")
def sample(prompts, weights: Carried, *, desk): ...


def loaded(step: int) -> Submission:
    call = StageCall("load", TaskInfo(step, "load"), (("actor_weights", 1, False),), None)
    return Submission(task(load, step), call, (f"weights {step}",), ())


def test_of_a_state_the_newest_counts_whatever_its_step() -> None:
    kept = Replays("desk")
    kept.learn(Pipeline([load.bind(desk=DESK), sample.bind(desk=DESK)], inputs=["prompts", "actor_weights"]))
    submit(kept, loaded(1))
    submit(kept, loaded(2))
    assert [s.values for s in kept.left()] == [("weights 2",)]


def test_a_stage_that_replays_leaves_groups_or_a_state() -> None:
    with pytest.raises(DataflowError, match="'request' replays, so it must read a Batch"):
        submit(usual(), submitted(1, ()))


def test_a_service_that_froze_three_times_ends_the_run() -> None:
    group: Any = SimpleNamespace(spec=Hosted("desk", dict, restarts=9), deaths=1, actors=SimpleNamespace(freezes=2))
    WorkerGroup._count(group, RunError(""), "it slept")
    group.actors.freezes = 3
    with pytest.raises(RunError, match="'desk' froze 3 times; the last: it slept"):
        WorkerGroup._count(group, RunError(""), "it slept")


def test_a_replay_that_lacks_a_lost_value_still_tells_the_run_to_resume() -> None:
    lost, error = ServiceLost("a value is gone"), RunError("'desk' died, and request[1] could not run again")
    error.__cause__ = lost
    group: Any = SimpleNamespace(spec=DESK)
    with pytest.raises(RunError) as caught:
        WorkerGroup._raise_not_built(group, error)
    assert lost in causes_of(caught.value)
