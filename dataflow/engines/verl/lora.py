"""LoRA: low-rank adapters beside frozen weights, by peft. Everything outside the trainer sees the merged weights.

The checkpoint of such a model holds the adapter alone: the frozen weights are those of ``model.path``, whose hash is
checked. The rollout engine, the digest and the export get whole weights, frozen ones plus the adapter's product.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dataflow.errors import DataError

CONFIG = "adapter_config.json"
"""Names peft's configuration, in a checkpoint as in an exported adapter."""
_ADAPTER = "default"


def has_adapter(module: Any) -> bool:
    """Whether a model has an adapter."""
    return hasattr(module, "peft_config")


def merged(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole weights by Hugging Face name, the adapter's product added; all ranks must iterate.

    The sum is made from gathered tensors, so that it has the same bits on any number of ranks.

    Args:
        engine: verl's, with a model that has an adapter.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import transpose
    from verl.utils.device import get_device_id
    from verl.utils.fsdp_utils import normalize_peft_param_name
    from verl.utils.model import convert_weight_keys

    device = get_device_id()

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().to(device)  # it may be in CPU memory (param_offload)
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]

    layers = {name: layer for name, layer in engine.module.named_modules() if isinstance(layer, LoraLayer)}
    for name, tensor in engine.module.state_dict().items():
        if not (plain := convert_weight_keys(normalize_peft_param_name({name: tensor}), engine.module)):
            continue  # of the adapter
        found, layer = whole(tensor), layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None:
            a, b = whole(layer.lora_A[_ADAPTER].weight), whole(layer.lora_B[_ADAPTER].weight)
            found = found + transpose(b @ a, layer.fan_in_fan_out) * layer.scaling[_ADAPTER]
        yield next(iter(plain)), found


def save_config(module: Any, directory: Path) -> None:
    """Writes the configuration of a model's adapter."""
    module.peft_config[_ADAPTER].save_pretrained(str(directory))


def is_adapter(directory: Path) -> bool:
    """Whether a checkpoint of a trainer holds an adapter."""
    return (directory / CONFIG).is_file()


def merge_into(source: Path, adapter: Mapping[str, torch.Tensor], checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of a model with the adapter of a checkpoint merged into them.

    Args:
        source: directory of the model that was trained.
        adapter: the checkpoint's weights.
        checkpoint: its directory.

    Raises:
        DataError: the adapter is not one of this model.
    """
    merged = with_adapter(source, adapter, checkpoint).merge_and_unload()
    return dict(merged.state_dict())


def with_adapter(source: Path, adapter: Mapping[str, torch.Tensor], checkpoint: Path) -> Any:
    """Returns peft's model: the weights of ``source`` and an adapter beside them; see :func:`merge_into`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    from dataflow.engines.weights import auto_class

    disable_progress_bar()
    # Of the type that it was trained in, so that the sum has the same bits.
    dtype = next(iter(adapter.values())).dtype
    base = auto_class(AutoConfig.from_pretrained(source)).from_pretrained(source, dtype=dtype)
    values = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
    values["base_model_name_or_path"] = str(source)
    model = get_peft_model(base, LoraConfig.from_peft_type(**values), autocast_adapter_dtype=False)
    if odd := model.load_state_dict(dict(adapter), strict=False).unexpected_keys:
        raise DataError(f"checkpoint {checkpoint} has other adapters than the model {source}, such as {odd[0]}.")
    return model
