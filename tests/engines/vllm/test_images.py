"""Images in vLLM: what it says of them is what the trainer computes from the same tokens and pixels."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.data.pictures import Shown
from dataflow.engines.base import Sampling
from dataflow.engines.vllm.engine import VllmRollout
from dataflow.errors import ConfigError, DataError
from dataflow.models.tiny_vision import write_tiny_vision
from tests.engines.images import R, by_transformers, source

pytestmark = [pytest.mark.heavy, pytest.mark.vllm, pytest.mark.timeout(300)]
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

SAMPLING = Sampling(n=3, max_tokens=R)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield write_tiny_vision(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines on one event loop, to which the engine is bound."""
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, 120))


@pytest.fixture(scope="module")
def engine(model: Path, run: Any) -> Iterator[VllmRollout]:
    before = dict(os.environ)
    made = VllmRollout(str(model), 64, R, max_num_seqs=8, kv_cache_bytes=32 << 20)
    yield made
    made.close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def generate(run: Any) -> Callable[..., Batch]:
    """Returns the samples of an engine as a batch."""

    async def drawn(engine: VllmRollout, prompts: Batch, sampling: Sampling, seed: int = 0) -> Batch:
        samples = [sample async for sample in engine.generate(prompts, sampling, seed)]
        return engine.batch(prompts, samples, sampling.max_tokens)

    return lambda *asked, **options: run(drawn(*asked, **options))


@pytest.fixture(scope="module")
def prompts(model: Path) -> Batch:
    return source(model).all()


def apart(batch: Batch, model: Path) -> torch.Tensor:
    """Returns the largest difference of each row's log-probs from those of a plain forward."""
    return (batch["rollout_log_probs"] - by_transformers(model, batch)).abs().amax(dim=1)


def test_it_samples_what_transformers_computes_from_the_images(
    engine: VllmRollout, model: Path, prompts: Batch, tmp_path: Path, run: Any, generate: Any
) -> None:
    batch = generate(engine, prompts, SAMPLING)
    assert apart(batch, model).max() < 1e-4
    # Again, with what the caches hold of the prompts and the images.
    assert apart(generate(engine, prompts, SAMPLING, seed=1), model).max() < 1e-4

    shown = list(prompts["multi_modal_inputs"])
    other = Shown({**shown[0].inputs, "pixel_values": -shown[0].inputs["pixel_values"]}, shown[0].positions)
    wrong = generate(engine, prompts.merge(prompts.like(multi_modal_inputs=[other, *shown[1:]])), SAMPLING)
    assert apart(wrong, model).max() < 1e-4
    mixed = wrong.merge(wrong.like(multi_modal_inputs=batch["multi_modal_inputs"]))
    assert apart(mixed, model)[:3].min() > 1e-3
    assert apart(mixed, model)[3:].max() < 1e-4

    # After a sync, of the images as well: what the caches hold of them is by the old weights.
    from transformers import Qwen2VLForConditionalGeneration

    moved = write_tiny_vision(tmp_path / "moved", seed=1)
    weights = Qwen2VLForConditionalGeneration.from_pretrained(moved).state_dict()
    run(engine.sync(weights, 1))
    assert apart(generate(engine, prompts, SAMPLING), moved).max() < 1e-4
    run(engine.sync(Qwen2VLForConditionalGeneration.from_pretrained(model).state_dict(), 0))


def test_it_never_draws_a_token_of_an_image(
    engine: VllmRollout, model: Path, prompts: Batch, tmp_path: Path, run: Any, generate: Any
) -> None:
    from transformers import Qwen2VLForConditionalGeneration

    loud = Qwen2VLForConditionalGeneration.from_pretrained(model)
    ids = [loud.config.image_token_id, loud.config.video_token_id]
    with torch.no_grad():
        # One of the two is likely after every token.
        loud.get_input_embeddings().weight[ids] = torch.stack([way := torch.randn(64), -way])
    loud.save_pretrained(tmp_path / "loud")
    run(engine.sync(loud.state_dict(), 1))
    for temperature in (0.0, 1.0):
        batch = generate(engine, prompts, replace(SAMPLING, temperature=temperature))
        assert batch["rollout_log_probs"].min() < -5
        assert not torch.isin(batch["responses"], torch.tensor(ids)).any()
        assert apart(batch, tmp_path / "loud").max() < 1e-3


def test_a_prompt_whose_tokens_are_not_those_of_its_images_is_refused(
    engine: VllmRollout, prompts: Batch, run: Any, generate: Any
) -> None:
    shown = list(prompts["multi_modal_inputs"])
    swapped = prompts.merge(prompts.like(multi_modal_inputs=[shown[2], *shown[1:]]))
    with pytest.raises(DataError, match=r"the prompt of group 0 has 4 tokens for patches of images, and .* have 0;"):
        generate(engine, swapped, SAMPLING)
    with pytest.raises(ConfigError, match="conversations cannot show images yet"):
        run(engine.sample(prompts["prompt_ids"][0], SAMPLING, [1]))
