"""What an algorithm can be named: tables of verl's estimators, losses and kinds of rejection, and presets. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Estimator:
    """One of verl's advantage estimators (``core_algos``, 0.9.1).

    Attributes:
        source: the paper, as an arXiv number, or what it is a variant of.
        against: what a sample's score is compared with: the other samples of its ``group``, the whole ``batch``, or
            ``nothing`` of other samples.
        whole_batch: why it needs all groups of a step at once; None if each group gets the same advantages alone.
        relative: whether subtracting a constant from all scores of a group has no effect.
        needs: fields that it reads besides responses and rewards.
    """

    source: str
    against: Literal["group", "batch", "nothing"] = "group"
    whole_batch: str | None = None
    relative: bool = False
    needs: tuple[str, ...] = ()


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(
        "1506.02438",
        "nothing",
        whole_batch="whitens the advantages over the whole batch unless algorithm.whiten=mini-batch",
        needs=("values",),
    ),
    "grpo": Estimator("2402.03300", relative=True),
    "grpo_vectorized": Estimator("grpo, in one operation for all groups", relative=True),
    "grpo_passk": Estimator("2503.19595", relative=True),
    "rloo": Estimator("2402.14740", relative=True),
    "rloo_vectorized": Estimator("rloo, in one operation for all groups", relative=True),
    "opo": Estimator("2505.23585", relative=True),
    "remax": Estimator("2310.10505", "nothing", needs=("reward_baselines",)),
    "gpg": Estimator("2504.02546", whole_batch="scales by the share of non-zero scores in the whole batch"),
    "gdpo": Estimator("2601.05242", whole_batch="whitens the advantages over the whole batch", relative=True),
    "reinforce_plus_plus": Estimator("2501.03262", "batch", whole_batch="whitens the returns over the whole batch"),
    "reinforce_plus_plus_baseline": Estimator(
        "2501.03262", whole_batch="whitens the advantages over the whole batch", relative=True
    ),
    "optimal_token_baseline": Estimator("verl's optimal token baseline", needs=("old_log_probs",)),
    "tir_optimal_token_baseline": Estimator("optimal_token_baseline for several turns", needs=("old_log_probs",)),
}
"""Every estimator of verl's registry, by name."""

SUMS_SQUARES = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""These need the sum of the squared probabilities at each token, which the pass for old log-probs computes."""


@dataclass(frozen=True)
class PolicyLoss:
    """One of verl's policy losses (``core_algos``, 0.9.1).

    Attributes:
        source: the paper, as an arXiv number, or a description.
        keys: of section ``algorithm`` that it reads.
        per_micro_batch: what it computes over a micro-batch rather than the mini-batch, so that
            ``trainer.micro_batch_size`` changes it; None for nothing.
    """

    source: str
    keys: tuple[str, ...] = ()
    per_micro_batch: str | None = None


CLIPS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")

LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss("PPO: 1707.06347, with dual clip: 1912.09729", (*CLIPS, "clip_ratio_c", "loss_agg_mode")),
    "dppo_tv": PolicyLoss("2602.04879, total variation", (*CLIPS, "clip_ratio_c", "loss_agg_mode")),
    "dppo_kl": PolicyLoss("2602.04879, KL divergence", (*CLIPS, "clip_ratio_c", "loss_agg_mode")),
    "gspo": PolicyLoss("2507.18071", (*CLIPS, "loss_agg_mode")),
    "sapo": PolicyLoss("2511.20347, always seq-mean-token-mean", ("tau_pos", "tau_neg")),
    "gpg": PolicyLoss("2504.02546, without clip", ("loss_agg_mode",)),
    "clip_cov": PolicyLoss(
        "2505.22617",
        (*CLIPS, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "loss_agg_mode"),
        per_micro_batch="selects tokens by their covariance in the micro-batch",
    ),
    "kl_cov": PolicyLoss(
        "2505.22617",
        ("kl_cov_ratio", "ppo_kl_coef", "loss_agg_mode"),
        per_micro_batch="selects tokens by their covariance in the micro-batch",
    ),
    "geo_mean": PolicyLoss("GMPO: 2507.20673, always a mean over sequences", CLIPS),
    "dro": PolicyLoss("2405.19107", ("dro_beta", "loss_agg_mode")),
    "cispo": PolicyLoss("2506.13585", (*CLIPS, "loss_agg_mode")),
}
"""Every policy loss of verl's registry that ``algorithm.policy_loss`` can name."""

BYPASS = "bypass_mode"
"""The remaining one, which ``algorithm.bypass_mode`` selects."""

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
    "opo": {"adv_estimator": "opo", "policy_loss": "vanilla", "use_kl_loss": False, "entropy_coeff": 0.0},
    "ppo": {"adv_estimator": "gae", "gamma": 1.0, "lam": 0.95, "policy_loss": "vanilla", "loss_agg_mode": "token-mean"},
}
"""Keys that each preset sets, by the preset's name."""

REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
"""verl's kinds of rejection sampling: k1 by bounds of the ratio, k2 and k3 by the largest divergence."""


def check_threshold(text: str, bounds_ratio: bool = True) -> None:
    """Checks a threshold of rollout correction: an upper bound, or ``lower_upper`` of a ratio.

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
    if len(bounds) > 1 and not bounds_ratio:
        raise ValueError(f"k2 and k3 have no lower bound, so give a number, not '{text}'")


def check_rejection(rollout_rs: str, thresholds: str) -> None:
    """Checks kinds of rejection and their thresholds: one for all kinds, or one for each, with commas between.

    A wrong one is a ValueError here; verl reads them in the first step, after its rollout.
    """
    kinds, given = ([part.strip() for part in text.split(",")] for text in (rollout_rs, thresholds))
    if unknown := [kind for kind in kinds if kind not in REJECTIONS]:
        raise ValueError(f"there is no '{unknown[0]}'; give one or more of {', '.join(REJECTIONS)}")
    if len(given) not in (1, len(kinds)):
        raise ValueError(f"give one threshold for all kinds, or {len(kinds)}, with commas between")
    for kind, threshold in zip(kinds, given if len(given) > 1 else given * len(kinds), strict=True):
        check_threshold(threshold, bounds_ratio=kind.endswith("k1"))
        if kind.endswith("k1") and "_" not in threshold and float(threshold) < 1:  # verl would reject everything
            raise ValueError(f"'{kind}' bounds a ratio by 1/{threshold} and {threshold}, so give 1 or more")
