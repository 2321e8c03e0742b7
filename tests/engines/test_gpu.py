"""vLLM on a GPU, in bf16: skipped without one. `make gpu-check` runs it and prints what sleep frees."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dataflow.engines.base import RolloutEngine, Sample, Sampling
from tests.engines.tiny_models import load, log_probs, prompts, save_model
from tests.rigs.cuda import why_not

if TYPE_CHECKING:
    from dataflow.engines.vllm.engine import VllmRollout

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=f"samples on CUDA: {why_not()}"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="samples with vLLM, which is not installed"),
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


def weights_of(path: str) -> dict[str, torch.Tensor]:
    """Returns its weights; a tied head's, which the embedding's are, are left out."""
    model = load(path)
    tied = model.config.tie_word_embeddings
    return {name: w for name, w in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def build(path: str, **options: Any) -> VllmRollout:
    from dataflow.engines.vllm.engine import VllmRollout

    return VllmRollout(path, 12, LIMIT, dtype="bfloat16", device="cuda", kv_cache_bytes=None, gpu_memory=0.3, **options)


def test_sync_seeds_sleep_and_wake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (save_model(tmp_path / str(seed), seed) for seed in (0, 9))

    async def body() -> None:
        engine = build(first)
        sampling = Sampling(n=4, max_tokens=LIMIT)
        before = await sampled(engine, sampling)
        assert [s.tokens for s in before] == [s.tokens for s in await sampled(engine, sampling)], "seeds reproduce"
        assert near(first, before)
        awake = torch.cuda.mem_get_info()[0]
        await engine.sleep()
        asleep = torch.cuda.mem_get_info()[0]
        await engine.sync(weights_of(second), 1)
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


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("tie", [True, False])
def test_syncs_through_cuda_ipc_in_chunks(
    tie: bool, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One buffer, packed again for every chunk; two syncs, as the second needs the mappings of the first unmapped."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"tensor_parallel={gpus}: this machine has {torch.cuda.device_count()} GPU")
    paths = [save_model(tmp_path / str(seed), seed, tie=tie) for seed in (0, 9, 17)]

    async def body() -> None:
        engine = build(paths[0], tensor_parallel=gpus)
        monkeypatch.setattr("dataflow.engines.vllm.engine._BUFFER_BYTES", 1)  # a weight a chunk, or a few
        for version, path in enumerate(paths):
            if version:
                await engine.sync(weights_of(path), version)
                assert not torch.cuda.memory_reserved(), "the buffers are freed"
            samples = await sampled(engine, Sampling(n=2, max_tokens=LIMIT))
            assert {s.version for s in samples} == {version}
            assert [near(other, samples) for other in paths] == [other == path for other in paths]
        engine.close()

    asyncio.run(body())
