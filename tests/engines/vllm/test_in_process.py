"""vLLM in this process against plain transformers forwards: weights, log-probs, seeds, and the order of events."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.engines.base import Sample, Sampling
from dataflow.engines.vllm.in_process import VllmRollout
from dataflow.errors import Aborted, ConfigError, DataError, DataflowError, ModelError, RunError
from tests.engines.drawing import DEADLINE_S, draw, generate, run
from tests.engines.tiny_models import ENDS, PAD, VOCAB, greedy, load, log_probs, prompts, save_model

pytestmark = [pytest.mark.heavy, pytest.mark.vllm, pytest.mark.timeout(300)]
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

P, R, SEATS = 80, 24, 16
GREEDY = Sampling(temperature=0.0, max_tokens=R)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three models: two tied ones that differ in their weights, and an untied one."""
    home = tmp_path_factory.mktemp("models")
    return [save_model(home / str(seed), seed, tie=seed < 2) for seed in range(3)]


@pytest.fixture(scope="module")
def models(paths: list[str]) -> list[Any]:
    return [load(path) for path in paths]


@pytest.fixture(scope="module")
def shared(paths: list[str]) -> Iterator[VllmRollout]:
    engine = VllmRollout(paths[0], P, R, max_num_seqs=SEATS, kv_cache_bytes=32 << 20)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: VllmRollout, models: list[Any]) -> VllmRollout:
    """The shared engine with the first model's weights and an empty prefix cache."""
    run(shared.sync(models[0].state_dict(), 0))
    return shared


def by_place(samples: Sequence[Sample]) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(sample.group, sample.index): tuple(sample.tokens) for sample in samples}


def close(model: Any, prompt: Sequence[int], sample: Sample, **how: float) -> bool:
    """Whether the log-probs are the model's."""
    expected = log_probs(model, prompt, sample.tokens, **how)
    return bool((expected - torch.tensor(sample.log_probs)).abs().max() < 1e-3)


async def inside(engine: VllmRollout, look: Callable[[Any], Any]) -> Any:
    """Calls a function with vLLM's engine, in its thread: what vLLM itself holds and does, which no engine offers."""
    return await engine._backend.call(look)


def left(engine: VllmRollout) -> tuple[int, int, bool]:
    """Returns what vLLM still holds: requests of its own count and its scheduler's, and whether any blocks."""

    def look(llm: Any) -> tuple[int, int, bool]:
        scheduler = llm.engine_core.engine_core.scheduler
        return llm.get_num_unfinished_requests(), sum(scheduler.get_request_counts()), not llm.reset_prefix_cache()

    return run(inside(engine, look))


@asynccontextmanager
async def held(engine: VllmRollout, when: Callable[[int], bool] = bool) -> AsyncIterator[threading.Event]:
    """Holds the engine before the first step at which this number of samples have ended, until the event is set."""
    go, ended = threading.Event(), 0

    def install(llm: Any) -> None:
        step = llm.step

        def limited() -> Any:
            nonlocal ended
            if when(ended):
                assert go.wait(DEADLINE_S)
            outputs = step()
            ended += len(outputs)
            return outputs

        llm.step = limited

    await inside(engine, install)
    try:
        yield go
    finally:
        go.set()
        await inside(engine, lambda llm: llm.__dict__.pop("step"))


# Weights.


@pytest.mark.parametrize("with_head", [False, True])
def test_greedy_tokens_follow_a_sync_of_tied_weights(engine: VllmRollout, models: list[Any], with_head: bool) -> None:
    batch = prompts([3, 40, 17, 1])
    weights = {name: value for name, value in models[1].state_dict().items() if with_head or name != "lm_head.weight"}
    assert ("lm_head.weight" in weights) == with_head
    expected = [[greedy(model, ids, R) for ids in batch["prompt_ids"]] for model in models[:2]]
    for version in (0, 1):
        if version:
            run(engine.sync(weights, version))
        samples = sorted(draw(engine, batch, GREEDY), key=lambda sample: sample.group)
        assert [list(sample.tokens) for sample in samples] == expected[version]
        assert [sample.version for sample in samples] == [version] * 4
        for sample, ids in zip(samples, batch["prompt_ids"], strict=True):
            assert close(models[version], ids, sample)
            assert not close(models[1 - version], ids, sample)
    assert all(one != other for one, other in zip(*expected, strict=True))
    assert engine.version == 1


