"""vLLM against plain transformers forwards: weights, log-probs, seeds, and the order of events."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.engines.vllm.engine import VllmRollout
from dataflow.errors import Aborted, DataError, RunError, ServiceLost
from tests.engines.tiny_models import ENDS, greedy, load, log_probs, prompts, save_model
from tests.rigs.listening import listeners
from tests.rigs.processes import below, command, left

pytestmark = [pytest.mark.heavy, pytest.mark.vllm, pytest.mark.timeout(300)]
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

P, R, SEATS = 80, 24, 16
GREEDY = Sampling(temperature=0.0, max_tokens=R)


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """vLLM changes that of its process, which other tests start processes with."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines on one event loop, to which the engine is bound."""
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, 120))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three models: two tied ones that differ in their weights, and an untied one."""
    home = tmp_path_factory.mktemp("models")
    return [save_model(home / str(seed), seed, tie=seed < 2) for seed in range(3)]


@pytest.fixture(scope="module")
def models(paths: list[str]) -> list[Any]:
    return [load(path) for path in paths]


@pytest.fixture(scope="module")
def shared(paths: list[str], run: Any) -> Iterator[VllmRollout]:
    engine = VllmRollout(paths[0], P, R, max_num_seqs=SEATS, kv_cache_bytes=32 << 20)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: VllmRollout, models: list[Any], run: Any) -> VllmRollout:
    """The shared engine with the first model's weights and an empty prefix cache."""
    run(shared.sync(models[0].state_dict(), 0))
    return shared


async def drawn(engine: VllmRollout, batch: Batch, sampling: Sampling, seed: int = 0) -> list[Sample]:
    return [sample async for sample in engine.generate(batch, sampling, seed)]


def by_place(samples: Sequence[Sample]) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(sample.group, sample.index): tuple(sample.tokens) for sample in samples}


def close(model: Any, prompt: Sequence[int], sample: Sample, **how: float) -> bool:
    """Whether the log-probs are the model's."""
    expected = log_probs(model, prompt, sample.tokens, **how)
    return bool((expected - torch.tensor(sample.log_probs)).abs().max() < 1e-3)


async def idle(engine: VllmRollout) -> bool:
    """Whether vLLM holds no request and no block."""
    return not engine._engine.get_num_unfinished_requests() and await engine._engine.reset_prefix_cache()


# Weights.


