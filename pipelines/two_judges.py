"""A rule, a judge and a penalty for length, combined by declared weights: the step waits for the slow one alone.

prompts -> rollout -> responses -> rule_score (at once) ------------------------> rule_scores -+
                          |                                                                    v
                          +-> reward_request -> (judge, seconds) -> reward_collect -> rewards -> combine -> scores
                                                                                                              |
                                                                actor_update <- advantages <- advantage <-----+

dataflow run pipelines/two_judges.py policy=both
dataflow run pipelines/two_judges.py weights.judge=0.5 weights.rule=1 weights.length=0
"""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat

from dataflow.config.reward import RewardConfig
from dataflow.config.run import RunConfig
from dataflow.config.section import Section
from dataflow.errors import ConfigError
from dataflow.graph import Pipeline
from dataflow.rewards.user.gsm8k import compute_score
from dataflow.running.hosting import pools_of, reward_host, rollout_host, trainer_host
from dataflow.running.recipe import actor_stage, recipe_pipeline
from dataflow.running.sampling import rollout_stages
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.combine import check_weights, combine, rule_score
from dataflow.stages.log_prob import log_prob_stages
from dataflow.stages.reward import reward_collect, reward_request, val_score
from dataflow.stages.samples import sample_stages
from dataflow.stages.sync import gather_weights, sync_weights


class WeightsConfig(Section):
    """What each reward counts in the score."""

    judge: NonNegativeFloat = 0.5
    """Weight of the judge's score."""
    rule: NonNegativeFloat = 0.5
    """Weight of the rule's: 1 for the right number, else 0."""
    length: NonNegativeFloat = 0.05
    """Penalty of the longest possible response; a shorter one has a share of it."""


class Config(RunConfig):
    """The defaults train a tiny Qwen2 on a laptop; see dataflow/config/run.py for every key."""

    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    reward: RewardConfig = Field(default_factory=lambda: RewardConfig(share_equal=False))


def pipeline(config: Config) -> Pipeline:
    """Returns the stages of one step with several rewards, their engines and the resources they share."""
    check_weights(config.weights.model_dump())
    if not config.weights.judge:
        raise ConfigError(
            "weights.judge=0: the judge would be asked and paid for nothing; give it a weight, or give the rule as "
            "custom_reward_function to pipelines/gsm8k_grpo.py."
        )
    if config.group_filter is not None:
        raise ConfigError(
            "algorithm.filter_groups: groups are chosen by the judge's score, before the rewards are combined; "
            "leave it out."
        )
    pools = pools_of(config)
    trainer = trainer_host(config, pools)
    engine = rollout_host(config, pools.engine_gpus)
    agent = reward_host(config)
    respond, val_respond = rollout_stages(config)

    stages = [
        respond.bind(on=pools.sampling, engine=engine),
        reward_request.bind(agent=agent, extra_groups=config.extra_groups, group_filter=config.group_filter),
        rule_score.bind(compute_score=compute_score),
        *log_prob_stages(config.algorithm, trainer=trainer, on=pools.training),
        reward_collect.bind(agent=agent),
        combine.bind(weights=config.weights.model_dump(), length=config.response_length),
        advantage_stage(config.algorithm).bind(renamed={"rewards": "scores"}),
        actor_stage(config, trainer=trainer, on=pools.training),
        gather_weights.bind(on=pools.training, trainer=trainer),
        sync_weights.bind(on=pools.sampling, engine=engine),
    ]
    return recipe_pipeline(
        config,
        stages,
        validation=[val_respond.bind(on=pools.sampling, engine=engine), val_score.bind(agent=agent)],
        samples=[s.bind(renamed={"rewards": "scores"}) for s in sample_stages(config)],  # with the parts of each score
        resources=pools.resources,
    )
