"""Prompts with images for vLLM: they reach it as the trainer reads them, as tokens and pixels.

vLLM's own processor would make both anew from the images. Nothing says that its result is the trainer's: it may use
another implementation, and a prompt has a token for each patch that it finds.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from dataflow.errors import DataError

MODEL = "DATAFLOW_VLLM_IMAGES"
"""Environment variable with the model that vLLM's processes have to :func:`register`."""
_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_PILLOW = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"


def image_input(prompt: Sequence[int], shown: Any, config: Any, group: int) -> dict[str, Any]:
    """Returns what vLLM's ``MultiModalInput`` has besides the token ids; nothing for a prompt without images.

    It raises DataError if the tokens for patches in the prompt are not those of the images in ``shown.inputs``.
    """
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    grids = shown.inputs.get("image_grid_thw")
    patches = [] if grids is None else grids.prod(dim=1).tolist()
    lengths = [count // config.vision_config.spatial_merge_size**2 for count in patches]
    starts = _starts(prompt, int(config.image_token_id), lengths)
    if starts is None:
        raise DataError(
            f"rollout: the prompt of group {group} has {list(prompt).count(int(config.image_token_id))} tokens for "
            f"patches of images, and its images have {sum(lengths)}; make both with dataflow.data.prompts."
        )
    if not patches:
        return {}
    pixels = shown.inputs["pixel_values"]
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(dim=1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return {
        "mm_kwargs": MultiModalKwargsItems.from_hf_inputs(shown.inputs, fields),
        "mm_hashes": {"image": [_digest(*one) for one in zip(pixels.split(patches), grids, strict=True)]},
        "mm_placeholders": {
            "image": [PlaceholderRange(start, length) for start, length in zip(starts, lengths, strict=True)]
        },
    }


def _starts(prompt: Sequence[int], token: int, lengths: Sequence[int]) -> list[int] | None:
    """Returns where the tokens of each image begin; None if they are not as many as the images have."""
    places = [at for at, one in enumerate(prompt) if one == token]
    if len(places) != sum(lengths):
        return None
    ends = [0, *accumulate(lengths)]
    # The tokens of an image are adjacent; those of two images need not be apart.
    if any(places[end - 1] - places[begin] != end - begin - 1 for begin, end in pairwise(ends)):
        return None
    return [places[begin] for begin in ends[:-1]]


def _digest(pixels: Any, grid: Any) -> str:
    """Returns the name of an image in vLLM's caches."""
    found = hashlib.blake2b(repr(grid.tolist()).encode(), digest_size=16)
    found.update(pixels.contiguous().numpy())
    return found.hexdigest()


def register(config: Any) -> None:
    """Lets vLLM load a model that takes images where torchvision is not installed, as it is needed for videos alone.

    Replaces the model in vLLM's registry, for this process.
    """
    pillow = importlib.import_module(_PILLOW)
    # vLLM imports a function from transformers' module that needs torchvision; another module has the same function.
    sys.modules[_TORCHVISION] = pillow
    try:
        module = importlib.import_module(f"vllm.model_executor.models.{config.model_type}")
    finally:
        del sys.modules[_TORCHVISION]
    from vllm import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY

    (name,) = config.architectures
    model = getattr(module, name)
    parts = model._processor_factory

    class ImagesOnly(parts.info):  # type: ignore[misc, name-defined]
        def get_image_processor(self, **options: object) -> Any:
            return pillow.Qwen2VLImageProcessorPil.from_pretrained(self.model_id, **options)

        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {"image": None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
            # The prompt, of which an image is a part, has at most `seq_len` tokens.
            return {"image": min(self.get_max_image_tokens(), seq_len)}

    wrap = MULTIMODAL_REGISTRY.register_processor(parts.processor, info=ImagesOnly, dummy_inputs=parts.dummy_inputs)
    ModelRegistry.register_model(name, wrap(type(name, (model,), {})))
