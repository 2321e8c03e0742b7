"""Several engines as one: how groups are distributed, what is returned, and what the loss of an engine does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.engines.least_load import LeastLoad
from dataflow.engines.replicas import Replicas
from dataflow.errors import Aborted, DataflowError, RunError, ServiceLost
from tests.engines.drawing import run
from tests.engines.tiny_models import load, save_model

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]

P, N, SEATS = 40, 2, 4
SAMPLING = Sampling(n=N, max_tokens=9)


class Engine:
    """Samples that say what they were drawn with; those whose prompt begins with 2 wait for ``go``."""

    def __init__(self) -> None:
        self.version, self.weight = 0, 0
        self.go = asyncio.Event()
        self.asked: list[Any] = []
        self.running = 0
        self.cancelled = 0
        self.breaks: Exception | None = None

    async def sample(self, prompt: Sequence[int], sampling: Sampling, seed: Sequence[int]) -> Sample:
        self.asked.append(tuple(seed[1:]))
        version, self.running = self.version, self.running + 1
        dice = random.Random(repr(tuple(seed)))
        try:
            await asyncio.sleep(dice.random() * 0.005)
            if prompt[0] == 2:
                await self.go.wait()
            if self.breaks is not None:
                raise self.breaks
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        tokens = [dice.randrange(50) + self.weight for _ in range(dice.randint(1, 9))]
        return Sample(0, 0, tokens, [-0.5] * len(tokens), version, "stop")

    async def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        assert not self.running, "a sync in mid-flight"
        if self.breaks is not None:
            raise self.breaks
        self.weight, self.version = 1000 * version, version

    async def sleep(self) -> None:
        assert not self.running
        self.asked.append("sleep")

    async def wake(self) -> None:
        self.asked.append("wake")

    async def close(self) -> None:
        self.asked.append("close")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture
def engines() -> list[Engine]:
    return [Engine(), Engine()]


@pytest.fixture
def both(engines: list[Any], model: str) -> Replicas:
    return Replicas(engines, model, P, SEATS)


def asking(first: Sequence[int]) -> Batch:
    """Returns a prompt a group; those that begin with 2 wait."""
    return Batch(list(range(len(first))), {"prompt_ids": [[token, 7] for token in first]})


def by_place(samples: Sequence[Sample]) -> dict[tuple[int, int], tuple[int, ...]]:
    found = {(sample.group, sample.index): tuple(sample.tokens) for sample in samples}
    assert len(found) == len(samples), "each sample comes once"
    return found


async def collect(engine: Replicas, batch: Batch, found: list[Sample], seed: int = 0) -> list[Sample]:
    async for sample in engine.generate(batch, SAMPLING, seed):
        found.append(sample)  # noqa: PERF401 - as they come
    return found


async def until(true: Any) -> None:
    while not true():
        await asyncio.sleep(0.002)


def weights(model: str) -> dict[str, torch.Tensor]:
    return load(model).state_dict()


def test_the_samples_are_the_same_however_many_engines_draw_them(model: str) -> None:
    async def body() -> None:
        batch, found = asking([9] * 13), []
        for number in (1, 2, 3):
            engines: list[Any] = [Engine() for _ in range(number)]
            several = Replicas(engines, model, P, SEATS)
            found.append(by_place(await collect(several, batch, [], 11)))
            turn = await several.sample([9, 3], SAMPLING, (11, 4, 1))
            assert tuple(turn.tokens) == found[0][4, 1]
            assert all(engine.asked for engine in engines)
        assert found[0] == found[1] == found[2]
        assert set(found[0]) == {(group, index) for group in range(13) for index in range(N)}

    run(body())


def test_groups_go_to_the_engine_with_the_fewest_and_the_rest_waits(both: Replicas, engines: list[Engine]) -> None:
    async def body() -> None:
        found: list[Sample] = []
        drawing = asyncio.ensure_future(collect(both, asking([2, 9, 2, *[9] * 8]), found))
        await until(lambda: len(found) == 9 * N)
        # The first engine's slots are full with groups 0 and 2, so the other has drawn all others.
        assert {group for group, _index in engines[0].asked} == {0, 2}
        assert {group for group, _index in engines[1].asked} == {1, *range(3, 11)}
        turn = await both.sample([9, 1], SAMPLING, (1, 99, 0, 1))
        assert engines[1].asked[-1] == (99, 0, 1)
        assert (turn.group, turn.index) == (0, 0)
        engines[0].go.set()
        by_place(await drawing)

    run(body())


def test_a_group_leaves_its_full_engine_only_for_a_slot_that_no_other_takes() -> None:
    async def body() -> None:
        choice = LeastLoad("ab", slots=2)
        assert [await choice.take(group) for group in (0, 0, 0, 1)] == ["a", "a", "b", "b"]
        waiting = [asyncio.ensure_future(choice.take(group)) for group in (1, 2)]
        await asyncio.sleep(0)
        for number in (1, 2):
            choice.give_back("a")
            await asyncio.sleep(0)
            assert [each.done() for each in waiting] == [number == 2, True]
        assert [await each for each in waiting] == ["a", "a"]

    run(body())


def test_weights_are_checked_and_shared_once_for_all(engines: list[Any], model: str) -> None:
    shared: list[Any] = []

    async def body() -> None:
        several = Replicas(engines, model, P, SEATS, share=lambda given: shared.append(given) or given)
        with pytest.raises(
            DataflowError,
            match=r"weight sync 5: 1 weights are not .* first 'wrong' \(its shape is \(3,\), in the model None",
        ) as error:
            await several.sync({**weights(model), "wrong": torch.zeros(3)}, 5)
        assert not isinstance(error.value, RunError)
        assert {sample.version for sample in await collect(several, asking([9] * 4), [])} == {0}
        await several.sync(weights(model), 1)
        assert len(shared) == 1
        assert "lm_head.weight" not in shared[0], "tied weights once"

    run(body())


def test_waking_during_a_sleep_whose_caller_is_cancelled(both: Replicas, engines: list[Engine]) -> None:
    async def slow() -> None:
        await engines[0].go.wait()

    async def body() -> None:
        engines[0].sleep = slow  # type: ignore[method-assign]
        sleeping = asyncio.ensure_future(both.sleep())
        await asyncio.sleep(0.01)
        sleeping.cancel()
        waking = asyncio.ensure_future(both.wake())
        await asyncio.sleep(0.01)
        engines[0].go.set()
        await waking
        assert len(await asyncio.wait_for(collect(both, asking([9]), []), 5)) == N

    run(body())


def test_stopping_early_frees_what_is_in_flight(both: Replicas, engines: list[Engine]) -> None:
    async def body() -> None:
        async with aclosing(both.generate(asking([9, *[2] * 8]), SAMPLING, 1)) as samples:
            await anext(samples)
        assert sum(engine.cancelled for engine in engines) >= 2 * SEATS - N
        assert set(both._choice._loads.values()) == {0}
        await collect(both, asking([9] * 8), [])

    run(body())


def test_an_engine_that_fails_loses_all(both: Replicas, engines: list[Engine], model: str) -> None:
    async def body() -> None:
        drawing = asyncio.ensure_future(collect(both, asking([9, 2, 2, 2]), []))
        await until(lambda: engines[0].running + engines[1].running == 3 * N)
        sync = asyncio.ensure_future(both.sync(weights(model), 1))
        engines[1].breaks = RunError("replica 2 of 2: it died")
        engines[1].go.set()
        for waiting in (drawing, sync):
            with pytest.raises(ServiceLost, match=r"^rollout: replica 2 of 2: it died; the replicas have to be reb"):
                await waiting
        with pytest.raises(ServiceLost):
            await both.sample([9], SAMPLING, (0,))

    run(body())


def test_an_engine_without_the_new_weights_loses_all(both: Replicas, engines: list[Engine], model: str) -> None:
    async def body() -> None:
        engines[1].breaks = RunError("replica 2 of 2: no room")
        with pytest.raises(ServiceLost, match="replica 2 of 2: no room; the replicas have to be rebuilt"):
            await both.sync(weights(model), 1)
        assert both.version == 0

    run(body())


def test_closing_closes_all(engines: list[Any], model: str) -> None:
    released: list[bool] = []

    async def body() -> None:
        several = Replicas(engines, model, P, SEATS, release=lambda: released.append(True))
        drawing = asyncio.ensure_future(collect(several, asking([2] * 9), []))
        await until(lambda: engines[0].running)
        await several.close()
        with pytest.raises(Aborted):
            await drawing

    run(body())
    assert [engine.asked[-1] for engine in engines] == ["close"] * 2
    assert released == [True]
