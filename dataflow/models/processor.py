"""Processor: what turns a chat with images into a model's inputs, and the positions of its tokens.

verl's engines, and so the trainer, take Qwen2-VL's positions in four rows: that of the token in the text, and the time,
height and width of what it shows (for a token of text, three equal ones).
"""

from __future__ import annotations

import importlib.util
import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import ModelError
from dataflow.models.tokenizer import with_options

VISION = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "Qwen2VLProcessor", "Qwen2VLModel"),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLProcessor", "Qwen2_5_VLModel"),
}
"""Model types that take images: the names of the whole model, its processor, and the part that has the positions."""


def takes_images(path: str | Path) -> bool:
    """Whether the model in a directory is of a type that takes images; reads only its configuration."""
    try:
        found = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # the check of the model's files says what is wrong
    return isinstance(found, dict) and found.get("model_type") in VISION


class Processor:
    """The processor of a model that takes images, with options of its chat template."""

    def __init__(self, path: str, options: Mapping[str, Any] | None = None) -> None:
        import transformers

        config = transformers.AutoConfig.from_pretrained(path)
        _whole, _processor, inner = VISION[config.model_type]
        try:
            self._processor = load_processor(path)
            self._template = self._processor.chat_template or self._processor.tokenizer.get_chat_template()
        # Like a tokenizer's, the parser of a broken file may raise any exception.
        except Exception as error:
            raise ModelError(
                f"model.path={path}: no processor of images with a chat template can be loaded from it "
                f"({' '.join(str(error).split())}); save the processor with the model."
            ) from error
        with_options(self._processor.tokenizer, options)
        # As verl does, the model's own function is called without a model: it needs only the configuration.
        model: Any = getattr(transformers, inner)
        self._positions = types.SimpleNamespace(config=config)
        for name in ("get_rope_index", "get_vision_position_ids"):
            if hasattr(model, name):
                setattr(self._positions, name, types.MethodType(getattr(model, name), self._positions))
        self._image = int(config.image_token_id)

    def inputs(self, chat: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> tuple[list[int], dict[str, Any], Any]:
        """Returns what the model reads of a chat, whose ``images`` (PIL's in RGB) are in the order of its parts.

        These are the token ids up to where the answer begins, with a token for each patch of an image; the tensors
        ``pixel_values`` ``[patches, values]`` and ``image_grid_thw`` int64 ``[images, 3]``, none without images; the
        positions, int64 ``[3, tokens]``.
        """
        import torch
        from verl.utils.tokenizer import build_multimodal_processor_inputs

        text = self._processor.tokenizer.apply_chat_template(
            chat, chat_template=self._template, add_generation_prompt=True, tokenize=False
        )
        found = build_multimodal_processor_inputs(self._processor, text=[text], images=list(images) or None)
        ids = found["input_ids"]
        if not images:
            return ids[0].tolist(), {}, torch.arange(ids.shape[1]).expand(3, -1).clone()
        kept = {name: found[name] for name in ("pixel_values", "image_grid_thw")}
        positions, _shift = self._positions.get_rope_index(
            input_ids=ids, mm_token_type_ids=(ids == self._image).int(), image_grid_thw=kept["image_grid_thw"]
        )
        return ids[0].tolist(), kept, positions[:, 0]


def load_processor(path: str) -> Any:
    """Returns transformers' processor; one without videos where torchvision, which only they need, is not installed."""
    import transformers
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if importlib.util.find_spec("torchvision") is not None:
        return AutoProcessor.from_pretrained(path)
    kind = getattr(transformers, VISION[AutoConfig.from_pretrained(path).model_type][1])

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if name == "video_processor" else kind.check_argument_for_proper_class(self, name, argument)

    images_only = type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
    return images_only(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(path),
        tokenizer=AutoTokenizer.from_pretrained(path),
        video_processor=None,
    )
