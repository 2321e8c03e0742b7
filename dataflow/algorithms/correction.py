"""Rollout correction: verl's kinds of rejection, its named presets, and its notation of thresholds.

A sample's log-probs under the rollout's weights differ from those under the trainer's: the engine computes with other
kernels and precision, and a stale sample was drawn with older weights. Correction weighs tokens or sequences by the
ratio of the two, and rejects those for which it is too far from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REJECTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)
"""verl's kinds of rejection sampling: k1 by bounds of the ratio, k2 and k3 by the largest divergence."""

_GEO, _K3 = "0.999_1.001", "0.01"


def _preset(
    rollout_is: str | None = None,
    threshold: str = "2.0",
    rollout_rs: str | None = None,
    rs_threshold: str | None = None,
    bypass: str | None = None,
) -> dict[str, Any]:
    return {
        "rollout_is": rollout_is,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": False,
        "rollout_rs": rollout_rs,
        "rollout_rs_threshold": rs_threshold,
        "bypass_mode": bypass is not None,
        "bypass_loss": bypass or "ppo_clip",
    }


CORRECTIONS: dict[str, dict[str, Any]] = {
    "disabled": _preset(),
    "decoupled_token_is": _preset("token"),
    "decoupled_seq_is": _preset("sequence"),
    "decoupled_token_icepop": _preset("token", "0.5_5.0"),
    "decoupled_seq_is_rs": _preset("sequence", rollout_rs="seq_sum_k1", rs_threshold="0.5_2.0"),
    "decoupled_geo_rs": _preset(rollout_rs="seq_mean_k1", rs_threshold=_GEO),
    "decoupled_geo_rs_seq_tis": _preset("sequence", rollout_rs="seq_mean_k1", rs_threshold=_GEO),
    "decoupled_geo_rs_token_tis": _preset("token", rollout_rs="seq_mean_k1", rs_threshold=_GEO),
    "decoupled_k3_rs": _preset(rollout_rs="seq_mean_k3", rs_threshold=_K3),
    "decoupled_k3_rs_seq_tis": _preset("sequence", rollout_rs="seq_mean_k3", rs_threshold=_K3),
    "decoupled_k3_rs_token_tis": _preset("token", rollout_rs="seq_mean_k3", rs_threshold=_K3),
    "bypass_ppo_clip": _preset(bypass="ppo_clip"),
    "bypass_ppo_clip_geo_rs": _preset(rollout_rs="seq_mean_k1", rs_threshold=_GEO, bypass="ppo_clip"),
    "bypass_ppo_clip_k3_rs": _preset(rollout_rs="seq_mean_k3", rs_threshold=_K3, bypass="ppo_clip"),
    "bypass_pg_is": _preset("sequence", bypass="reinforce"),
    "bypass_pg_token_icepop": _preset("token", "0.5_5.0", bypass="reinforce"),
    "bypass_pg_geo_rs": _preset(rollout_rs="seq_mean_k1", rs_threshold=_GEO, bypass="reinforce"),
    "bypass_pg_geo_rs_seq_tis": _preset("sequence", rollout_rs="seq_mean_k1", rs_threshold=_GEO, bypass="reinforce"),
    "bypass_pg_geo_rs_token_tis": _preset("token", rollout_rs="seq_mean_k1", rs_threshold=_GEO, bypass="reinforce"),
}
"""verl's named presets (the class methods of its RolloutCorrectionConfig), as keys of section ``algorithm``."""


def kinds_of(rollout_rs: str) -> list[str]:
    """Returns the kinds of rejection in a list with commas, each once.

    Raises:
        ValueError: there is none, or verl has no such kind.
    """
    kinds = list(dict.fromkeys(kind.strip() for kind in rollout_rs.split(",") if kind.strip()))
    unknown = [kind for kind in kinds if kind not in REJECTIONS]
    if unknown or not kinds:
        what = f"there is no '{unknown[0]}'" if unknown else "it names none"
        raise ValueError(f"{what}; give one or more of {', '.join(REJECTIONS)}, with commas between")
    return kinds


def check_threshold(text: str) -> None:
    """Checks a threshold: an upper bound, or ``lower_upper``.

    Raises:
        ValueError: it is neither.

    >>> check_threshold("0.5_5.0")
    >>> check_threshold("5_0.5")
    Traceback (most recent call last):
    ValueError: give the upper bound, or lower_upper such as 0.5_2.0, both greater than 0
    """
    try:
        bounds = [float(part) for part in text.split("_", 1)]
    except ValueError:
        bounds = []
    # The comparisons are false for nan.
    if not bounds or not all(0 < bound < float("inf") for bound in bounds) or bounds != sorted(bounds):
        raise ValueError("give the upper bound, or lower_upper such as 0.5_2.0, both greater than 0")


def check_rejection(kinds: Sequence[str], thresholds: str) -> None:
    """Checks the thresholds of rejection: one for all kinds, or one for each, with commas between.

    Raises:
        ValueError: there are more or fewer, or one does not suit its kind.
    """
    given = [part.strip() for part in thresholds.split(",") if part.strip()]
    if len(given) not in (1, len(kinds)):
        raise ValueError(f"give one threshold for all kinds, or {len(kinds)}, with commas between")
    for kind, threshold in zip(kinds, given * len(kinds) if len(given) == 1 else given, strict=False):
        check_threshold(threshold)
        if "_" in threshold and not kind.endswith("k1"):
            raise ValueError(f"'{kind}' has no lower bound, so give a number, not '{threshold}'")
        if "_" not in threshold and kind.endswith("k1") and float(threshold) < 1:
            raise ValueError(f"'{kind}' bounds a ratio by 1/{threshold} and {threshold}, so give 1 or more")