@pytest.mark.parametrize("with_head", [False, True])
def test_greedy_tokens_follow_a_sync_of_tied_weights(
    engine: VllmRollout, models: list[Any], with_head: bool, run: Any
) -> None:
    batch = prompts([3, 40, 17, 1])
    weights = {name: value for name, value in models[1].state_dict().items() if with_head or name != "lm_head.weight"}
    expected = [[greedy(model, ids, R) for ids in batch["prompt_ids"]] for model in models[:2]]
    for version in (0, 1):
        if version:
            run(engine.sync(weights, version))
        samples = sorted(run(drawn(engine, batch, GREEDY)), key=lambda sample: sample.group)
        assert [list(sample.tokens) for sample in samples] == expected[version]
        assert [sample.version for sample in samples] == [version] * 4
        for sample, ids in zip(samples, batch["prompt_ids"], strict=True):
            assert close(models[version], ids, sample)
            assert not close(models[1 - version], ids, sample)
    assert all(one != other for one, other in zip(*expected, strict=True))


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_each_sample_is_drawn_by_the_weights_of_its_version(
    engine: VllmRollout, models: list[Any], in_flight: Any, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    monkeypatch.setattr(engine, "in_flight", in_flight)
    early, late = prompts([5] * 40), prompts([6] * 4, first=50)
    sampling = Sampling(n=2, max_tokens=R)
    order: list[str] = []

    async def collect(batch: Any, name: str, found: list[Sample]) -> None:
        async for sample in engine.generate(batch, sampling, seed=3):
            found.append(sample)
            order.append(name)

    async def sync() -> None:
        await engine.sync(models[1].state_dict(), 1)
        order.append("sync")

    async def body() -> tuple[list[Sample], list[Sample]]:
        before: list[Sample] = []
        after: list[Sample] = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(collect(early, "early", before))
            while not before:
                await asyncio.sleep(0)
            tasks.create_task(sync())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            tasks.create_task(collect(late, "late", after))
        return before, after

    before, after = run(body())
    assert (len(before), len(after)) == (80, 8)
    at = order.index("sync")
    assert "late" not in order[:at]
    old = [sample for sample in before if sample.version == 0]
    assert order[:at] == ["early"] * len(old)
    assert len(old) == 80 if in_flight == "wait" else 0 < len(old) < 80
    assert {sample.version for sample in before} <= {0, 1}
    assert {sample.version for sample in after} == {1}
    for batch, samples in ((early, before), (late, after)):
        ids = dict(zip(batch.ids, batch["prompt_ids"], strict=True))
        assert all(close(models[s.version], ids[s.group], s) for s in samples)
        assert not any(close(models[1 - s.version], ids[s.group], s) for s in samples if len(s.tokens) > 3)


# What is drawn.


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(n=3, max_tokens=R),
        Sampling(n=3, max_tokens=R, temperature=0.6, top_p=0.7, top_k=9),
    ],
    ids=["plain", "top"],
)
def test_log_probs_are_before_the_cuts_at_the_temperature(
    engine: VllmRollout, models: list[Any], sampling: Sampling, run: Any
) -> None:
    batch, other = prompts([2, 8, 33]), prompts([4, 5], first=9)

    async def body() -> tuple[list[Sample], list[Sample]]:
        # Greedy ones beside them, in the same steps.
        return await asyncio.gather(drawn(engine, batch, sampling), drawn(engine, other, GREEDY))

    found, beside = run(body())
    for sample in found:
        ids = batch["prompt_ids"][sample.group]
        assert close(models[0], ids, sample, temperature=sampling.temperature)
    for sample in beside:
        ids = other["prompt_ids"][sample.group - 9]
        assert list(sample.tokens) == greedy(models[0], ids, R)
        assert close(models[0], ids, sample)


def test_the_cuts_are_made(engine: VllmRollout, run: Any) -> None:
    batch = prompts([7, 20])
    best = by_place(run(drawn(engine, batch, GREEDY)))
    for cut in (Sampling(top_k=1), Sampling(top_p=1e-6)):
        assert by_place(run(drawn(engine, batch, replace(cut, temperature=2.0, max_tokens=R), seed=4))) == best
    assert by_place(run(drawn(engine, batch, Sampling(temperature=2.0, max_tokens=R), seed=4))) != best


def test_responses_end_at_the_models_tokens_and_at_those_asked_for(engine: VllmRollout, run: Any) -> None:
    batch, sampling = prompts([5, 6]), Sampling(n=8, temperature=1.5, max_tokens=6)
    free = run(drawn(engine, batch, sampling, seed=1))
    assert {sample.finish for sample in free} == {"stop", "length"}
    for sample in free:
        assert not set(ENDS) & set(sample.tokens[:-1])
        assert (sample.finish == "stop") == (sample.tokens[-1] in ENDS)
        assert sample.finish == "stop" or len(sample.tokens) == 6
        assert len(sample.log_probs) == len(sample.tokens)
    stop = next(token for sample in free for token in sample.tokens[:-1])
    expected = {
        place: tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        for place, tokens in by_place(free).items()
    }
    assert by_place(run(drawn(engine, batch, replace(sampling, stop_token_ids=(stop,)), seed=1))) == expected


def test_a_sample_depends_on_its_seed_alone(engine: VllmRollout, run: Any) -> None:
    batch, sampling = prompts([3, 33, 7, 5, 12, 9]), Sampling(n=4, temperature=1.2, max_tokens=R)
    whole = by_place(run(drawn(engine, batch, sampling, seed=5)))
    assert by_place(run(drawn(engine, batch, sampling, seed=6))) != whole
    backwards = run(drawn(engine, batch.select([5, 2, 0]), sampling, seed=5))
    assert by_place(backwards).items() <= whole.items()
    assert len(set(whole.values())) > 20

    async def turns() -> list[Sample]:
        ids = batch["prompt_ids"]
        asked = [engine.sample(ids[g], sampling, (5, g, i)) for g in (4, 1) for i in range(4)]
        return await asyncio.gather(*asked)

    got = run(turns())
    assert [tuple(sample.tokens) for sample in got] == [whole[g, i] for g in (4, 1) for i in range(4)]
    assert {(sample.group, sample.index) for sample in got} == {(0, 0)}