def test_a_sync_that_does_not_fit_changes_nothing(engine: VllmRollout, models: list[Any]) -> None:
    good = models[1].state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    cases = {
        r"no weight 'model.norm.wieght'; did you mean 'model.norm.weight'\?": {**good, "model.norm.wieght": good[name]},
        r"'model.norm.weight' has shape \(3,\), the model needs \(64,\)": {**good, "model.norm.weight": torch.ones(3)},
        f"1 weights are missing, first '{name}'": {key: value for key, value in good.items() if key != name},
        "are tied but differ": {**good, "lm_head.weight": good["lm_head.weight"] + 1},
    }
    for message, weights in cases.items():
        with pytest.raises(DataflowError, match=message):
            run(engine.sync(weights, 7))
    assert engine.version == 0
    (sample,) = draw(engine, prompts([9]), GREEDY)
    assert list(sample.tokens) == greedy(models[0], prompts([9])["prompt_ids"][0], R)


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_each_sample_is_drawn_by_the_weights_of_its_version(
    engine: VllmRollout, models: list[Any], in_flight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "in_flight", in_flight)
    early, late = prompts([5] * 20), prompts([6] * 4, first=50)
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
        async with held(engine) as go, asyncio.TaskGroup() as tasks:
            tasks.create_task(collect(early, "early", before))
            while not before:
                await asyncio.sleep(0)
            tasks.create_task(sync())
            await asyncio.sleep(0)
            tasks.create_task(collect(late, "late", after))
            await asyncio.sleep(0)
            go.set()
        return before, after

    before, after = run(body())
    assert len(before) == 40
    assert len(after) == 8
    at = order.index("sync")
    assert "late" not in order[:at]
    drawn_old = [sample for sample in before if sample.version == 0]
    if in_flight == "wait":
        assert len(drawn_old) == 40
        assert "early" not in order[at:]
    else:
        assert 0 < len(drawn_old) < 40
        assert order[:at] == ["early"] * len(drawn_old)
    assert {sample.version for sample in after} == {1}
    for batch, samples in ((early, before), (late, after)):
        ids = dict(zip(batch.ids, batch["prompt_ids"], strict=True))
        assert all(close(models[s.version], ids[s.group], s) for s in samples)
        assert not any(close(models[1 - s.version], ids[s.group], s) for s in samples if len(s.tokens) > 3)
    # Restarted samples equal samples requested at that moment.
    new = [sample for sample in before if sample.version == 1]
    whole = by_place(draw(engine, early, sampling, seed=3))
    assert by_place(new).items() <= whole.items()


# What is drawn.


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(n=3, max_tokens=R),
        Sampling(n=3, max_tokens=R, temperature=0.6, top_p=0.7, top_k=9),
        Sampling(n=3, max_tokens=R, temperature=1.7, min_p=0.1),
        Sampling(n=3, max_tokens=R, temperature=0.8, repetition_penalty=1.5, top_p=0.9),
    ],
    ids=["plain", "top", "min_p", "penalty"],
)
def test_log_probs_are_before_the_cuts_at_the_temperature(
    engine: VllmRollout, models: list[Any], sampling: Sampling
) -> None:
    batch, other = prompts([2, 8, 33]), prompts([4, 5], first=9)

    async def body() -> tuple[list[Sample], list[Sample]]:
        async def all_of(*asked: Any) -> list[Sample]:
            return [sample async for sample in engine.generate(*asked, 0)]

        # Greedy ones beside them, in the same steps.
        return await asyncio.gather(all_of(batch, sampling), all_of(other, GREEDY))

    drawn, beside = run(body())
    for sample in drawn:
        ids = batch["prompt_ids"][sample.group]
        assert close(models[0], ids, sample, temperature=sampling.temperature, penalty=sampling.repetition_penalty)
    for sample in beside:
        ids = other["prompt_ids"][sample.group - 9]
        assert list(sample.tokens) == greedy(models[0], ids, R)
        assert close(models[0], ids, sample)


def test_the_cuts_are_made(engine: VllmRollout) -> None:
    batch = prompts([7, 20])
    best = by_place(draw(engine, batch, GREEDY))
    for cut in (Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(min_p=1.0)):
        assert by_place(draw(engine, batch, replace(cut, temperature=2.0, max_tokens=R), seed=4)) == best
    free = draw(engine, batch, Sampling(temperature=2.0, max_tokens=R), seed=4)
    assert by_place(free) != best


