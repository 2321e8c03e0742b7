"""The weights of the current version as files, which the servers read: one directory, replaced at each sync."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dataflow.errors import RunError

if TYPE_CHECKING:
    import torch

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_OURS = re.compile(r"version-\d+-[0-9a-f]{12}")
"""Names of directories that an engine writes; whatever else is there belongs to somebody else."""


def write_weights(place: Path, model: Path, weights: Mapping[str, torch.Tensor] | None, version: int) -> Path:
    """Writes weights into a new directory, which no other has the name of; returns it.

    Args:
        place: where the directory shall be.
        model: directory whose configuration and tokenizer go beside the weights.
        weights: by Hugging Face name, tied ones once; None copies those of ``model``.
        version: of the weights.

    Raises:
        RunError: they cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = place / f"version-{version}-{uuid.uuid4().hex[:12]}"
    try:
        target.mkdir(parents=True)
        for file in model.iterdir():
            if file.is_file() and (weights is None or not file.name.endswith(_WEIGHTS)):
                shutil.copyfile(file, target / file.name)
        if weights is not None:
            contiguous = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
            save_file(contiguous, target / "model.safetensors", {"format": "pt"})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(target, ignore_errors=True)
        raise RunError(
            f"weight sync: the weights cannot be written to {target} ({error}); make room, or give engine.weights_dir "
            "another directory that the servers can read."
        ) from error
    return target


def remove_weights(place: Path, but: Path | None = None) -> None:
    """Removes all weights that engines have written to a place but one directory, and the place if it is empty then."""
    for each in place.iterdir() if place.is_dir() else ():
        if _OURS.fullmatch(each.name) and each != but:
            shutil.rmtree(each, ignore_errors=True)
    with suppress(OSError):  # it is not empty, or was never made
        place.rmdir()
