"""vLLM on a GPU, in bf16: only where there is one. `make gpu-check` runs it and prints what sleep frees."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dataflow.engines.base import RolloutEngine, Sample, Sampling
from tests.engines.tiny_models import load, log_probs, prompts, save_model

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="samples on CUDA: this machine has no GPU"),
]

LENGTHS, LIMIT, APART = [5, 9, 3, 7], 12, 0.3
"""APART: what a log-prob in bf16 may differ by from one in fp32."""


async def sampled(engine: RolloutEngine, sampling: Sampling, seed: int = 0) -> list[Sample]:
    found = [sample async for sample in engine.generate(prompts(LENGTHS), sampling, seed)]
    return sorted(found, key=lambda sample: (sample.group, sample.index))


def near(path: str, samples: list[Sample]) -> bool:
    """Whether the log-probs are those of this model."""
    model = load(path)
    of = prompts(LENGTHS)["prompt_ids"]
    return all(
        torch.allclose(torch.tensor(list(s.log_probs)), log_probs(model, of[s.group], list(s.tokens)), atol=APART)
        for s in samples
    )


def test_sync_seeds_sleep_and_wake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dataflow.engines.vllm_async import AsyncVllmRollout

    first, second = (save_model(tmp_path / str(seed), seed) for seed in (0, 9))
    weights = {name: w for name, w in load(second).state_dict().items() if name != "lm_head.weight"}

    async def body() -> None:
        engine = AsyncVllmRollout(
            first, 12, LIMIT, dtype="bfloat16", device="cuda", kv_cache_bytes=None, gpu_memory=0.3
        )
        sampling = Sampling(n=4, max_tokens=LIMIT)
        before = await sampled(engine, sampling)
        assert [s.tokens for s in before] == [s.tokens for s in await sampled(engine, sampling)], "seeds reproduce"
        assert near(first, before)
        awake = torch.cuda.mem_get_info()[0]
        await engine.sleep()
        asleep = torch.cuda.mem_get_info()[0]
        await engine.sync(weights, 1)
        await engine.wake()
        again = torch.cuda.mem_get_info()[0]
        after = await sampled(engine, sampling)
        assert {s.version for s in after} == {1}
        assert near(second, after)
        assert not near(first, after)
        with capsys.disabled():
            print(
                f"\nfree: {awake / 2**30:.2f} GiB awake, {asleep / 2**30:.2f} asleep, {again / 2**30:.2f} awake again"
            )
        assert asleep > awake
        engine.close()

    asyncio.run(body())
