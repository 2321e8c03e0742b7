"""The weights of the current version as files, which the servers read: one directory, replaced at each sync."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dataflow.errors import ModelError, RunError

if TYPE_CHECKING:
    import torch

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


class WeightsFiles:
    """Writes weights where the servers can read them.

    Args:
        directory: of this engine alone; what an earlier one left there is removed.
        model: directory whose configuration and tokenizer go beside the weights.
    """

    def __init__(self, directory: Path, model: Path) -> None:
        self._directory = directory.resolve()
        self._model = model

    def write(self, weights: Mapping[str, torch.Tensor], name: str) -> Path:
        """Writes all weights, by Hugging Face name, tied ones once; returns their directory.

        Raises:
            RunError: they cannot be written; what was written before stays.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        target, aside = self._directory / name, self._directory / f"{name}.part"
        size = sum(value.numel() * value.element_size() for value in weights.values())
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            for file in self._model.iterdir():
                if file.is_file() and not file.name.endswith(_WEIGHTS):
                    shutil.copyfile(file, aside / file.name)
            contiguous = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
            save_file(contiguous, aside / "model.safetensors", {"format": "pt"})
            aside.rename(target)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"weight sync: the weights ({size / 2**20:.1f} MiB) cannot be written to {target} ({error}); make "
                "room, or give engine.weights_dir another directory that the servers can read."
            ) from error
        return target

    def keep(self, directory: Path) -> None:
        """Removes all weights but those of a directory."""
        for other in self._directory.iterdir() if self._directory.is_dir() else ():
            if other != directory:
                shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Removes all weights."""
        shutil.rmtree(self._directory, ignore_errors=True)


def initial_weights(model: str) -> dict[str, torch.Tensor]:
    """Returns the weights of a model's directory, by Hugging Face name, in the precision of its files.

    Raises:
        ModelError: they cannot be read.
    """
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    from dataflow.engines.vocabulary import loading
    from dataflow.engines.weights import auto_class

    disable_progress_bar()
    with loading(model):
        found = auto_class(AutoConfig.from_pretrained(model)).from_pretrained(model, dtype="auto")
    if not (weights := dict(found.state_dict())):
        raise ModelError(f"model '{model}' has no weights.")
    return weights
