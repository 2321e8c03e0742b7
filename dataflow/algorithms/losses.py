"""verl's policy losses: their source, and the keys that each reads besides clip ratios and aggregation."""

from __future__ import annotations

from dataclasses import dataclass


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