# What ends early.


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_generator_closed_early_frees_its_samples_in_flight(engine: VllmRollout, how: str, run: Any) -> None:
    async def read(stream: AsyncIterator[Sample]) -> None:
        async for _sample in stream:
            pass

    async def body() -> bool:
        async with aclosing(engine.generate(prompts([3] * 40), Sampling(n=2, max_tokens=R), seed=0)) as stream:
            await anext(stream)
            assert engine._engine.get_num_unfinished_requests(), "a sample comes when it ends"
            if how == "cancel":
                reader = asyncio.ensure_future(read(stream))
                await asyncio.sleep(0)
                reader.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reader
        return await idle(engine)

    assert run(body())


def test_what_vllm_does_not_take_fails_alone(engine: VllmRollout, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "max_prompt_length", P + R)
    with pytest.raises(DataError, match=r"vLLM does not take the prompt of group 0: .*longer than"):
        run(drawn(engine, prompts([P + R]), GREEDY))
    assert len(run(drawn(engine, prompts([P]), Sampling(n=2, max_tokens=R)))) == 2


# Processes.


def test_two_processes_draw_sync_and_end(paths: list[str], models: list[Any], run: Any) -> None:
    """The model is split over them; it is untied, and its cache so small that samples lose their blocks."""
    me = psutil.Process()
    others, listening = set(below()), set(listeners(me))
    batch, sampling = prompts([30, 28, 60, 3]), Sampling(n=4, temperature=1.2, max_tokens=R)
    other = VllmRollout(paths[2], P, R, max_num_seqs=6, kv_cache_bytes=9 << 14, tensor_parallel=2)

    async def body() -> None:
        for version, model in enumerate((models[2], models[1], models[0])):
            if version:
                await other.sync({name: value.clone() for name, value in model.state_dict().items()}, version)
            # All that vLLM starts stays on this machine.
            assert not [each for each in set(listeners(me)) - listening if not each.loopback]
            for sample in await drawn(other, batch, GREEDY):
                assert sample.version == version
                assert list(sample.tokens) == greedy(model, batch["prompt_ids"][sample.group], R)
                assert close(model, batch["prompt_ids"][sample.group], sample)
            for sample in await drawn(other, batch, sampling):
                assert close(model, batch["prompt_ids"][sample.group], sample, temperature=1.2)
        drawing = asyncio.ensure_future(drawn(other, prompts([3] * 40), Sampling(n=2, max_tokens=R)))
        await asyncio.sleep(0.01)
        other.close()
        with pytest.raises(Aborted, match="was closed"):
            await drawing

    try:
        run(body())
    finally:
        other.close()
    assert not left(list(set(below()) - others), timeout=30)


def test_an_engine_that_does_not_start_says_why(paths: list[str], tmp_path: Path) -> None:
    kept = os.dup(2)
    try:
        with open(tmp_path / "stderr", "w") as file:
            os.dup2(file.fileno(), 2)  # a file, as in Ray's workers
        with pytest.raises(RunError, match=r"does not start with model .*kv_cache_bytes=1024, .*cache blocks") as error:
            VllmRollout(paths[0], P, R, kv_cache_bytes=1 << 10)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert "root cause" not in str(error.value)


def test_the_death_of_its_process_ends_a_sync(engine: VllmRollout, models: list[Any], run: Any) -> None:
    """During a call vLLM itself would never return. The last test with this engine."""

    async def body() -> None:
        (process,) = [p for p in below() if "EngineCore" in " ".join(command(p))]
        process.suspend()
        sync = asyncio.ensure_future(engine.sync(models[1].state_dict(), 1))
        await asyncio.sleep(0.3)
        assert not sync.done()
        behind = asyncio.ensure_future(drawn(engine, prompts([3]), GREEDY))
        process.kill()
        for waiting in (sync, behind):
            with pytest.raises(ServiceLost, match="vLLM failed"):
                await waiting
        with pytest.raises(ServiceLost, match="has to be rebuilt"):
            await engine.sync(models[0].state_dict(), 9)

    run(body())
