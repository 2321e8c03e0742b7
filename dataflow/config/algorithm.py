"""Section ``algorithm``: advantages, losses and corrections, by verl's names; verl computes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from dataflow.algorithms import ESTIMATORS, LOSSES, PRESETS, SUMS_SQUARES, check_rejection, check_threshold
from dataflow.config.section import Fraction, Section, Share, Text, Texts, one_of
from dataflow.errors import ConfigError

Estimator = Annotated[str, one_of(ESTIMATORS)]
Threshold = Annotated[Text, BeforeValidator(lambda v: str(v) if type(v) in (int, float) else v)]
"""A number, or lower_upper; a file may have a number."""
Kl = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
# A '+' behind the name takes its value with the gradient of k2, which is unbiased.
KlLoss = Literal[Kl, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]


class FilterGroupsConfig(Section):
    """Dynamic sampling: a step samples more groups than it trains on, and leaves out those of equal scores."""

    enable: bool = False
    """Train on the first data.prompts groups whose scores differ, and cancel the other requests."""
    metric: Text = "score"
    """What must differ within a group: score, or another column that the reward returns."""


class KlControlConfig(Section):
    """The coefficient of the KL term in the reward: one a step."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed, or adaptive: raised after each step whose KL is above the target, lowered after one below it."""
    kl_coef: NonNegativeFloat = 0.001
    """The coefficient, or the one of the first step."""
    horizon: PositiveInt = 10000
    """Samples after which an adaptive coefficient has changed by at most a factor of e^0.2."""
    target_kl: PositiveFloat = 0.1
    """KL per token, averaged over responses, that an adaptive coefficient aims at."""


