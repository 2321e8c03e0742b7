"""verl's configuration keys and their names here: answers to keys that are verl's.

The table is ``verl_keys.yaml`` beside this file; its first lines describe it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from dataflow.config.keys import yaml_values

TABLE = "verl_keys.yaml"
_NO_CRITIC = "critic"
"""The section whose sentence answers a key of the critic in a pipeline without one."""


@dataclass(frozen=True)
class Meaning:
    """The equivalent of a verl key.

    Attributes:
        ours: the key, None if there is none.
        note: the difference, or the reason for having none.
        how: name of the conversion of verl's value; "" if ours takes it unchanged.
        fine: values of a key without a counterpart that change nothing here: a list, "any", or None for verl's default.
        moved: the present name of a key of earlier versions.
    """

    ours: str | None = None
    note: str = ""
    how: str = ""
    fine: Any = None
    moved: str | None = None


@functools.cache
def _table() -> tuple[Mapping[str, Meaning], Mapping[str, str]]:
    read = yaml_values.load(resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8"))
    return {key: Meaning(**row) for key, row in read["keys"].items()}, read["sections"]


def keys() -> Mapping[str, Meaning]:
    """Returns the table; a name that ends with ``*`` stands for all keys that begin like it."""
    return _table()[0]


def sections() -> Mapping[str, str]:
    """Returns the sentences about verl's sections."""
    return _table()[1]


def find(key: str) -> tuple[str, Meaning] | None:
    """Returns the row of a verl key and its name; None if the table does not know the key.

    >>> find("data.train_batch_size")[1].ours
    'data.prompts'
    >>> find("global_profiler.tool")[0]
    'global_profiler.*'
    """
    known = keys()
    if key in known and not key.endswith("*"):
        return key, known[key]
    fitting = [name for name in known if name.endswith("*") and key.startswith(name[:-1])]
    name = max(fitting, key=len, default=None)
    return None if name is None else (name, known[name])


def moved(key: str) -> str | None:
    """Returns the present name of a key of earlier versions; None for any other key.

    >>> moved("reward_model.reward_manager")
    'reward.reward_manager.name'
    >>> moved("data.seed") is None
    True
    """
    found = find(key)
    if found is None or found[1].moved is None:
        return None
    name, target = found[0], found[1].moved
    return target[:-1] + key[len(name) - 1 :] if target.endswith("*") else target


COMMON: dict[str, tuple[str, str]] = {
    "batch_size": ("data.prompts", "the number of prompts in a step, each with engine.n responses"),
    "train_batch_size": ("data.prompts", "the number of prompts in a step, each with engine.n responses"),
    "epochs": ("steps", "the number of training steps; trainer.epochs counts the passes over a step's samples"),
    "num_epochs": ("steps", "the number of training steps"),
    "num_train_epochs": ("steps", "the number of training steps"),
    "max_steps": ("steps", "the number of training steps"),
    "learning_rate": ("trainer.lr", "the learning rate"),
    "num_generations": ("engine.n", "the number of responses to a prompt"),
    "gpus": ("trainer.world_size", "the number of training processes"),
    "num_gpus": ("trainer.world_size", "the number of training processes"),
}
"""What other trainers call a key, without a section: our key, and what it is."""


def hint(key: str, exactly: bool = False, critic: bool = False) -> str | None:
    """Returns the name of a verl key here, as part of a message; None for a key that verl does not have.

    Args:
        key: as the user wrote it.
        exactly: ignore unknown keys of verl's sections.
        critic: whether the pipeline has a critic.

    >>> hint("data.train_batch_size")
    "verl's 'data.train_batch_size' is 'data.prompts' here."
    >>> hint("critic.optim.lr", critic=True)
    "verl's 'critic.optim.lr' is 'critic.lr' here."
    >>> hint("steps") is None
    True
    """
    key = key.lstrip("+~")  # Hydra's marks of keys to add or remove
    if key in COMMON:
        ours, meaning = COMMON[key]
        return f"'{ours}' is {meaning}."
    row = keys().get(key)
    if row is not None and row.ours != key:  # a key of the same name and meaning is no unknown one
        return _answer(key, row, critic)
    return None if exactly else _section_of(key, critic)


def _of_critic(key: str, row: Meaning | None) -> bool:
    return key.startswith("critic.") or (row is not None and (row.ours or "").startswith("critic."))


def _answer(name: str, row: Meaning, critic: bool) -> str | None:
    if not critic and _of_critic(name, row):
        return f"verl's '{name}' has no counterpart here: {sections()[_NO_CRITIC]}."
    if row.moved is not None:
        target = keys().get(row.moved)
        if target is None or target.ours == name:
            return None
        row = target
    name = name.removesuffix("*").rstrip(".")
    if row.ours is None:
        return f"verl's '{name}' has no counterpart here: {row.note}."
    return f"verl's '{name}' is '{row.ours}' here{f': {row.note}' if row.note else ''}."


def _section_of(key: str, critic: bool) -> str | None:
    """Returns the answer to a key in one of verl's sections, by the innermost that the table knows."""
    section = key
    while section:
        row = keys().get(f"{section}.*")
        if row is not None and row.moved is None:
            return _answer(section, row, critic)
        if section in sections() and not (critic and section == _NO_CRITIC):
            return f"verl's section '{section}' is not one here: {sections()[section]}."
        section = section.rpartition(".")[0]
    return None
