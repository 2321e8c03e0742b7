"""The rollout stage: the chunks that it emits, and the batch that it returns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.errors import Aborted, RunError
from dataflow.graph import TaskInfo
from dataflow.stages.rollout import rollout, val_rollout
from tests.rigs.fake_engine import FakeRollout

pytestmark = pytest.mark.timeout(60)


def prompts(groups: int) -> Batch:
    return Batch(range(groups), {"prompt_ids": [[1]] * groups})


def run(stage: Any, groups: int, engine: Any, task: TaskInfo, version: Any = None, **options: Any) -> Batch:
    async def body() -> Batch:
        async with asyncio.timeout(30):
            given = {"engine": engine, "sampling": Sampling(n=2), "seed": 5, "task": task, **options}
            found = await stage(prompts(groups), version, **given)
            return Batch(found.groups, found.columns, found.meta)

    return asyncio.run(body())


@given(groups=st.integers(1, 12), n=st.integers(1, 3), emits=st.integers(1, 5), index=st.booleans(), data=st.data())
def test_chunks_hold_each_group_once_and_whole(
    groups: int, n: int, emits: int, index: bool, data: st.DataObject
) -> None:
    emits, found = min(emits, groups), dict[int, Batch]()
    samples = [Sample(group, index, [], [], 0, "stop") for group in range(groups) for index in range(n)]
    order = data.draw(st.permutations(samples))

    class Drawn(FakeRollout):
        async def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> Any:
            for sample in order:
                yield sample

    def emit(number: int, values: tuple[Batch]) -> None:
        assert number not in found
        (found[number],) = values

    task = TaskInfo(1, "rollout", emits=emits, order="index" if index else "arrival", on_emit=emit)
    run(rollout, groups, Drawn(), task, sampling=Sampling(n=n))
    assert sorted(found) == list(range(emits))
    sizes = [len(batch.ids) for batch in found.values()]
    assert max(sizes) - min(sizes) <= 1
    assert all(len(batch) == n * len(batch.ids) for batch in found.values())
    by_number = [group for number in range(emits) for group in sorted(found[number].ids)]
    assert sorted(by_number) == list(range(groups))
    if index:
        assert by_number == list(range(groups))
    else:
        assert list(found) == list(range(emits)), "the groups that end first make the first chunk"


def test_a_batch_is_in_order_of_the_groups_and_a_restart_samples_only_what_was_not_emitted() -> None:
    emitted: dict[int, Batch] = {}
    task = TaskInfo(3, "rollout", emits=4, on_emit=lambda number, values: emitted.update({number: values[0]}))
    found = run(rollout, 8, FakeRollout(seed=1, version=2), task, version=2)
    whole = run(rollout, 8, FakeRollout(seed=2, version=2), TaskInfo(3, "rollout"), version=2)
    assert found.groups.tolist() == whole.groups.tolist() == [g for g in range(8) for _ in range(2)]
    assert found["response_text"].tolist() == whole["response_text"].tolist()
    assert [len(emitted[number].ids) for number in range(4)] == [2, 2, 2, 2]
    assert emitted[0].ids != (0, 1), "those that end first"
    assert task.metrics == {"staleness/rollout": 0.0}
    assert found.meta["weights_version"] == 2

    kept = {number: emitted[number] for number in (0, 2)}
    emitted.clear()
    again, engine = TaskInfo(3, "rollout", emits=4, emitted=kept, on_emit=task.on_emit), FakeRollout(seed=9, version=2)
    found = run(rollout, 8, engine, again, version=2)
    done = {group for batch in kept.values() for group in batch.ids}
    assert engine.asked[0][1] == tuple(group for group in range(8) if group not in done)
    assert sorted(emitted) == [1, 3]
    assert found["response_text"].tolist() == whole["response_text"].tolist()


def test_the_seed_is_of_run_and_step_and_validation_has_its_own() -> None:
    engine = FakeRollout()
    for step in (1, 2):
        run(rollout, 2, engine, TaskInfo(step, "rollout"))
        run(val_rollout, 2, engine, TaskInfo(step, "val_rollout"))
    seeds = [seed for seed, _groups in engine.asked]
    assert seeds[1] == seeds[3]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize("stage", [rollout, val_rollout])
def test_another_version_of_the_weights_ends_the_run(stage: Any) -> None:
    with pytest.raises(RunError, match=r"\[2\]: the engine holds weights version 3, where the graph needs 1"):
        run(stage, 2, FakeRollout(version=3), TaskInfo(2, stage.name), version=1)


class Failing(FakeRollout):
    async def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> Any:
        async for sample in super().generate(prompts, sampling, seed):
            yield sample
            raise Aborted("given up")


def test_an_engine_that_shares_its_gpu_sleeps_before_and_after() -> None:
    engine, failing = FakeRollout(), Failing()
    run(rollout, 2, engine, TaskInfo(1, "rollout"))
    assert engine.slept == []
    with pytest.raises(Aborted):
        run(rollout, 4, failing, TaskInfo(1, "rollout"), sleeps=True)
    assert failing.slept == ["wake", "sleep"], "after an error too"


def test_a_stage_that_is_cancelled_frees_the_engine() -> None:
    async def body() -> None:
        engine = FakeRollout()
        work = rollout(prompts(50), None, engine=engine, sampling=Sampling(n=4), seed=0, task=TaskInfo(1, "rollout"))
        running = asyncio.ensure_future(work)
        while not engine.running:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not engine.running

    asyncio.run(body())