def test_responses_end_at_the_models_tokens_and_at_those_asked_for(engine: VllmRollout) -> None:
    batch, sampling = prompts([5, 6]), Sampling(n=8, temperature=1.5, max_tokens=6)
    free = draw(engine, batch, sampling, seed=1)
    assert {sample.finish for sample in free} == {"stop", "length"}
    for sample in free:
        assert not set(ENDS) & set(sample.tokens[:-1])
        assert (sample.finish == "stop") == (sample.tokens[-1] in ENDS)
        assert sample.finish == "stop" or len(sample.tokens) == 6
        assert len(sample.log_probs) == len(sample.tokens)
    stop = next(token for sample in free for token in sample.tokens[:-1])
    cut = draw(engine, batch, replace(sampling, stop_token_ids=(stop,)), seed=1)
    expected = {
        place: tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        for place, tokens in by_place(free).items()
    }
    assert by_place(cut) == expected


def test_a_batch_of_it(engine: VllmRollout) -> None:
    batch = prompts([3, 12])
    out = generate(engine, batch, Sampling(n=4, temperature=1.5, max_tokens=16), seed=3)
    assert out.groups.tolist() == [0] * 4 + [1] * 4
    assert out.meta == {"weights_version": 0}
    assert out["responses"].shape == out["rollout_log_probs"].shape == (8, 16)
    behind = out["response_mask"] == 0
    assert (out["responses"][behind] == PAD).all()
    assert not out["rollout_log_probs"][behind].any()
    assert len(set(out["response_mask"].sum(1).tolist())) > 2


def test_the_samples_of_a_prompt_share_it(engine: VllmRollout, models: list[Any]) -> None:
    def cached(n: int) -> int:
        before = engine.stats()["cached_tokens"]
        draw(engine, prompts([70], first=7), Sampling(n=n, max_tokens=2))
        return int(engine.stats()["cached_tokens"] - before)

    assert cached(5) == 4 * 64, "two whole blocks of 32 for all but the first"
    assert cached(1) == 64
    run(engine.sync(models[1].state_dict(), 1))
    assert cached(1) == 0, "nothing of the old weights is left"


def test_a_sample_depends_on_its_seed_alone(engine: VllmRollout, paths: list[str]) -> None:
    batch, sampling = prompts([3, 33, 7, 5, 12, 9]), Sampling(n=4, temperature=1.2, max_tokens=R)
    whole = by_place(draw(engine, batch, sampling, seed=5))
    assert by_place(draw(engine, batch, sampling, seed=5)) == whole
    assert by_place(draw(engine, batch, sampling, seed=6)) != whole
    backwards = draw(engine, batch.select([5, 2, 0]), sampling, seed=5)
    assert by_place(backwards).items() <= whole.items()
    assert len(backwards) == 12
    assert len(set(whole.values())) > 20

    async def turns() -> list[Sample]:
        ids = batch["prompt_ids"]
        asked = [engine.sample(ids[g], sampling, (5, g, i)) for g in (4, 1) for i in range(4)]
        return await asyncio.gather(*asked)

    got = run(turns())
    assert [tuple(sample.tokens) for sample in got] == [whole[g, i] for g in (4, 1) for i in range(4)]
    assert {(sample.group, sample.index) for sample in got} == {(0, 0)}


# Who gets what when.


def test_samples_come_as_they_end(engine: VllmRollout) -> None:
    async def body() -> None:
        stream = engine.generate(prompts([3, 12, 7]), Sampling(n=5, temperature=1.5, max_tokens=R), seed=3)
        async with held(engine) as go:
            first = await anext(stream)
            running = engine.stats()["running"]
            assert 0 < running < 15, "the engine is held: nothing ends meanwhile"
            go.set()
            rest = [sample async for sample in stream]
        lengths = [len(sample.tokens) for sample in (first, *rest)]
        assert len(lengths) == 15
        assert lengths == sorted(lengths)
        assert lengths[0] < lengths[-1]

    run(body())
    assert engine.stats()["running"] == 0


