"""Several engines as one: how groups are distributed, what is returned, and what happens when an engine is lost."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.engines.replicas.engine import Replicas
from dataflow.engines.replicas.host import pack, unpack
from dataflow.errors import Aborted, ConfigError, DataError, DataflowError, RunError
from tests.engines import tiny_models
from tests.engines.drawing import draw, run
from tests.rigs.processes import below, command, left

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120), pytest.mark.shares_ray]

P, N, SEATS = 40, 2, 4
SAMPLING = Sampling(n=N, max_tokens=9)


class Engine:
    """Samples that say what they were drawn with; those whose prompt names a gate wait until a file opens it.

    Args:
        home: where the gates are, and what each engine was asked for.
        raises: what the constructor raises.
    """

    def __init__(self, model: str, max_prompt_length: int, home: str, raises: str = "", in_flight: str = "") -> None:
        if raises:
            raise ConfigError(raises) if raises.startswith("config") else ZeroDivisionError(raises)
        self.version, self.weight, self.home = 0, 0.0, Path(home)
        self.counts = {"samples": 0, "tokens": 0, "cached_tokens": 0}
        self.running = 0
        self.note(up=True)

    def note(self, **facts: Any) -> None:
        with (self.home / f"asked-{os.getpid()}").open("a") as file:
            file.write(json.dumps(facts) + "\n")

    async def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> AsyncIterator[Sample]:
        self.note(seed=seed, groups=prompts.ids)
        if seed == 666:
            raise DataError("rollout: the prompt of group 5 is not to this engine's taste.")
        rows = [(g, i, prompt) for g, prompt in zip(prompts.ids, prompts["prompt_ids"], strict=True) for i in range(N)]
        tasks = [asyncio.ensure_future(self.one(prompt, (seed, g, i), g, i)) for g, i, prompt in rows]
        try:
            for coming in asyncio.as_completed(tasks):
                yield await coming
        finally:
            left = [task.cancel() for task in tasks if not task.done()]
            await asyncio.gather(*tasks, return_exceptions=True)
            self.note(left=len(left), of=seed)

    async def sample(self, prompt: Sequence[int], sampling: Sampling, seed: Sequence[int]) -> Sample:
        self.note(turn=list(seed))
        return await self.one(prompt, seed, 0, 0)

    async def one(self, prompt: Sequence[int], seed: Sequence[int], group: int, index: int) -> Sample:
        version, self.running = self.version, self.running + 1
        try:
            while prompt[0] and not (self.home / f"gate-{prompt[0]}").exists():
                await asyncio.sleep(0.002)
            dice = random.Random(repr(tuple(seed)))
            await asyncio.sleep(dice.random() * 0.01)
        finally:
            self.running -= 1
        tokens = [dice.randrange(100) + int(self.weight) for _ in range(dice.randint(1, 9))]
        self.counts["samples"] += 1
        self.counts["cached_tokens"] += 10
        return Sample(group, index, tokens, [-0.5] * len(tokens), version, "stop")

    async def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        assert not self.running, "a sync in mid-flight"
        if "wrong" in weights:
            raise DataflowError(f"weight sync {version}: the model has no weight 'wrong'.")
        if "fatal" in weights:
            with contextlib.suppress(FileExistsError):
                (self.home / "fatal").touch(exist_ok=False)
                raise DataflowError(f"weight sync {version}: one of us does not like it.")
        self.note(weights=version)
        self.weight, self.version = float(weights["w"]), version

    async def sleep(self) -> None:
        assert not self.running
        self.note(to="sleep")

    async def wake(self) -> None:
        self.note(to="wake")

    def stats(self) -> dict[str, float]:
        return {**self.counts, "running": self.running}

    def close(self) -> None:
        self.note(to="close")


@pytest.fixture(scope="module", autouse=True)
def by_value(local_ray: None) -> Iterator[None]:
    from ray import cloudpickle

    here = sys.modules[__name__]  # which a worker cannot import
    cloudpickle.register_pickle_by_value(here)
    yield
    cloudpickle.unregister_pickle_by_value(here)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def options(tiny_qwen: Path, home: Path) -> dict[str, Any]:
    return {"model": str(tiny_qwen), "max_prompt_length": P, "home": str(home)}


@pytest.fixture(scope="module")
def three(options: dict[str, Any]) -> Iterator[Replicas]:
    engine = Replicas(Engine, options, 3, slots=SEATS)
    yield engine
    run(engine.close())


@pytest.fixture
def engine(three: Replicas) -> Iterator[Replicas]:
    """Two of the three, with the weights 0."""
    with only(three, 2):
        run(three.sync({"w": torch.zeros(())}, 0))
        yield three
        assert three.stats()["running"] == 0


@contextlib.contextmanager
def only(engine: Replicas, count: int) -> Iterator[None]:
    """Leaves an engine its first replicas: processes take seconds to start."""
    whole = list(engine._handles)
    engine._handles[:] = whole[:count]
    try:
        yield
    finally:
        engine._handles[:] = whole


def asking(gates: Sequence[int]) -> Batch:
    """Returns a prompt per group, each behind a gate; 0 is none."""
    return Batch(list(range(len(gates))), {"prompt_ids": [[gate, 7] for gate in gates]})


def asked(home: Path, key: str, value: Any) -> list[list[dict[str, Any]]]:
    """Returns what those engines noted that noted anything of that kind, an engine each."""
    notes = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(home.glob("asked-*"))]
    found = [[note for note in mine if note.get(key) == value] for mine in notes]
    return [mine for mine in found if mine]


def groups(home: Path, seed: int) -> list[list[tuple[int, ...]]]:
    """Returns the groups of each call of that seed, by engine; the one that drew least first."""
    calls = [[tuple(note["groups"]) for note in mine] for mine in asked(home, "seed", seed)]
    return sorted(calls, key=lambda mine: sum(map(len, mine)))


def by_place(samples: Sequence[Sample]) -> dict[tuple[int, int], tuple[int, ...]]:
    found = {(sample.group, sample.index): tuple(sample.tokens) for sample in samples}
    assert len(found) == len(samples), "each sample comes once"
    return found


async def collect(engine: Replicas, batch: Batch, seed: int, found: list[Sample]) -> None:
    async for sample in engine.generate(batch, SAMPLING, seed):
        found.append(sample)  # noqa: PERF401 - as they come


async def until(true: Any) -> None:
    while not true():
        await asyncio.sleep(0.005)


# Who draws what.


def test_the_samples_are_the_same_however_many_replicas_draw_them(three: Replicas, home: Path) -> None:
    batch, before = asking([0] * 13), three.stats()
    found = []
    for count in (1, 2, 3):
        with only(three, count):
            found.append(draw(three, batch, SAMPLING, seed=11))
            turn = run(three.sample([0, 3], SAMPLING, (11, 4, 1)))
            assert tuple(turn.tokens) == by_place(found[0])[4, 1], "the seed alone decides"
    assert by_place(found[0]) == by_place(found[1]) == by_place(found[2])
    assert set(by_place(found[0])) == {(group, index) for group in range(13) for index in range(N)}
    assert len(asked(home, "seed", 11)) == 3, "all of them took part"
    stats = three.stats()
    assert stats["samples"] - before["samples"] == 3 * (13 * N + 1)
    assert stats["tokens"] - before["tokens"] == sum(len(s.tokens) for f in found for s in f) + 3 * len(turn.tokens)
    assert stats["cached_tokens"] == 10 * stats["samples"], "what only the engines know is added up"
    assert stats["running"] == 0
    rows = three.batch(batch, found[2], 9)
    assert rows.ids == tuple(range(13))
    assert rows["responses"].shape == (13 * N, 9)


def test_groups_go_whole_to_the_replica_with_the_fewest_and_the_rest_waits(engine: Replicas, home: Path) -> None:
    async def body() -> None:
        found: list[Sample] = []
        drawing = asyncio.ensure_future(collect(engine, asking([20, *[21] * 3, *[0] * 6]), 20, found))
        await until(lambda: len(asked(home, "seed", 20)) == 2)
        assert sorted(groups(home, 20)) == [[(0, 2)], [(1, 3)]], (
            "in turn, in one call each, and no more than have a replica"
        )
        assert engine.stats()["running"] == 10 * N
        (home / "gate-21").touch()
        await until(lambda: len(found) == 9 * N)
        # The one that is held up by group 0 has slots for another group, but not for two.
        assert not [sample for sample in found if sample.group == 0]
        (home / "gate-20").touch()
        await drawing
        by_place(found)
        for calls in groups(home, 20):
            assert all(len(call) <= SEATS // N for call in calls)

    run(body())


def test_a_replica_that_is_done_takes_what_another_would_have_had(engine: Replicas, home: Path) -> None:
    async def body() -> None:
        found: list[Sample] = []
        # Groups 0 and 2 fill a replica's slots, until all others are drawn.
        drawing = asyncio.ensure_future(collect(engine, asking([30, 0, 30, *[0] * 8]), 30, found))
        await until(lambda: len(found) == 9 * N)
        (home / "gate-30").touch()
        await drawing
        by_place(found)
        held, busy = groups(home, 30)
        assert held == [(0, 2)]
        assert sorted(group for call in busy for group in call) == [1, *range(3, 11)]

    run(body())


def test_a_turn_goes_to_the_least_busy(engine: Replicas, home: Path) -> None:
    async def body() -> None:
        found: list[Sample] = []
        drawing = asyncio.ensure_future(collect(engine, asking([40]), 40, found))
        await until(lambda: asked(home, "seed", 40))
        turns = [asyncio.ensure_future(engine.sample([40, 1], SAMPLING, (40, i))) for i in range(3)]
        await until(lambda: all(asked(home, "turn", [40, i]) for i in range(3)))
        assert sorted(replica.outstanding for replica in engine._handles) == [2, 3]
        (home / "gate-40").touch()
        await asyncio.gather(drawing, *turns)
        assert [(turn.result().group, turn.result().index) for turn in turns] == [(0, 0)] * 3

    run(body())


# Weights.


def test_a_sync_parts_what_was_asked_for_before_it_from_what_comes_behind(engine: Replicas, home: Path) -> None:
    async def body() -> None:
        before: list[Sample] = []
        after: list[Sample] = []
        first = asyncio.ensure_future(collect(engine, asking([0, 50, *[0] * 6]), 50, before))
        await until(lambda: len(before) == 7 * N)
        sync = asyncio.ensure_future(engine.sync({"w": torch.tensor(1000.0)}, 1))
        await until(lambda: len(engine._queue._queue))
        second = asyncio.ensure_future(collect(engine, asking([0] * 8), 50, after))
        await asyncio.sleep(0)
        assert (engine.version, after) == (0, [])
        assert not asked(home, "weights", 1), "none has them while another still draws with the old ones"
        (home / "gate-50").touch()
        await asyncio.gather(first, sync, second)
        assert len(asked(home, "weights", 1)) == 2
        assert engine.version == 1
        assert ({s.version for s in before}, {s.version for s in after}) == ({0}, {1})
        assert all(min(s.tokens) >= 1000 for s in after)
        assert all(max(s.tokens) < 1000 for s in before)

    run(body())


def test_a_sync_may_have_samples_drawn_anew(engine: Replicas, home: Path) -> None:
    async def body() -> None:
        found: list[Sample] = []
        drawing = asyncio.ensure_future(collect(engine, asking([0, 60, *[0] * 3, 60, 60, 60, 60]), 60, found))
        await until(lambda: len(found) == 4 * N)
        sync = asyncio.ensure_future(engine.sync({"w": torch.tensor(1000.0)}, 3))
        await sync
        assert not drawing.done()
        (home / "gate-60").touch()
        await drawing
        assert by_place(found).keys() == {(group, index) for group in range(9) for index in range(N)}
        assert all((sample.version == 3) == (min(sample.tokens) >= 1000) for sample in found)
        assert [sample.version for sample in found] == [0] * 4 * N + [3] * 5 * N

    engine._redraw = True
    try:
        run(body())
    finally:
        engine._redraw = False


def test_weights_that_all_refuse_leave_the_old_ones(engine: Replicas) -> None:
    with pytest.raises(DataflowError, match="weight sync 5: the model has no weight 'wrong'") as error:
        run(engine.sync({"wrong": torch.zeros(3)}, 5))
    assert not isinstance(error.value, RunError)
    assert engine.version == 0
    assert {sample.version for sample in draw(engine, asking([0] * 4), SAMPLING)} == {0}


def test_weights_travel_as_they_are() -> None:
    weights = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).bfloat16(),
        "c": torch.tensor(2.5),
        "d": torch.arange(12).reshape(3, 4).t(),
        "e": torch.zeros(0, 2),
    }
    for name, value in unpack(pack(weights)).items():
        assert (value.dtype, value.shape) == (weights[name].dtype, weights[name].shape)
        assert torch.equal(value, weights[name])


def test_asleep_it_keeps_what_is_asked_for_until_it_wakes(engine: Replicas, home: Path) -> None:
    async def body() -> None:
        await engine.sleep()
        found: list[Sample] = []
        drawing = asyncio.ensure_future(collect(engine, asking([0] * 3), 70, found))
        await engine.sync({"w": torch.tensor(1.0)}, 2)
        assert not asked(home, "seed", 70)
        await engine.wake()
        await engine.wake()
        await drawing
        assert {sample.version for sample in found} == {2}
        assert [len(asked(home, "to", to)) for to in ("sleep", "wake")] == [2, 2]

    run(body())


# Giving up.


def test_abort_and_stopping_early_free_what_is_in_flight(engine: Replicas, home: Path) -> None:
    async def body() -> None:
        drawing = asyncio.ensure_future(collect(engine, asking([80] * 9), 80, []))
        turn = asyncio.ensure_future(engine.sample([80], SAMPLING, (80, 0)))
        await until(lambda: len(asked(home, "seed", 80)) == 2)
        assert await engine.abort() == 9 * N + 1
        for waiting in (drawing, turn):
            with pytest.raises(Aborted):
                await waiting
        async with contextlib.aclosing(engine.generate(asking([0, *[81] * 8]), SAMPLING, 81)) as samples:
            async for sample in samples:
                assert sample.group == 0
                break
        for seed in (80, 81):
            await until(lambda seed=seed: len(asked(home, "of", seed)) == 2)
            left = [note["left"] for mine in asked(home, "of", seed) for note in mine]
            assert sum(left) >= 2 * SEATS - N, "given up in the engines, too"
        assert [replica.outstanding for replica in engine._handles] == [0, 0]
        await collect(engine, asking([0] * 8), 82, [])

    run(body())


def test_what_no_engine_takes_is_refused(engine: Replicas, home: Path) -> None:
    cases = [
        (asking([0]), Sampling(n=0), 0, ConfigError, "n=0"),
        (asking([0]), Sampling(stop_token_ids=(9999,)), 0, ConfigError, "which the tokenizer lacks"),
        (Batch([4], {"prompt_ids": [[]]}), SAMPLING, 0, DataError, "the prompt of group 4 is empty"),
        (Batch([4], {"prompt_ids": [[1] * 41]}), SAMPLING, 0, DataError, "has 41 tokens, more than"),
        (asking([0] * 6), SAMPLING, 666, DataError, "group 5 is not to this engine's taste"),
    ]
    for batch, sampling, seed, kind, message in cases:
        with pytest.raises(kind, match=message):
            draw(engine, batch, sampling, seed)
    assert len(draw(engine, asking([0]), SAMPLING)) == N, "and the engine lives on"


# Losing one. These come last: `three` is of no use behind them.


def test_a_sync_that_one_refuses_loses_all_and_names_it(engine: Replicas) -> None:
    with pytest.raises(
        RunError, match=r"weight sync 6: replica [12] of 3 does not have the new weights.*rebuilt"
    ) as error:
        run(engine.sync({"w": torch.zeros(()), "fatal": torch.zeros(())}, 6))
    assert "one of us does not like it" in str(error.value)
    assert engine.version == 0
    for _ in range(2):
        with pytest.raises(RunError, match="have to be rebuilt"):
            draw(engine, asking([0]), SAMPLING)
    engine._queue._lost = None  # they are alive: the next test needs them


def test_a_dead_replica_fails_current_and_later_calls(three: Replicas, home: Path) -> None:
    async def body() -> None:
        await three.sync({"w": torch.zeros(())}, 0)
        found: list[Sample] = []
        drawing = asyncio.ensure_future(collect(three, asking([0, 0, 90, 90, 90, 90]), 90, found))
        turn = asyncio.ensure_future(three.sample([90], SAMPLING, (90, 0)))
        sync = asyncio.ensure_future(three.sync({"w": torch.zeros(())}, 9))
        await until(lambda: len(found) == 2 * N and len(asked(home, "seed", 90)) == 3)
        await until(lambda: len(three._queue._queue))
        victim = next(replica for replica in three._handles if replica.outstanding)
        os.kill(await victim.actor.__ray_call__.remote(lambda replica: os.getpid()), signal.SIGKILL)
        message = f"{victim.name} died .killed, or out of memory.; see Ray's log for its last output: .*rebuilt"
        for waiting in (drawing, turn, sync):
            with pytest.raises(RunError, match=message):
                await waiting
        for call in (lambda: three.sample([0], SAMPLING, (0,)), lambda: three.sync({}, 10), three.sleep):
            with pytest.raises(RunError, match=message):
                await call()
        pids = [pid for pid in pids_of(home) if psutil.pid_exists(pid)]
        assert len(pids) >= 2
        await three.close()
        await three.close()
        assert not left(pids, timeout=30)
        assert sum(note["to"] == "close" for mine in asked(home, "to", "close") for note in mine) == 2
        with pytest.raises(RunError):
            await three.sample([0], SAMPLING, (0,))

    run(body())


class Owner:
    """An actor that has replicas, as a hosted tool does."""

    async def build(self, options: dict[str, Any]) -> int:
        Replicas._read = lambda self, model: None  # no tokenizer: seconds of imports
        self.engine = Replicas(Engine, options, 1, slots=SEATS)
        return os.getpid()


def test_with_the_process_that_has_them_the_replicas_end(options: dict[str, Any], tmp_path: Path) -> None:
    import ray

    owner = ray.remote(Owner).options(num_cpus=0, max_concurrency=100).remote()
    pid = ray.get(owner.build.remote({**options, "home": str(tmp_path)}), timeout=60)
    (replica,) = pids_of(tmp_path)
    assert psutil.pid_exists(replica)
    os.kill(pid, signal.SIGKILL)
    assert not left([pid, replica], timeout=30)


@pytest.mark.parametrize(
    ("raises", "kind", "message"),
    [("config: no", ConfigError, "^config: no$"), ("oh", RunError, r"replica 1 of 1 failed \(ZeroDivisionError: oh\)")],
)
def test_an_engine_that_cannot_be_built(options: dict[str, Any], raises: str, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        Replicas(Engine, {**options, "raises": raises}, 1)


def test_numbers_out_of_range(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for numbers in ({"replicas": 0}, {"replicas": 2, "slots": 0}, {"replicas": 2, "gpus": -1}):
        with pytest.raises(ConfigError, match=r"rollout: replicas=.*; give 1 or more of each, and 0 or more GPUs"):
            Replicas(Engine, options, **numbers)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(
        ConfigError, match=r"engine\.replicas=2: Ray does not run here; use executor=ray, or one replica"
    ):
        Replicas(Engine, options, 2)


def pids_of(home: Path) -> list[int]:
    """Returns the processes of all engines that were ever asked for anything."""
    return [int(file.name.rpartition("-")[2]) for file in home.glob("asked-*")]


# The real one.


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_two_vllm_replicas_say_what_transformers_does(tmp_path: Path) -> None:
    paths = [tiny_models.save_model(tmp_path / str(seed), seed) for seed in range(2)]
    models = [tiny_models.load(path) for path in paths]
    options = {
        "model": paths[0],
        "max_prompt_length": P,
        "max_tokens": 16,
        "max_num_seqs": 4,
        "kv_cache_bytes": 8 << 20,
    }
    batch, sampling = tiny_models.prompts([3, 33, 17, 5, 9, 1]), Sampling(temperature=0.0, max_tokens=16)
    drawn = Sampling(n=N, temperature=0.8, max_tokens=16)
    before = {process.pid for process in below()}
    engine = Replicas("dataflow.engines.vllm.in_process:VllmRollout", options, 2, slots=4)
    try:
        for version, model in enumerate(models):
            if version:
                run(engine.sync(model.state_dict(), version))
            best = draw(engine, batch, sampling)
            expected = [tiny_models.greedy(model, ids, 16) for ids in batch["prompt_ids"]]
            assert [list(s.tokens) for s in sorted(best, key=lambda s: s.group)] == expected
            assert {sample.version for sample in best} == {version}
            assert min(replica.stats["samples"] for replica in engine._handles) > 0, "both have drawn"
            whole = by_place(draw(engine, batch, drawn, seed=5))
            with only(engine, 1):
                assert by_place(draw(engine, batch, drawn, seed=5)) == whole, "as one engine alone"
        assert engine.stats()["samples"] == 2 * (6 + 2 * 12)
    finally:
        run(engine.close())
    started = [p for p in below() if p.pid not in before]
    assert not left([p for p in started if "Replica" in " ".join(command(p))], timeout=30)
