"""Keys that another one switches off, where the run would silently train on something else than they say.

They are warnings, not errors: a key that another one switches off may wait in a file for the day it is switched on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import BaseModel

from dataflow.algorithms import CLIPS, LOSSES
from dataflow.config.keys import yaml_values

Of = Callable[[str], Any]
"""Returns the value of a key."""
_NO_BETAS = ("ASGD", "Adadelta", "Adagrad", "RMSprop", "SGD")
_BYPASS = ("algorithm.bypass_mode", "algorithm.bypass_loss")


def _is(key: str, *values: Any) -> tuple[tuple[str, ...], Callable[[Of], bool]]:
    return (key,), lambda of: of(key) in values


def _set(key: str) -> tuple[tuple[str, ...], Callable[[Of], bool]]:
    return (key,), lambda of: bool(of(key))


_LOSS_KEYS = sorted({key for loss in LOSSES.values() for key in loss.keys})
EFFECTS: list[tuple[str, tuple[tuple[str, ...], Callable[[Of], bool]]]] = [
    *(
        (f"algorithm.{key}", _is("algorithm.policy_loss", *(name for name, loss in LOSSES.items() if key in loss.keys)))
        for key in _LOSS_KEYS
    ),
    *((f"algorithm.{key}", _is("algorithm.bypass_loss", "ppo_clip")) for key in (*CLIPS, "clip_ratio_c")),
    ("algorithm.gamma", _is("algorithm.adv_estimator", "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")),
    ("algorithm.lam algorithm.whiten", _is("algorithm.adv_estimator", "gae")),
    (
        "algorithm.norm_adv_by_std_in_grpo",
        _is("algorithm.adv_estimator", "grpo", "grpo_vectorized", "grpo_passk", "gdpo"),
    ),
    ("algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights", _is("algorithm.adv_estimator", "gdpo")),
    ("algorithm.loss_scale_factor", _is("algorithm.loss_agg_mode", "seq-mean-token-sum-norm")),
    ("algorithm.kl_loss_coef algorithm.kl_loss_type", _set("algorithm.use_kl_loss")),
    ("algorithm.kl_penalty algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef", _set("algorithm.use_kl_in_reward")),
    ("algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl", _is("algorithm.kl_ctrl.type", "adaptive")),
    ("algorithm.filter_groups.metric", _set("algorithm.filter_groups.enable")),
    ("algorithm.rollout_is_threshold algorithm.rollout_is_batch_normalize", _set("algorithm.rollout_is")),
    # PPO's loss of bypass_mode takes the rollout's log-probs for the old ones, and no weights besides.
    ("algorithm.rollout_is", (_BYPASS, lambda of: not of(_BYPASS[0]) or of(_BYPASS[1]) == "reinforce")),
    ("algorithm.bypass_loss", _set("algorithm.bypass_mode")),
    ("data.train_size", _is("data.train", None)),
    *(
        (
            f"{section}.betas",
            ((f"{section}.optimizer",), lambda of, key=f"{section}.optimizer": of(key) not in _NO_BETAS),
        )
        for section in ("trainer", "critic")
    ),
    *(
        (f"{section}.min_lr_ratio {section}.lr_cycles", _is(f"{section}.lr_scheduler", "cosine"))
        for section in ("trainer", "critic")
    ),
    (
        "engine.max_tokens",
        (
            ("tools.max_response_tokens",),
            lambda of: (
                not (of("tools.path") or of("tools.names"))
                or of("engine.max_tokens") <= of("tools.max_response_tokens")
            ),
        ),
    ),
    # The stand-in reads the default prompt alone.
    ("judge.model judge.api_key_env judge.options judge.template judge.system", _set("judge.url")),
]
"""Keys, and what they need to have an effect: other keys, which the sentence shows, and whether these allow it."""


def without_effect(
    config: BaseModel,
    given: Collection[str],
    agents: Mapping[str, Callable[[str], str]],
) -> list[str]:
    """Returns sentences about keys that were given, are not at their defaults, and have no effect.

    Args:
        config: of a run.
        given: the keys that the user gave, dotted.
        agents: what makes a key of section judge one of each further agent, by name.
    """
    idle: dict[str, dict[str, None]] = {}
    named: list[Callable[[str], str]] = [lambda key: key, *agents.values()]
    for keys, (others, met) in EFFECTS:
        for own in named if keys.startswith("judge.") else named[:1]:

            def of(key: str, own: Callable[[str], str] = own) -> Any:
                return functools.reduce(getattr, own(key).split("."), config)

            for key in map(own, keys.split()):
                if key in given and not _at_default(config, key) and not met(of):
                    beside = " and ".join(f"{own(other)}={yaml_values.inline(of(other))}" for other in others)
                    idle.setdefault(beside, {})[key] = None
    return [
        f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect with {beside}; leave "
        f"{'it' if len(keys) == 1 else 'them'} out, or change that."
        for beside, keys in idle.items()
    ]


def _at_default(config: BaseModel, key: str) -> bool:
    *path, name = key.split(".")
    section = functools.reduce(getattr, path, config)
    return bool(getattr(section, name) == type(section).model_fields[name].get_default(call_default_factory=True))