def test_abort_frees_what_is_in_flight(engine: VllmRollout) -> None:
    async def body() -> None:
        batch = prompts([3] * SEATS)
        async with held(engine, lambda ended: True) as go:
            stream = engine.generate(batch, Sampling(n=2, max_tokens=R), seed=0)
            waiters = [
                asyncio.ensure_future(anext(stream)),
                asyncio.ensure_future(engine.sample(batch["prompt_ids"][0], GREEDY, (1,))),
            ]
            await asyncio.sleep(0)
            assert engine.stats()["running"] == 2 * SEATS + 1
            assert await engine.abort() == 2 * SEATS + 1
            assert engine.stats()["running"] == 0
            for waiter in waiters:
                with pytest.raises(Aborted, match="aborted"):
                    await waiter
            go.set()
        assert await engine.abort() == 0

    run(body())
    assert left(engine) == (0, 0, False)
    assert len(draw(engine, prompts([3]), GREEDY)) == 1


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_generator_closed_early_frees_its_samples_in_flight(engine: VllmRollout, how: str) -> None:
    async def body() -> None:
        stream = engine.generate(prompts([3] * 20), Sampling(n=2, max_tokens=R), seed=0)
        async with held(engine) as go:
            await anext(stream)
            if how == "close":
                await stream.aclose()
            else:
                reader = asyncio.ensure_future(_read(stream))
                await asyncio.sleep(0)
                reader.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reader
            assert engine.stats()["running"] == 0
            go.set()

    run(body())
    assert left(engine) == (0, 0, False)


async def _read(stream: AsyncIterator[Sample]) -> list[Sample]:
    return [sample async for sample in stream]


def test_sleep_waits_for_what_is_in_flight(engine: VllmRollout) -> None:
    async def body() -> None:
        stream = engine.generate(prompts([3] * 4), Sampling(n=2, max_tokens=R), seed=0)
        async with held(engine) as go:
            await anext(stream)
            asleep = asyncio.ensure_future(engine.sleep())
            await asyncio.sleep(0)
            assert not asleep.done()
            go.set()
            await asleep
            assert engine.stats()["running"] == 0
            assert len([sample async for sample in stream]) == 7
        await engine.sleep()
        await engine.wake()
        await engine.wake()

    run(body())
    assert len(draw(engine, prompts([3]), GREEDY)) == 1


# Bad input.


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(n=0), "n=0; give 1 or more"),
        (Sampling(temperature=-1.0), "temperature=-1.0"),
        (Sampling(temperature=0.001), "temperature=0.001; vLLM takes 0"),
        (Sampling(temperature=2.5), "temperature=2.5; vLLM takes 0"),
        (Sampling(top_p=0.0), "top_p=0.0"),
        (Sampling(max_tokens=R + 1), f"max_tokens={R + 1} is more than the {R}"),
        (Sampling(stop_token_ids=(VOCAB,)), f"stop_token_ids has {VOCAB}"),
    ],
)
def test_bad_sampling(engine: VllmRollout, sampling: Sampling, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw(engine, prompts([3]), sampling)
    if sampling.n:
        with pytest.raises(ConfigError, match=message):
            run(engine.sample([3], sampling, (0,)))


def test_bad_prompts(engine: VllmRollout) -> None:
    for lengths, message in (([3, 0], "prompt of group 1 is empty"), ([3, P + 1], f"has {P + 1} tokens")):
        with pytest.raises(DataError, match=message):
            draw(engine, prompts(lengths), GREEDY)
    unknown = prompts([3])
    unknown["prompt_ids"][0][1] = VOCAB
    with pytest.raises(DataError, match=f"group 0 has token {VOCAB}; the model has 0 to {VOCAB - 1}"):
        draw(engine, unknown, GREEDY)
    assert left(engine) == (0, 0, False)
    longest = prompts([P])
    assert len(draw(engine, longest, Sampling(n=2, max_tokens=R))) == 2


def test_what_vllm_refuses_fails_alone(engine: VllmRollout) -> None:
    async def body() -> None:
        def install(llm: Any) -> None:
            add = llm.add_request

            def picky(name: str, prompt: Any, params: Any) -> str:
                if len(prompt["prompt_token_ids"]) == 5:
                    raise ValueError("not this one")
                return add(name, prompt, params)

            llm.add_request = picky

        await inside(engine, install)
        try:
            good = asyncio.ensure_future(_read(engine.generate(prompts([3, 4]), GREEDY, seed=0)))
            with pytest.raises(DataError, match="prompt of group 1: not this one") as failure:
                await _read(engine.generate(prompts([3, 5]), GREEDY, seed=0))
            assert isinstance(failure.value.__cause__, ValueError)
            assert len(await good) == 2
        finally:
            await inside(engine, lambda llm: llm.__dict__.pop("add_request"))

    run(body())
    assert left(engine) == (0, 0, False)


def test_bad_arguments(paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ConfigError, "dtype 'float31' is unknown; did you mean 'float32'", {"dtype": "float31"}),
        (ConfigError, "in_flight 'Wait' is unknown; did you mean 'wait'", {"in_flight": "Wait"}),
        (ConfigError, "device 'tpu' is unknown", {"device": "tpu"}),
        (ConfigError, "each is 1 at least", {"max_num_seqs": 0}),
        (ConfigError, "max_tokens=49 are more than the 128 tokens", {"max_tokens": 49}),
        (ModelError, "does not exist", {"model": str(tmp_path / "missing")}),
        (ModelError, "cannot be loaded", {"model": str(tmp_path)}),
        (ModelError, "names no eos_token_id", {"model": save_model(tmp_path / "endless", 0, ends=())}),
    ]
    for kind, message, wrong in cases:
        with pytest.raises(kind, match=message):
            VllmRollout(**{"model": paths[0], "max_prompt_length": P, "max_tokens": R} | wrong)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for device, extra in (("cpu", "cpu"), ("cuda", "gpu")):
        with pytest.raises(ConfigError, match=rf"pip install 'dataflow-rl\[{extra}\]'"):
            VllmRollout(paths[0], P, R, device=device)


