"""The weights of the current version as files, which the servers read: one directory, replaced at each sync."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dataflow.errors import ConfigError, ModelError, RunError

if TYPE_CHECKING:
    import torch

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
MARKER = ".dataflow-weights"
"""File that marks a directory as one of this package; it holds the id of the engine that writes there."""
_OURS = re.compile(r"version-\d+-[0-9a-f]{6}(?:\.part)?")
"""Names of directories that an engine writes; whatever else is there belongs to somebody else."""


class WeightsFiles:
    """Writes weights where the servers can read them.

    Args:
        directory: of this engine alone; weights that an earlier engine left there are removed. :func:`remove_weights`
            removes what this one leaves.
        model: directory whose configuration and tokenizer go beside the weights.
        owner: id of this engine, which no other has.

    Raises:
        ConfigError: the directory holds files that no engine has written.
    """

    def __init__(self, directory: Path, model: Path, owner: str) -> None:
        self._directory = directory.resolve()
        self._model, self._owner = model, owner
        check_directory(self._directory)
        with suppress(OSError):  # the first write reports it
            self._remove_versions()
            self._directory.mkdir(parents=True, exist_ok=True)
            self._marker.write_text(owner)

    @property
    def _marker(self) -> Path:
        return self._directory / MARKER

    def _owned(self) -> bool:
        return _owner_of(self._directory) == self._owner

    def _remove_versions(self, but: Path | None = None) -> None:
        for other in _versions(self._directory):
            if other != but:
                shutil.rmtree(other, ignore_errors=True)

    def write(self, weights: Mapping[str, torch.Tensor], name: str) -> Path:
        """Writes all weights, by Hugging Face name, tied ones once; returns their directory.

        Raises:
            RunError: they cannot be written, or another engine uses the directory; what was written before stays.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        target, aside = self._directory / name, self._directory / f"{name}.part"
        size = sum(value.numel() * value.element_size() for value in weights.values())
        if self._marker.exists() and not self._owned():
            raise RunError(
                f"weight sync: another run writes its weights to {self._directory}, too; end one of the two, or give "
                "it another name."
            )
        try:
            aside.mkdir(parents=True)
            self._marker.write_text(self._owner)
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
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return target

    def keep(self, directory: Path) -> None:
        """Removes all weights but those of a directory."""
        if self._owned():
            self._remove_versions(but=directory)


def name_of(version: int) -> str:
    """Returns the name of a new directory for the weights of a version."""
    return f"version-{version}-{uuid.uuid4().hex[:6]}"


def remove_weights(directory: Path, owner: str) -> None:
    """Removes all weights of an engine, and the directory unless it holds other files.

    Args:
        directory: of the weights.
        owner: id of the engine; what another one has taken over is not removed.
    """
    versions = _versions(directory)  # before the owner is read: those of a later engine are not among them
    if _owner_of(directory) != owner:
        return
    for each in versions:
        shutil.rmtree(each, ignore_errors=True)
    with suppress(OSError):  # another engine has just taken it over
        # The owner is read again: the files of a large model take a while.
        if [file.name for file in directory.iterdir()] == [MARKER] and _owner_of(directory) == owner:
            (directory / MARKER).unlink()
            directory.rmdir()


def _owner_of(directory: Path) -> str:
    """Returns the id of the engine that has last taken a directory over; "" for none."""
    try:
        return (directory / MARKER).read_text()
    except (OSError, ValueError):
        return ""


def _versions(directory: Path) -> list[Path]:
    try:
        return [each for each in directory.iterdir() if _OURS.fullmatch(each.name) and each.is_dir()]
    except OSError:  # it is gone, or was never made
        return []


def check_directory(directory: Path) -> None:
    """Checks that a directory for weights is missing, empty, or one that an engine has written.

    Raises:
        ConfigError: it holds other files.
    """
    if directory.is_dir() and not (directory / MARKER).is_file() and any(directory.iterdir()):
        raise ConfigError(
            f"engine.weights_dir: {directory} is where the run would write its weights, and it holds other files; move "
            "them elsewhere, or give another directory."
        )


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
