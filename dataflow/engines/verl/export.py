"""Writes trained weights as a Hugging Face directory, which transformers and vLLM load."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dataflow.engines.verl.lora import with_adapter
from dataflow.engines.weights import auto_class
from dataflow.errors import ConfigError, DataError
from dataflow.files import cannot_write, unmakable

if TYPE_CHECKING:
    import torch

PROCESSOR = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""Files of the processor of a model that takes images; training does not change them."""


def write_model(
    weights: Mapping[str, torch.Tensor], source: str | Path, directory: Path, card: str, *, replace: bool = False
) -> None:
    """Writes a model: weights, configuration, generation configuration, tokenizer, processor and model card.

    The directory appears when it is complete.

    Args:
        weights: by Hugging Face name, of any float type; tied ones at least once.
        source: directory of the model that was trained, for everything but the weights, and for their type.
        directory: to make.
        card: text of the model card, as Markdown.
        replace: whether the directory may exist; it is replaced then.

    Raises:
        ConfigError: the directory exists, or cannot be made.
        RunError: a file cannot be written.
        DataError: the weights are not those of such a model.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():  # a file or a pipe would get a line for each refresh
        disable_progress_bar()
    config = AutoConfig.from_pretrained(source)
    dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype)
    expected, tied = set(model.state_dict()), set(model.all_tied_weights_keys)
    if odd := (set(weights) ^ expected) - (tied if config.tie_word_embeddings else set()):
        raise DataError(f"weight {sorted(odd)[0]} is not in both the checkpoint and the model {source}.")
    kept = {
        name: tensor.to(dtype).contiguous()
        for name, tensor in weights.items()
        if not (config.tie_word_embeddings and name in tied)
    }
    with contextlib.suppress(OSError):  # most small models have none
        model.generation_config = GenerationConfig.from_pretrained(source)
    with _complete(directory, replace) as aside:
        model.save_pretrained(aside, state_dict=kept)
        AutoTokenizer.from_pretrained(source).save_pretrained(aside)
        for name in PROCESSOR:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, aside / name)
        (aside / "README.md").write_text(card, encoding="utf-8")


def write_adapter(
    adapter: Mapping[str, torch.Tensor], source: Path, checkpoint: Path, directory: Path, card: str
) -> None:
    """Writes a LoRA adapter in peft's form, with a model card. The directory appears when it is complete.

    Args:
        adapter: the checkpoint's weights.
        source: directory of the model that it is beside.
        checkpoint: its directory.
        directory: to make.
        card: text of the model card, as Markdown.

    Raises:
        ConfigError: the directory exists, or cannot be made.
        RunError: a file cannot be written.
        DataError: the adapter is not one of this model.
    """
    with _complete(directory, replace=False) as aside:
        with_adapter(source, adapter, checkpoint).save_pretrained(str(aside))
        (aside / "README.md").write_text(card, encoding="utf-8")


@contextlib.contextmanager
def _complete(directory: Path, replace: bool) -> Iterator[Path]:
    """Yields a directory beside the one wanted, which gets that name at the end of the block unless it raises."""
    from safetensors import SafetensorError

    if not replace:
        check_new(directory)
        if (why := unmakable(directory)) is not None:
            raise ConfigError(f"{directory}: {why}")
    aside = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        yield aside
        if replace and directory.is_dir():
            shutil.rmtree(directory)
        aside.rename(directory)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        raise cannot_write("model", directory, error, "make room there, or give another place") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_new(directory: Path) -> None:
    """Raises a ConfigError if something of that name exists."""
    if os.path.lexists(directory):
        raise ConfigError(f"{directory} exists; give another name, or remove it.")
