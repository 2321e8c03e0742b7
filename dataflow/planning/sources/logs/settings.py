"""Reads the settings that a log holds beside its scalars: the configuration that verl prints, MLflow's parameters."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataflow.planning.sources.logs.lines import COLOUR, HEAD, console_text
from dataflow.planning.sources.logs.mlflow import metric_folders

KEYS = (
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "trainer.balance_batch",
)
"""The settings that a plan needs, as verl names them."""
# Python's pprint of a nested dict: sorted keys, further lines indented. Ray writes the actor's name before each line.
_BEGIN = re.compile(r"^(\(.{1,80}?pid=\d{1,10}.{0,60}?\) )?\{'actor_rollout_ref': \{")
_LONGEST = 5000
"""Lines of a printed configuration; verl's has about 600."""


def read_settings(place: Path) -> dict[str, Any]:
    """Returns those of :data:`KEYS` that the log of a run holds; {} if it holds none.

    Args:
        place: a console log, or a directory with MLflow's files of a run.
    """
    return _printed(place) if place.is_file() else _parameters(place)


def _printed(place: Path) -> dict[str, Any]:
    with place.open("rb") as file:
        text = COLOUR.sub("", console_text(file.read(HEAD)))
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if (begin := _BEGIN.match(line)) is None:
            continue
        prefix = begin[1] or ""
        own = (each.removeprefix(prefix) for each in lines[at : at + _LONGEST] if each.startswith(prefix))
        kept = [next(own), *itertools.takewhile(lambda each: each.startswith(" "), own)]
        try:
            return _chosen(ast.literal_eval("\n".join(kept)))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue  # cut off, or mixed with other lines: then these settings have to be given
    return {}


def _chosen(tree: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key in KEYS:
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            found[key] = value
    return found


def _parameters(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for folder in metric_folders(place):
        for key in KEYS:
            file = folder.parent / "params" / key.replace(".", "/")
            try:
                found[key] = ast.literal_eval(file.read_text("utf-8", "replace").strip())
            except (OSError, ValueError, SyntaxError):
                continue  # MLflow keeps parameters only if the run logged them
    return found
