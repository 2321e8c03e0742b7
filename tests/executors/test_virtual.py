"""The virtual clock: when chunks are emitted, and which ends are refused."""

from __future__ import annotations

import pytest

from dataflow.errors import DataflowError
from dataflow.executors.virtual import Costs, End, chunks_of
from dataflow.graph import Pipeline, Task, TaskId, stage
from dataflow.policy import SchedulingPolicy, expand
from tests.rigs.scheduling import simulate


@stage(writes="responses", on="gpu", streams=True)
def rollout(prompts): ...


def emitted(emits: int, ends: tuple[float, ...] = ()) -> list[tuple[float, tuple[int, ...] | None]]:
    return list(chunks_of(Task(TaskId(1, "rollout"), rollout, (), (), emits=emits), 8, 10.0, 20.0, ends))


def test_chunks_are_even_where_no_times_are_known() -> None:
    assert emitted(1) == []
    assert emitted(4) == [(12.5, (0, 1)), (15.0, (2, 3)), (17.5, (4, 5)), (20.0, (6, 7))]


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_a_chunk_is_emitted_when_its_last_group_has_ended(extra: int) -> None:
    ends = tuple((k + 1) ** 2 / (8 + extra) ** 2 for k in range(8 + extra))
    times = [at for at, _groups in emitted(4, ends)]
    lasts = [-(-(k + 1) * (8 + extra) // 4) for k in range(4)]  # of the groups, extra ones included
    assert times == [10.0 + 10.0 * ends[last - 1] for last in lasts]


def test_costs_that_end_before_they_begin_are_an_error() -> None:
    class Back(Costs):
        def start(self, task: Task, groups: tuple[int, ...] | None, now: float) -> End:
            return End(now - 1.0)

    graph = expand(Pipeline([rollout], inputs=["prompts"]), SchedulingPolicy(), 1)
    with pytest.raises(DataflowError, match=r"rollout\[1\] started at 0.0.* begins at 0.0 and ends at -1.0"):
        simulate(graph, Back())
