"""Writes trained weights as a Hugging Face directory, which transformers and vLLM load."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.engines.pretrained import auto_class
from dataflow.errors import ConfigError, DataError
from dataflow.files import cannot_write, unmakable

if TYPE_CHECKING:
    import torch

_BESIDE = (".json", ".jinja", ".txt", ".model", ".py")
"""Suffixes of the files beside weights, which training does not change."""


def write_model(
    weights: Mapping[str, torch.Tensor], source: str | Path, directory: Path, card: str, *, replace: bool = False
) -> None:
    """Writes a model and a model card (Markdown) into a directory, which appears when it is complete.

    All but the weights, such as the tokenizer, and their type are those of the model in ``source`` that was trained.
    ``weights`` have Hugging Face names, any float type, and tied ones at least once.

    Raises:
        ConfigError: the directory cannot be made, or exists and is not to be replaced.
        RunError: a file cannot be written.
        DataError: the weights are not those of such a model.
    """
    import torch
    from transformers import AutoConfig

    _no_bars()
    config = AutoConfig.from_pretrained(source)
    dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype)
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    if odd := (set(weights) ^ set(model.state_dict())) - tied:
        raise DataError(f"weight {sorted(odd)[0]} is not in both the checkpoint and the model {source}.")
    kept = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items() if name not in tied}
    with _complete(directory, replace) as aside:
        model.save_pretrained(aside, state_dict=kept)
        for file in Path(source).iterdir():
            if file.suffix in _BESIDE and not file.name.endswith(".index.json"):
                shutil.copyfile(file, aside / file.name)
        (aside / "README.md").write_text(card, encoding="utf-8")


def write_adapter(
    weights: Mapping[str, torch.Tensor], config: Any, source: Path, directory: Path, card: str, *, merge: bool
) -> None:
    """Writes a LoRA adapter in peft's form, with peft's configuration, or the model with it merged.

    Raises the errors of :func:`write_model`.
    """
    _no_bars()
    model = with_adapter(source, weights, config)
    if merge:
        write_model(model.merge_and_unload().state_dict(), source, directory, card)
        return
    with _complete(directory, replace=False) as aside:
        model.save_pretrained(str(aside))
        (aside / "README.md").write_text(card, encoding="utf-8")


def with_adapter(source: Path, weights: Mapping[str, torch.Tensor], config: Any) -> Any:
    """Returns peft's model: the weights of a model, and an adapter with peft's configuration beside them.

    Raises DataError if the adapter is not one of this model.
    """
    from peft import get_peft_model
    from transformers import AutoConfig

    # Of the type that it was trained in, so that the sum has the same bits.
    dtype = next(iter(weights.values())).dtype
    base = auto_class(AutoConfig.from_pretrained(source)).from_pretrained(source, dtype=dtype)
    config.base_model_name_or_path, config.inference_mode = str(source), False
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    if odd := model.load_state_dict(dict(weights), strict=False).unexpected_keys:
        raise DataError(f"the checkpoint has other adapters than the model {source}, such as {odd[0]}.")
    return model


def _no_bars() -> None:
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():  # a file or a pipe would get a line for each refresh
        disable_progress_bar()


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
