"""verl's configuration keys and their names here: the table ``verl_keys.yaml``, whose first lines describe it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

from dataflow.config.keys import yaml_values

ACTOR, CRITIC = "actor_rollout_ref.actor.", "critic."
_SECTIONS = ("actor_rollout_ref", "global_profiler", "ray_kwargs", "reward_model")


@dataclass(frozen=True)
class Meaning:
    """What a verl key means here: ``ours`` is the key here, None if there is none.

    ``note`` says how they differ by more than the name, or what to do without a counterpart. A key without a
    counterpart is ``fine`` if it may have any value.
    """

    ours: str | None = None
    note: str = ""
    fine: bool = False


@functools.cache
def table() -> Mapping[str, Any]:
    """Returns the table, whose section ``ours`` has all keys with a counterpart, with their meaning."""
    read = yaml_values.load(resources.files(__package__).joinpath("verl_keys.yaml").read_text(encoding="utf-8"))
    names = {f"{group['of']}.{key}": f"{group['ours']}.{key}" for group in read["alike"] for key in group["keys"]}
    names |= read["ours"]
    trained = {key: key.rpartition(".")[2] for key in read["trained_alike"]} | read["trained"]
    for key, ours in trained.items():
        actors, critics = twins(key)
        names |= {actors: f"trainer.{ours}", critics: f"critic.{ours}"}
    found = {key: re.fullmatch(r"(\S+)(?: \((.*)\))?", text) for key, text in names.items()}
    return {**read, "ours": {key: Meaning(each[1], each[2] or "") for key, each in found.items() if each is not None}}


def twins(key: str) -> tuple[str, str]:
    """Returns a key that the actor and the critic both have, as the key of either.

    >>> twins("fsdp_config.param_offload")
    ('actor_rollout_ref.actor.fsdp_config.param_offload', 'critic.fsdp.param_offload')
    """
    actor = f"actor_rollout_ref.{key}" if key.startswith("model.") else ACTOR + key
    return actor, CRITIC + key.replace("fsdp_config.", "fsdp.")


def keys() -> Mapping[str, Meaning]:
    """Returns what each key with a counterpart means."""
    ours: Mapping[str, Meaning] = table()["ours"]
    return ours


def find(key: str, value: Any = None) -> Meaning | None:
    """Returns what a verl key means; None if the table does not name it.

    For some keys it depends on verl's value, which may mean what happens here in any case.

    >>> find("data.train_batch_size").ours
    'data.prompts'
    >>> find("data.apply_chat_template_kwargs.enable_thinking").ours
    'data.apply_chat_template_kwargs.enable_thinking'
    """
    if key in keys():
        return keys()[key]
    for name in sorted((name for name in keys() if name.endswith(".*")), key=len, reverse=True):
        if key.startswith(name[:-1]):
            found = keys()[name]
            below = (
                f"{found.ours[:-1]}{key[len(name) - 1 :]}" if found.ours and found.ours.endswith("*") else found.ours
            )
            return Meaning(below, found.note)
    if any(fnmatchcase(f"{key}={value}", pattern) for pattern in table()["same"]):
        return Meaning(fine=True)
    for pattern, note in table()["lost"].items():
        if fnmatchcase(key, pattern):
            return Meaning(note=note)
    return Meaning(fine=True) if any(fnmatchcase(key, pattern) for pattern in table()["fine"]) else None


def moved(key: str) -> str | None:
    """Returns the present name of a key of earlier versions; None for any other key.

    >>> moved("reward_model.reward_manager")
    'reward.reward_manager.name'
    >>> moved("data.seed") is None
    True
    """
    for name, present in table()["moved"].items():
        if key == name or (name.endswith("*") and key.startswith(name[:-1])):
            return str(present).removesuffix("*") + (key[len(name) - 1 :] if name.endswith("*") else "")
    return None


def hint(key: str, critic: bool = False) -> str | None:
    """Returns the name of a verl key here, as part of a message; None for a key that is not verl's.

    >>> hint("data.train_batch_size")
    "verl's 'data.train_batch_size' is 'data.prompts' here."
    >>> hint("critic.optim.lr", critic=True)
    "verl's 'critic.optim.lr' is 'critic.lr' here."
    >>> hint("steps") is None
    True
    """
    key = key.lstrip("+~")  # Hydra's marks of keys to add or remove
    section, found = key.partition(".")[0], find(moved(key) or key)
    if not critic and (section == "critic" or (found is not None and (found.ours or "").startswith("critic."))):
        return "this pipeline has no critic; pipelines/ppo_critic.py trains one."
    if found is not None and found.ours not in (None, key):
        return f"verl's '{key}' is '{found.ours}' here{f': {found.note}' if found.note else ''}."
    if found is not None and found.note:
        return f"verl's '{key}' has no counterpart here: {found.note}."
    if section in _SECTIONS:
        return "'dataflow import-verl --keys' lists verl's keys and their names here."
    return None


hint_with_critic = functools.partial(hint, critic=True)
"""The same for a pipeline that trains one."""


def rows() -> Iterator[tuple[str, str, str]]:
    """Yields (verl's key, ours, what is to be said) of the whole table."""
    for key, meaning in keys().items():
        yield key, meaning.ours or "", meaning.note
    for key, present in table()["moved"].items():
        yield key, "", f"moved to {present}"
    for key, note in table()["lost"].items():
        yield key, "", note
    for key in table()["fine"]:
        yield key, "", "needs nothing"
