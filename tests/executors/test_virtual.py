"""The virtual clock: when chunks are emitted, and which costs are required."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataflow.errors import DataflowError
from dataflow.executors.virtual import chunks_of
from dataflow.graph import Pipeline, Task, TaskId, stage
from dataflow.policy import SchedulingPolicy, expand
from dataflow.testing import grpo_pipeline
from tests.rigs.costs import SteadyCosts
from tests.rigs.scheduling import simulate


@stage(writes="responses", on="gpu", streams=True)
def rollout(prompts): ...


def emitted(emits: int, ends: tuple[float, ...] = ()) -> list[tuple[float, tuple[int, ...] | None]]:
    return list(chunks_of(Task(TaskId(1, "rollout"), rollout, (), (), emits=emits), 8, 10.0, 20.0, ends))


def test_a_task_that_does_not_stream_emits_nothing() -> None:
    assert emitted(1) == []


def test_chunks_are_even_where_no_times_are_known() -> None:
    assert emitted(4) == [(12.5, (0, 1)), (15.0, (2, 3)), (17.5, (4, 5)), (20.0, (6, 7))]


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_a_chunk_is_emitted_when_its_last_group_has_ended(extra: int) -> None:
    ends = tuple((k + 1) ** 2 / (8 + extra) ** 2 for k in range(8 + extra))
    times = [at for at, _groups in emitted(4, ends)]
    lasts = [-(-(k + 1) * (8 + extra) // 4) for k in range(4)]  # of the groups, extra ones included
    assert times == [10.0 + 10.0 * ends[last - 1] for last in lasts]
    assert times[-1] == 20.0


def test_costs_of_a_stage_without_seconds_say_how_to_give_them() -> None:
    graph = expand(
        Pipeline([rollout.bind(name="rollouts")], inputs=["prompts", "weights_version"]), SchedulingPolicy(), 1
    )
    with pytest.raises(DataflowError, match=r"no seconds for stage 'rollouts'; did you mean 'rollout'\?; give"):
        simulate(graph, SteadyCosts())


def test_costs_of_rewards_that_nothing_requests_say_what_is_missing() -> None:
    stages = [replace(s, role=None) if s.role == "requests" else s for s in grpo_pipeline().stages]
    graph = expand(Pipeline(stages, inputs=["prompts"]), SchedulingPolicy(), 1)
    with pytest.raises(DataflowError, match="'reward_collect' collects rewards, but reads nothing from a stage with"):
        simulate(graph, SteadyCosts())
