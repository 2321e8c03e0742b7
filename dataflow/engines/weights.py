"""Names and shapes of a model's weights, to check a sync before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dataflow.errors import DataflowError, nearest


def auto_class(config: Any) -> Any:
    """Returns transformers' class that builds the model of a configuration: one that takes images, or only text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def add_mean(model: torch.nn.Module) -> None:
    """Gives the outputs of a model's vision tower, if it has one, a mean, which verl asks for.

    verl replaces the forward of Qwen's classes in its process: of tokens without an image it sends zeros through the
    tower, so that all ranks gather its weights, and adds 0 times the output's mean. The output of transformers 5 is an
    object with several tensors, which has none (verl 0.9.1).
    """

    def with_mean(_tower: Any, _inputs: Any, output: Any) -> None:
        if hasattr(output, "pooler_output"):
            output.mean = output.pooler_output.mean

    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "visual":
            module.register_forward_hook(with_mean)


class WeightNames:
    """Names and shapes of a model's weights, and which are tied.

    Args:
        config: transformers' configuration of the model, which is not allocated.
    """

    def __init__(self, config: Any) -> None:
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
        # On the meta device tensors have no address, so tied weights are found as identical parameters.
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        self.shapes = {name: tuple(tensors[name].shape) for name in model.state_dict()}
        first: dict[int, str] = {}
        self._own = {name: first.setdefault(id(tensors[name]), name) for name in self.shapes}

    def pick(self, weights: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
        """Returns the weights; tied ones once, under the first of their names (the embedding's).

        Raises:
            DataflowError: a name is unknown or missing, a shape differs, or two tied weights differ.
        """
        picked: dict[str, torch.Tensor] = {}
        source: dict[str, str] = {}
        for name, value in weights.items():
            if name not in self.shapes:
                raise DataflowError(
                    f"weight sync {version}: the model has no weight '{name}'{nearest(name, self.shapes) or '.'}"
                )
            if self.shapes[name] != tuple(value.shape):
                raise DataflowError(
                    f"weight sync {version}: '{name}' has shape {tuple(value.shape)}, "
                    f"the model needs {self.shapes[name]}."
                )
            twin = source.setdefault(self._own[name], name)
            if twin != name and not torch.equal(weights[twin], value):
                raise DataflowError(f"weight sync {version}: '{twin}' and '{name}' are tied but differ.")
            picked[self._own[name]] = weights[twin]
        missing = [name for name, own in self._own.items() if own not in picked]
        if missing:
            raise DataflowError(f"weight sync {version}: {len(missing)} weights are missing, first '{missing[0]}'.")
        return picked
