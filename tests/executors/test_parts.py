"""A stage that forms parts, streams chunks or returns rows wrongly ends the run, instead of training on wrong data."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.errors import StageFailed
from dataflow.executors.inline import InlineExecutor
from dataflow.graph import Latest, Pipeline, Stage, TaskInfo, stage
from dataflow.policy import SchedulingPolicy, expand
from dataflow.runner import Runner
from dataflow.timeline.spans import Trace

pytestmark = pytest.mark.timeout(60)
GROUPS, SPLIT, N = 8, 4, 2
TAKE = GROUPS // SPLIT
Plan = Sequence[Sequence[int]]
RIGHT: Plan = [[0, 1], [2, 3], [4, 5], [6, 7]]


def batch(groups: Sequence[int], n: int = N) -> Batch:
    return Batch([g for g in groups for _ in range(n)], {"at": [(g, i) for g in groups for i in range(n)]})


@stage(writes="responses", on="gpu")
def rollout(prompts: Batch) -> Batch:
    return batch(prompts.ids)


@stage(writes="rewards", on="reward", role="collects")
def collect(responses: Batch, *, plan: Plan, task: TaskInfo) -> Batch:
    """Names the groups of the plan."""
    return batch(plan[task.part])


@stage(writes="actor", on="gpu", per_mini_batch=True)
def update(rewards: Batch, actor: Latest, *, task: TaskInfo) -> tuple[int, ...]:
    """Returns the groups that the step has trained on; it trusts the rewards alone."""
    return (*(actor or ()), *rewards.ids)


@stage(writes="saved", on="io")
def save(actor: Any, *, trained: list[int]) -> None:
    trained.extend(actor)


def run(
    stages: Sequence[Stage],
    policy: SchedulingPolicy,
    groups: int | None = GROUPS,
    mini_batches: int = SPLIT,
    prompts: int = GROUPS,
) -> None:
    graph = expand(Pipeline(stages, inputs=["prompts"]), policy, 1, mini_batches, groups=groups)
    asked = batch(range(prompts), 1)
    runner = Runner(graph, InlineExecutor(), inputs={"prompts": lambda step: asked}, trace=Trace())
    asyncio.run(asyncio.wait_for(runner.run(), 50))


def train(plan: Plan, order: Any = "arrival", prompts: int = GROUPS) -> list[int]:
    """Returns the groups that were trained, in order."""
    trained: list[int] = []
    stages = [rollout, collect.bind(plan=plan), update, save.bind(trained=trained)]
    run(stages, SchedulingPolicy(split=SPLIT, order=order), prompts=prompts)
    return trained


def wrong(plan: Plan, order: str) -> bool:
    """Whether the parts are not disjoint, known, of the right size and in order (if asked for)."""
    named = [g for groups in plan for g in groups]
    sizes = any(len(groups) != TAKE for groups in plan)
    strange = any(g >= GROUPS for g in named)
    return sizes or strange or len(set(named)) < len(named) or (order == "index" and named != sorted(named))


# Small changes of a right plan: most lists of lists are wrong in every way at once.
@st.composite
def plans(draw: st.DrawFn) -> Plan:
    named = draw(st.permutations(range(GROUPS))) if draw(st.booleans()) else list(range(GROUPS))
    plan = [list(named[i * TAKE : (i + 1) * TAKE]) for i in range(SPLIT)]
    for _ in range(draw(st.integers(0, 2))):
        part = plan[draw(st.integers(0, SPLIT - 1))]
        group = draw(st.integers(0, GROUPS + 1))
        match draw(st.sampled_from(["swap", "add", "drop"])):
            case "swap" if part:
                part[draw(st.integers(0, len(part) - 1))] = group
            case "add":
                part.append(group)
            case "drop" if part:
                part.pop()
    return plan


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(plan=plans(), order=st.sampled_from(["arrival", "index"]))
def test_a_step_trains_each_group_once_or_fails(order: Any, plan: Plan) -> None:
    torn = any(len(set(part)) < len(part) for part in plan)
    if wrong(plan, order):
        # A Batch itself refuses a group whose rows are not adjacent.
        with pytest.raises(StageFailed, match=r"stage 'collect'.*; " if not torn else "collect"):
            train(plan, order)
    else:
        assert Counter(train(plan, order)) == Counter(range(GROUPS))


SAID = {
    "of an earlier part": ([[0, 1], [2, 3], [4, 5], [6, 2]], r"named group 2, which part 2 of the step holds already"),
    "unknown": ([[0, 1], [2, 9], [4, 5], [6, 7]], r"named group 9, which the step does not have: it has groups 0, 1,"),
    "few": ([[0, 1], [2], [4, 5], [6, 7]], r"was to deliver 2 groups \(task.take\), not 1: group 2"),
    "none": ([[], [2, 3], [4, 5], [6, 7]], r"was to deliver 2 groups \(task.take\), not 0: no groups"),
}


@pytest.mark.parametrize("case", SAID)
def test_the_error_names_stage_part_groups_and_fix(case: str) -> None:
    plan, words = SAID[case]
    with pytest.raises(StageFailed, match=words) as failed:
        train(plan)
    assert str(failed.value).startswith("collect[step 1, part ")
    assert "; return " in str(failed.value)


def test_of_spare_groups_the_rest_is_left() -> None:
    plan = [[0, 1], [2, 9], [4, 5], [6, 7]]
    assert sorted(train(plan, prompts=GROUPS + 2)) == [0, 1, 2, 4, 5, 6, 7, 9]


@pytest.mark.parametrize(
    ("prompts", "mini_batches", "words"),
    [
        (6, 1, "left out groups 3, 4, 5 of the step; return all of its groups"),
        (3, 2, "named 3 groups, which do not make 2 equal mini-batches"),
    ],
)
def test_without_a_number_of_groups_all_make_whole_mini_batches(prompts: int, mini_batches: int, words: str) -> None:
    stages = [rollout, collect.bind(plan=[[0, 1, 2]]), update]
    with pytest.raises(StageFailed, match=words):
        run(stages, SchedulingPolicy(), None, mini_batches, prompts)


@stage(writes=("rewards", "notes"), on="reward", role="collects")
def collect_two(responses: Batch, *, task: TaskInfo) -> tuple[Batch, Batch]:
    return batch(RIGHT[task.part]), batch(RIGHT[(task.part + 1) % SPLIT])


def test_every_batch_of_a_part_holds_its_groups() -> None:
    with pytest.raises(StageFailed, match=r"of the same groups; it returned rewards: groups 0, 1, notes: groups 2, 3"):
        run([rollout, collect_two, update], SchedulingPolicy(split=SPLIT))


# --- streamed chunks -----------------------------------------------------------------------------------------

EACH: list[tuple[int, Any]] = [(0, [0]), (1, [1]), (2, [2]), (3, [3])]
CHUNKS: dict[str, tuple[list[tuple[int, Any]], list[int], str]] = {
    "in two chunks": ([(0, [0, 1]), (1, [1, 2])], [0, 1, 2, 3], "emitted group 1 in chunk 1, which chunk 0 holds"),
    "a number twice": ([(0, [0]), (0, [1])], [0, 1, 2, 3], "emitted chunk 0 twice"),
    "a number too high": ([(4, [0])], [0, 1, 2, 3], "emits chunks 0 to 3, not 4"),
    "no Batch": ([(0, None)], [0, 1, 2, 3], "takes the number of the chunk, then a Batch for each of responses"),
    "empty": ([(0, []), *EACH[1:]], [0, 1, 2, 3], "emitted chunk 0 without groups"),
    "unknown": ([(0, [0]), (1, [9])], [0, 1, 2, 9], "named group 9, which the step does not have"),
    "short": (EACH, [0, 1, 2], r"emitted other groups than it returned in field 'responses' \(group 3\)"),
    "extra": (EACH, [0, 1, 2, 3, 7], r"emitted other groups than it returned in field 'responses' \(group 7\)"),
    "missing": (EACH[:3], [0, 1, 2, 3], "ended after 3 of 4 chunks; call task.emit for chunk 3 as well"),
}


@stage(writes="responses", on="gpu", streams=True)
async def stream(prompts: Batch, *, case: str, task: TaskInfo) -> Batch:
    chunks, returned, _words = CHUNKS[case]
    for number, groups in chunks:
        task.emit(number, None if groups is None else batch(groups))
        await asyncio.sleep(0)
    return batch(returned)


@stage(writes="ticket", on="controller", per_chunk=True)
def request(responses: Batch) -> tuple[int, ...]:
    return responses.ids


@stage(writes="rewards", on="reward", role="collects")
def collect_all(responses: Batch) -> Batch:
    return responses


@pytest.mark.parametrize("case", CHUNKS)
def test_chunks_that_are_not_the_step(case: str) -> None:
    stages = [stream.bind(case=case), request, collect_all, update]
    with pytest.raises(StageFailed, match=CHUNKS[case][2]) as failed:
        run(stages, SchedulingPolicy(stream_rollout=True), groups=4, mini_batches=2, prompts=4)
    assert str(failed.value).startswith("stream[step 1]")


# --- rows ----------------------------------------------------------------------------------------------------

ROWS: dict[str, tuple[Callable[[Batch], Any], str]] = {
    "other groups": (lambda b: batch([g + TAKE for g in b.ids]), "was given groups 0, 1, but the field 'penalty'"),
    "a group less": (lambda b: b.select(b.ids[1:]), "that it returned has group 1;"),
    "a row less": (lambda b: b.rows(range(1, len(b))), "returned 1 rows of 'penalty' for group 0, where 2 belong to"),
    "rows doubled": (lambda b: b.repeat(2), "returned 4 rows of 'penalty' for group 0, where 2 belong to a group"),
}
FINE: dict[str, Callable[[Batch], Any]] = {
    "row for row": lambda b: b,
    "a row a group": lambda b: batch(b.ids, 1),
    "in another order": lambda b: b.select(b.ids[::-1]),
    "no Batch": lambda b: [1.0],
}


@stage(writes="penalty", on="controller", splittable=True)
def penalise(responses: Batch, rewards: Batch, *, make: Callable[[Batch], Any]) -> Any:
    return make(rewards)


@stage(writes="actor", on="gpu", per_mini_batch=True)
def update_penalised(penalty: Any, rewards: Batch, actor: Latest) -> int:
    assert not isinstance(penalty, Batch) or penalty.ids == rewards.ids
    return 1


@pytest.mark.parametrize("case", [*ROWS, *FINE])
def test_rows_of_a_result_can_be_read_beside_those_of_the_input(case: str) -> None:
    make = FINE[case] if case in FINE else ROWS[case][0]
    stages = [rollout, collect.bind(plan=RIGHT), penalise.bind(make=make), update_penalised]
    if case in FINE:
        run(stages, SchedulingPolicy(split=SPLIT))
        return
    with pytest.raises(StageFailed, match=ROWS[case][1]) as failed:
        run(stages, SchedulingPolicy(split=SPLIT))
    assert str(failed.value).startswith("penalise[step 1, part 1 of 4]")


@stage(writes="lengths", on="controller")
def backwards(responses: Batch) -> Batch:
    return responses.select(responses.ids[::-1])


@stage(writes="compared", on="controller")
def compare(responses: Batch, lengths: Batch) -> None:
    assert responses.ids == lengths.ids == tuple(range(GROUPS))
    assert list(responses["at"]) == list(lengths["at"])


@stage(writes="best", on="controller")
def pick(responses: Batch, rewards: Batch) -> Batch:
    return rewards.select(rewards.ids[:1])


def test_batches_of_a_step_come_in_one_order_and_what_nothing_reads_may_be_of_any_groups() -> None:
    run([rollout, backwards, compare, collect.bind(plan=RIGHT), pick, update], SchedulingPolicy(split=SPLIT))
