"""LoRA: low-rank adapters beside frozen weights, by peft. Everything outside the trainer sees the merged weights.

The checkpoint of such a model holds the adapter alone, with peft's configuration: the frozen weights are those of
``model.path``, whose hash is checked. The rollout engine, the digest and the export get whole weights, frozen ones plus
the adapter's product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

ADAPTER = "default"
"""The name of a model's adapter, peft's own."""
HEADS = ("score", "classifier")
"""Names of the layer of a value model that computes the values, in transformers' models; it is trained as a whole."""


def has_adapter(module: Any) -> bool:
    """Whether a model has an adapter."""
    return hasattr(module, "peft_config")


def merged(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole weights by Hugging Face name, the adapter's product added; all ranks must iterate.

    The sum is made from gathered tensors, so that it has the same bits on any number of ranks, in the weights' own
    type; verl's own merge yields bfloat16.

    Args:
        module: of verl's engine, with an adapter.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import transpose
    from verl.utils.device import get_device_id
    from verl.utils.fsdp_utils import normalize_peft_param_name
    from verl.utils.model import convert_weight_keys

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().to(get_device_id())  # it may be in CPU memory (param_offload)
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]

    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    for name, tensor in module.state_dict().items():
        if not (plain := convert_weight_keys(normalize_peft_param_name({name: tensor}), module)):
            continue  # of the adapter
        found, layer = whole(tensor), layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None:
            a, b = whole(layer.lora_A[ADAPTER].weight), whole(layer.lora_B[ADAPTER].weight)
            found = found + transpose(b @ a, layer.fan_in_fan_out) * layer.scaling[ADAPTER]
        yield next(iter(plain)), found
