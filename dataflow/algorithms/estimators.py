"""verl's advantage estimators: what each compares a sample with, what it needs, and whether a step can be split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dataflow.errors import ConfigError, nearest


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


def estimator_of(name: str) -> Estimator:
    """Returns the facts about an estimator.

    Raises:
        ConfigError: verl has no estimator of this name.

    >>> estimator_of("remax").needs
    ('reward_baselines',)
    >>> estimator_of("grop")
    Traceback (most recent call last):
    dataflow.errors.ConfigError: algorithm.adv_estimator: no estimator 'grop'; did you mean 'grpo'?
    """
    if name not in ESTIMATORS:
        guess = nearest(name, ESTIMATORS) or f"; use one of {', '.join(ESTIMATORS)}."
        raise ConfigError(f"algorithm.adv_estimator: no estimator '{name}'{guess}")
    return ESTIMATORS[name]