# Other engines; a process holds one at a time, so they come last.


def test_an_untied_model_and_another_engine(engine: VllmRollout, paths: list[str], models: list[Any]) -> None:
    batch, sampling = prompts([30, 28, 60, 3]), Sampling(n=4, temperature=1.2, max_tokens=R)
    first = by_place(draw(engine, batch, sampling, seed=5))
    with pytest.raises(ConfigError, match="this process has a vLLM engine"):
        VllmRollout(paths[2], P, R)
    assert "LD_PRELOAD" in os.environ, "vLLM's doing, which no later child should have"
    engine.close()
    engine.close()
    assert "LD_PRELOAD" not in os.environ
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"device 'cuda': .* offers 'cpu'; pip install 'dataflow-rl\[gpu\]'"):
            VllmRollout(paths[2], P, R, device="cuda")
    with pytest.raises(RunError, match=r"does not start with model .*kv_cache_bytes=1024, .*cache blocks"):
        VllmRollout(paths[2], P, R, kv_cache_bytes=1 << 10)
    with pytest.raises(Aborted, match="was closed"):
        draw(engine, batch, sampling)
    # Room for few prompts a step, and for so few blocks of 16 KiB that samples lose theirs and have to begin again.
    tight = {"max_num_batched_tokens": P + R}
    other = VllmRollout(paths[2], P, R, max_num_seqs=6, kv_cache_bytes=9 << 14, options=tight)
    try:
        for version, weights in ((0, None), (1, replaced := _untied(models[1])), (2, _untied(models[0]))):
            if weights is not None:
                run(other.sync(weights, version))
            model = {0: models[2], 1: models[1], 2: models[0]}[version]
            (sample,) = draw(other, prompts([9]), GREEDY)
            assert list(sample.tokens) == greedy(model, prompts([9])["prompt_ids"][0], R)
            assert close(model, prompts([9])["prompt_ids"][0], sample)
        del replaced["lm_head.weight"]
        with pytest.raises(DataflowError, match=r"1 weights are missing, first 'lm_head.weight'"):
            run(other.sync(replaced, 3))
        # The same function of its weights: the same samples.
        preempted = run(inside(other, _count_preemptions))
        assert by_place(draw(other, batch, sampling, seed=5)) == first
        assert preempted
        _fails(other, _untied(models[0]))
    finally:
        other.close()


def _count_preemptions(llm: Any) -> list[str]:
    scheduler, preempted = llm.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **options)

    scheduler._preempt_request = counted
    return preempted


def _untied(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _fails(engine: VllmRollout, weights: dict[str, torch.Tensor]) -> None:
    """The error of a step is raised to all current and later callers."""
    go = threading.Event()

    def broken() -> Any:
        assert go.wait(DEADLINE_S)
        raise ValueError("no such block")

    async def body() -> None:
        await inside(engine, lambda llm: setattr(llm, "step", broken))
        asked = [_read(engine.generate(prompts([3]), GREEDY, seed=0)), engine.sample([3], GREEDY, (0,))]
        asked += [engine.sync(weights, 9), engine.sleep()]
        waiters = [asyncio.ensure_future(work) for work in asked]
        await asyncio.sleep(0)
        go.set()
        for waiter in waiters:
            with pytest.raises(RunError, match=r"vLLM failed .ValueError: no such block") as failure:
                await waiter
            assert isinstance(failure.value.__cause__, ValueError)
        assert engine.stats()["running"] == 0
        with pytest.raises(RunError, match="has to be rebuilt"):
            await engine.sample([3], GREEDY, (0,))

    run(body())
