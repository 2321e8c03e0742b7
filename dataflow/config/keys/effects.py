"""Keys that another one switches off, where the run would silently train on something else than they say.

They are warnings, not errors: a key that another one switches off may wait in a file for the day it is switched on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

from dataflow.algorithms import LOSSES
from dataflow.config.keys import yaml_values
from dataflow.config.keys.nested import at

_LOSS_KEYS = sorted({key for loss in LOSSES.values() for key in loss.keys})
EFFECTS: list[tuple[str, str, tuple[Any, ...]]] = [
    *(
        (f"algorithm.{key}", "algorithm.policy_loss", tuple(name for name, loss in LOSSES.items() if key in loss.keys))
        for key in _LOSS_KEYS
    ),
    ("algorithm.lam algorithm.whiten", "algorithm.adv_estimator", ("gae",)),
    ("algorithm.kl_loss_coef algorithm.kl_loss_type", "algorithm.use_kl_loss", (True,)),
    ("algorithm.kl_penalty algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef", "algorithm.use_kl_in_reward", (True,)),
    ("algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.type", ("adaptive",)),
    ("algorithm.filter_groups.metric data.gen_batch_size", "algorithm.filter_groups.enable", (True,)),
    ("algorithm.rollout_is_threshold", "algorithm.rollout_is", ("token", "sequence")),
    ("trainer.min_lr_ratio trainer.lr_cycles", "trainer.lr_scheduler", ("cosine",)),
    ("critic.min_lr_ratio critic.lr_cycles", "critic.lr_scheduler", ("cosine",)),
]
"""Keys, the other key, and the values of that one with which they have an effect."""


def without_effect(config: BaseModel, given: Collection[str]) -> list[str]:
    """Returns sentences about the keys of ``given``, dotted, that are not at their defaults and have no effect."""
    found = []
    for keys, other, values in EFFECTS:
        idle = [key for key in keys.split() if key in given and not _at_default(config, key)]
        if idle and (held := at(config, other)) not in values:
            what = "has no effect" if len(idle) == 1 else "have no effect"
            found.append(
                f"{', '.join(idle)} {what} with {other}={yaml_values.inline(held)}; change that or leave it out."
            )
    return found


def _at_default(config: BaseModel, key: str) -> bool:
    section, _, name = key.rpartition(".")
    default = type(at(config, section)).model_fields[name].get_default(call_default_factory=True)
    return bool(at(config, key) == default)
