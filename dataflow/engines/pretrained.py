"""What the engines read of a pretrained model's directory: its vocabulary, and the names and shapes of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dataflow.errors import DataflowError, ModelError


@dataclass(frozen=True)
class Vocabulary:
    """A model's vocabulary: ``ends`` are the ids that end a response, ``size`` is the number of token ids."""

    tokenizer: Any
    ends: list[int]
    pad: int
    size: int

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of a response, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


@contextlib.contextmanager
def loading(model: str) -> Iterator[None]:
    """Turns errors of reading a model's files into a ModelError."""
    # transformers takes a missing path for a hub id and queries the hub for a minute.
    if (model.startswith(("/", ".", "~")) or model.count("/") > 1) and not Path(model).is_dir():
        raise ModelError(f"model directory '{model}' does not exist.")
    try:
        yield
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"model '{model}' cannot be loaded: {reason}") from error


def read_vocabulary(model: str) -> tuple[Vocabulary, Any]:
    """Returns a model's vocabulary and its configuration, without its weights."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    with loading(model):
        tokenizer = AutoTokenizer.from_pretrained(model)
        config = AutoConfig.from_pretrained(model)
    text = config.get_text_config()
    sources: list[Any] = [tokenizer, text]
    with contextlib.suppress(OSError):  # a model need not have one
        sources.insert(1, GenerationConfig.from_pretrained(model))
    ids = [getattr(source, "eos_token_id", None) for source in sources]
    ends = [end for each in ids for end in (each if isinstance(each, list) else [each]) if end is not None]
    if not ends:
        raise ModelError(f"model '{model}' names no eos_token_id; set it in its generation_config.json.")
    pad = ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return Vocabulary(tokenizer, list(dict.fromkeys(ends)), pad, int(text.vocab_size)), config


def undrawn(config: Any) -> list[int]:
    """Returns the tokens that no response may have: each stands for a part of an image, as the trainer reads it."""
    names = ("image_token_id", "video_token_id") if hasattr(config, "vision_config") else ()
    return [int(getattr(config, name)) for name in names]


def auto_class(config: Any) -> Any:
    """Returns transformers' class that builds the model of a configuration: one that takes images, or only text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def add_mean(model: torch.nn.Module) -> None:
    """Gives the outputs of a model's vision tower, if it has one, a mean, which verl asks for.

    verl sends zeros through the tower for tokens without an image, so that all ranks gather its weights, and adds 0
    times the output's mean. The output of transformers 5 is an object with several tensors, which has none (verl
    0.9.1).
    """

    def with_mean(_tower: Any, _inputs: Any, output: Any) -> None:
        if hasattr(output, "pooler_output"):
            output.mean = output.pooler_output.mean

    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "visual":
            module.register_forward_hook(with_mean)


class WeightNames:
    """Names and shapes of the weights of a configuration's model, which is not allocated, and which are tied."""

    def __init__(self, config: Any) -> None:
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
        # On the meta device tensors have no address, so tied weights are found as identical parameters.
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        first: dict[int, str] = {}
        self._own = {name: first.setdefault(id(tensors[name]), name) for name in model.state_dict()}
        self._shapes = {name: tuple(tensors[name].shape) for name in self._own.values()}

    def pick(self, weights: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
        """Returns the weights; tied ones once, under the first of their names (the embedding's).

        Raises DataflowError if a name is unknown or missing, or a shape differs: vLLM would keep the old value of a
        weight that is missing.
        """
        picked: dict[str, torch.Tensor] = {}
        for name, value in weights.items():
            picked.setdefault(self._own.get(name, name), value)
        shapes = {name: tuple(value.shape) for name, value in picked.items()}
        if wrong := sorted(name for name in {*shapes, *self._shapes} if shapes.get(name) != self._shapes.get(name)):
            given, own = shapes.get(wrong[0]), self._shapes.get(wrong[0])
            raise DataflowError(
                f"weight sync {version}: {len(wrong)} weights are not those of the engine's model, first '{wrong[0]}' "
                f"(its shape is {given}, in the model {own}; None means missing); sync those of model.path."
            )
        return picked
