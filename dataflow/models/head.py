"""The classification head of a reward model: whether its files hold it, and how many numbers it answers."""

from __future__ import annotations

import json
from pathlib import Path

from dataflow.errors import ModelError
from dataflow.models.directory import HEADS, headers

_BODIES = ("model.", "transformer.", "language_model.", "lm_head.")
"""Begins of the names of all weights that a model which writes has."""
_LAST = ("score.weight", "classifier.weight", "classifier.out_proj.weight")
"""Weights of the last layer of a head, of which each row is a label's."""


def labels_of(path: Path) -> int | None:
    """Returns how many numbers a classifier answers; None if only the engine that serves it knows.

    Args:
        path: of the model's directory, which :func:`~dataflow.models.directory.check_classifier` has checked.

    Raises:
        ModelError: the files hold no head, or one of another number of labels than the configuration's.
    """
    config = json.loads((path / "config.json").read_bytes())
    names, number = config.get("id2label"), config.get("num_labels")
    labels = len(names) if isinstance(names, dict) else number if isinstance(number, int) else 2  # as transformers
    weights = {} if config.get("quantization_config") else headers(path)
    if weights and all(name.startswith(_BODIES) for name in weights):
        raise ModelError(
            f"model {path}: none of its weights is that of a classification head, whatever config.json says; give a "
            "model that was trained to score, or take kind=chat."
        )
    if not any(name.endswith(HEADS["pooling"]) for name in config["architectures"]):
        return None  # an architecture of vLLM's own
    for name in _LAST:
        shape = weights[name][0] if name in weights else []
        if len(shape) == 2 and shape[0] != labels:
            raise ModelError(
                f"model {path}: its head '{name}' has {shape[0]} labels, and config.json {labels} (num_labels, "
                "id2label); take both from one model."
            )
    return labels