class AlgorithmConfig(Section):
    """Advantages and losses, by verl's names; verl computes them."""

    shorthand = "preset"

    preset: Annotated[str, one_of(PRESETS)] | None = None
    """Sets several keys at once, such as drgrpo, dapo or gspo (docs/algorithms.md); keys given explicitly win."""
    adv_estimator: Estimator = "grpo"
    """Advantage estimator."""
    gamma: Share = 1.0
    """Discount per token (gae, reinforce_plus_plus and its baseline variant)."""
    lam: Share = 1.0
    """Lambda of GAE: 0 trusts the critic alone, 1 the rewards alone."""
    whiten: Literal["step", "mini-batch"] = "step"
    """What GAE whitens the advantages over: a step, as in verl, or a mini-batch, so that a policy may split steps."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the group's standard deviation."""
    gdpo_reward_keys: Texts = Field(default=[])
    """Numbers that the reward function returns beside the score, each normalised on its own (gdpo); none: the score."""
    gdpo_reward_weights: list[float] = Field(default=[])
    """A weight for each of them; none weighs all alike."""
    policy_loss: Annotated[str, one_of(LOSSES)] = "vanilla"
    """Policy loss; vanilla is PPO's clipped one."""
    clip_ratio: PositiveFloat = 0.2
    """Clip range of the policy loss; default of the next two keys."""
    clip_ratio_low: PositiveFloat = 0.2
    """Clip range below 1."""
    clip_ratio_high: PositiveFloat = 0.2
    """Clip range above 1."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Dual clip: largest ratio that counts for a negative advantage (vanilla, dppo_tv, dppo_kl)."""
    clip_cov_ratio: Fraction = 0.0002
    """Share of tokens whose gradient is left out (clip_cov)."""
    clip_cov_lb: float = 1.0
    """Least covariance of these tokens (clip_cov)."""
    clip_cov_ub: float = 5.0
    """Largest covariance of these tokens (clip_cov)."""
    kl_cov_ratio: Fraction = 0.0002
    """Share of tokens, those of the largest covariance, that get a KL term (kl_cov)."""
    ppo_kl_coef: NonNegativeFloat = 0.1
    """Weight of this KL term (kl_cov)."""
    dro_beta: PositiveFloat | None = None
    """Weight of the squared log-ratio (dro, which needs it)."""
    tau_pos: PositiveFloat = 1.0
    """Temperature of the soft clip for positive advantages (sapo)."""
    tau_neg: PositiveFloat = 1.05
    """Temperature of the soft clip for negative advantages (sapo)."""
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How token losses are aggregated."""
    loss_scale_factor: PositiveInt | None = None
    """What seq-mean-token-sum-norm divides by; null: the longest possible response, in tokens."""
    use_kl_loss: bool = False
    """Add a KL term against the initial weights to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL term."""
    kl_loss_type: KlLoss = "low_var_kl"
    """Estimator of the KL term; a + behind it gives it the gradient of k2, which is unbiased."""
    use_kl_in_reward: bool = False
    """Subtract a KL term against the initial weights from the reward of each token."""
    kl_penalty: Kl = "kl"
    """Estimator of the KL term in the reward."""
    kl_ctrl: KlControlConfig = Field(default_factory=KlControlConfig)
    """The coefficient of the KL term in the reward."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    filter_groups: FilterGroupsConfig = Field(default_factory=FilterGroupsConfig)
    """Dynamic sampling: which groups a step leaves out."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights that correct for stale samples, per token or per sequence; null leaves them out."""
    rollout_is_threshold: Threshold = "2.0"
    """Largest importance weight; lower_upper (0.5_5.0) gives weight 0 to a ratio outside."""
    rollout_is_batch_normalize: bool = False
    """Divide the importance weights by their mean over the step."""
    rollout_rs: Text | None = None
    """Reject tokens (token_k1) or responses (seq_mean_k3) that are too unlikely now; several with commas."""
    rollout_rs_threshold: Threshold | None = None
    """Bounds of what is kept: lower_upper of rollout / trainer for k1, the largest divergence for k2 and k3."""
    bypass_mode: bool = False
    """Take the rollout's log-probs for the old ones, and leave out the pass that computes them."""
    bypass_loss: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Policy loss with bypass_mode: PPO's, or REINFORCE with the weights of rollout_is."""

    @model_validator(mode="wrap")
    @classmethod
    def _expand_preset(cls, value: Any, validate: ModelWrapValidatorHandler[AlgorithmConfig]) -> AlgorithmConfig:
        given = {cls.shorthand: value} if isinstance(value, str) else value
        if not isinstance(given, Mapping):
            return validate(value)
        spread = ("clip_ratio_low", "clip_ratio_high") if "clip_ratio" in given else ()
        preset = PRESETS.get(str(given.get("preset")), {})  # another name is refused below
        section = validate({key: of for key, of in preset.items() if key not in spread} | dict(given))
        for name in preset.keys() - given.keys():
            section.model_fields_set.discard(name)  # so that a later preset replaces it
        return section

    @field_validator("rollout_is_threshold")
    @classmethod
    def _check_threshold(cls, value: str) -> str:
        check_threshold(value)
        return value

    @model_validator(mode="after")
    def _spread_clip_ratio(self) -> AlgorithmConfig:
        if "clip_ratio" in self.model_fields_set:
            for name in ("clip_ratio_low", "clip_ratio_high"):
                if name not in self.model_fields_set:
                    setattr(self, name, self.clip_ratio)
                    self.model_fields_set.discard(name)  # so that a later clip_ratio replaces it again
        return self

    @model_validator(mode="after")
    def _fit_together(self) -> AlgorithmConfig:
        if self.gdpo_reward_weights and len(self.gdpo_reward_weights) != len(self.gdpo_reward_keys):
            raise ConfigError("algorithm.gdpo_reward_weights: give one for each of gdpo_reward_keys.")
        if self.policy_loss == "dro" and self.dro_beta is None:
            raise ConfigError("algorithm.dro_beta: policy_loss=dro needs it; give a number greater than 0.")
        if (self.rollout_rs is None) != (self.rollout_rs_threshold is None):
            raise ConfigError("algorithm.rollout_rs and algorithm.rollout_rs_threshold go together; give both.")
        if self.rollout_rs is not None and self.rollout_rs_threshold is not None:
            try:
                check_rejection(self.rollout_rs, self.rollout_rs_threshold)
            except ValueError as error:
                given = f"algorithm.rollout_rs={self.rollout_rs} with rollout_rs_threshold={self.rollout_rs_threshold}"
                raise ConfigError(f"{given}: {error}.") from error
        if self.bypass_mode and self.policy_loss != "vanilla":
            raise ConfigError(
                f"algorithm.policy_loss={self.policy_loss}: bypass_mode has its own (bypass_loss); give vanilla."
            )
        if self.bypass_mode and self.adv_estimator in SUMS_SQUARES:
            raise ConfigError(
                f"algorithm.bypass_mode leaves out the pass that adv_estimator={self.adv_estimator} needs; use another "
                "adv_estimator, or bypass_mode=false."
            )
        return self

    @property
    def reference(self) -> bool:
        """Whether the log-probs of the initial weights are needed."""
        return self.use_kl_loss or self.use_kl_in_reward

    @property
    def corrects(self) -> bool:
        """Whether the rollout is corrected before the update; with bypass_mode the loss does it."""
        return not self.bypass_mode and (self.rollout_is is not None or self.rollout_rs is not None)

    @staticmethod
    def without_preset(values: Mapping[str, Any], preset: str) -> dict[str, Any]:
        """Returns a section's values without those that its preset set or another preset sets."""
        keys = {key for name in (str(values.get("preset")), preset) for key in PRESETS.get(name, {})}
        return {key: value for key, value in values.items() if key not in keys}
