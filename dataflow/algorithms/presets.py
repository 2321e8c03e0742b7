"""Presets of section ``algorithm``: one word that sets several keys; keys that are given explicitly win."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        "adv_estimator": "grpo",
        "norm_adv_by_std_in_grpo": True,
        "policy_loss": "vanilla",
        "loss_agg_mode": "token-mean",
    },
    "drgrpo": {
        "adv_estimator": "grpo",
        "norm_adv_by_std_in_grpo": False,
        "policy_loss": "vanilla",
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "use_kl_loss": False,
    },
    "dapo": {
        "adv_estimator": "grpo",
        "policy_loss": "vanilla",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 10.0,
        "loss_agg_mode": "token-mean",
        "use_kl_loss": False,
        "use_kl_in_reward": False,
    },
    "gspo": {
        "adv_estimator": "grpo",
        "policy_loss": "gspo",
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "loss_agg_mode": "seq-mean-token-mean",
        "use_kl_loss": False,
    },
    "sapo": {
        "adv_estimator": "grpo",
        "policy_loss": "sapo",
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "cispo": {
        "adv_estimator": "grpo",
        "policy_loss": "cispo",
        "clip_ratio_low": 10.0,
        "clip_ratio_high": 0.2,
        "loss_agg_mode": "token-mean",
    },
    "gmpo": {
        "adv_estimator": "grpo",
        "policy_loss": "geo_mean",
        "clip_ratio_low": 0.4,
        "clip_ratio_high": 0.4,
    },
    "gpg": {"adv_estimator": "gpg", "policy_loss": "gpg", "loss_agg_mode": "token-mean"},
    "clip_cov": {
        "adv_estimator": "grpo",
        "policy_loss": "clip_cov",
        "clip_ratio_low": 1.0,
        "clip_ratio_high": 1.0,
        "clip_cov_ratio": 0.0002,
        "clip_cov_lb": 1.0,
        "clip_cov_ub": 5.0,
    },
    "kl_cov": {"adv_estimator": "grpo", "policy_loss": "kl_cov", "kl_cov_ratio": 0.002, "ppo_kl_coef": 1.0},
    "rloo": {"adv_estimator": "rloo", "policy_loss": "vanilla", "loss_agg_mode": "token-mean"},
    "opo": {"adv_estimator": "opo", "policy_loss": "vanilla", "use_kl_loss": False, "entropy_coeff": 0.0},
    "remax": {"adv_estimator": "remax", "policy_loss": "vanilla", "loss_agg_mode": "token-mean"},
    "reinforce_plus_plus": {
        "adv_estimator": "reinforce_plus_plus",
        "policy_loss": "vanilla",
        "loss_agg_mode": "token-mean",
    },
    "reinforce_plus_plus_baseline": {
        "adv_estimator": "reinforce_plus_plus_baseline",
        "policy_loss": "vanilla",
        "loss_agg_mode": "token-mean",
    },
    "ppo": {"adv_estimator": "gae", "gamma": 1.0, "lam": 0.95, "policy_loss": "vanilla", "loss_agg_mode": "token-mean"},
}
"""Keys that each preset sets, by the preset's name."""


def laid_under(keys: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given keys, with a preset's where none is given.

    >>> laid_under({"policy_loss": "gspo", "clip_ratio_low": 3e-4}, {"clip_ratio": 0.1})
    {'policy_loss': 'gspo', 'clip_ratio': 0.1}
    """
    spread = {"clip_ratio_low", "clip_ratio_high"} if "clip_ratio" in given else set()
    return {key: value for key, value in keys.items() if key not in spread} | dict(given)
