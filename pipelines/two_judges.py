"""Two reward agents, a slow judge and a rule, and a penalty for length, combined by declared weights.

prompts -> rollout -> responses -> rule_request -> (the rule, at once) -> rule_collect -> rule_rewards -+
                          |                                                                             v
                          +-> reward_request -> (the judge, seconds) -> reward_collect -> rewards -> combine -> scores
                                                                                                                  |
                                                                    actor_update <- advantages <- advantage <-----+

The rule is an agent of its own, with its own limits, failure rule, metrics (reward/rule/...), ledger and row of the
timeline, which shows for which of the two a step waited. Its section has the keys of section reward; any function or
judge may take the rule's place.

dataflow run pipelines/two_judges.py policy=both
dataflow run pipelines/two_judges.py weights.judge=0.5 weights.rule=1 weights.length=0
dataflow run pipelines/two_judges.py rule.custom_reward_function.path=style.py rule.on_failure=score:0 rule.timeout=5
"""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat

from dataflow.config.reward import RewardConfig, SourceConfig
from dataflow.config.run import RunConfig, TrainerConfig
from dataflow.config.section import Section
from dataflow.config.training import toy_trainer
from dataflow.errors import ConfigError
from dataflow.graph import Pipeline
from dataflow.running.recipe import actor_stage, recipe_pipeline, rollout_stages
from dataflow.running.services.hosting import pools_of, reward_host, rollout_host, trainer_host
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.combine import combine_stage
from dataflow.stages.log_prob import log_prob_stages
from dataflow.stages.reward import agent_stages, val_score
from dataflow.stages.samples import sample_stages
from dataflow.stages.sync import gather_weights, sync_weights

RULE = "dataflow.rewards.gsm8k:compute_score"
"""1 for the right number, else 0."""


class WeightsConfig(Section):
    """What each reward counts in the score."""

    judge: NonNegativeFloat = 0.5
    """Weight of the score of agent reward, a judge unless it has a custom_reward_function."""
    rule: NonNegativeFloat = 0.5
    """Weight of the score of agent rule."""
    length: NonNegativeFloat = 0.05
    """Penalty of the longest possible response; a shorter one has a share of it."""


class Config(RunConfig):
    """The defaults train a tiny Qwen2 on a laptop; see dataflow/config/run.py for every key."""

    trainer: TrainerConfig = Field(default_factory=toy_trainer)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    reward: RewardConfig = Field(default_factory=lambda: RewardConfig(share_equal=False))
    rule: SourceConfig = Field(default_factory=SourceConfig)


def pipeline(config: Config) -> Pipeline:
    """Returns the stages of one step with several rewards, their engines and the resources they share."""
    if config.group_filter is not None:
        raise ConfigError(
            "algorithm.filter_groups: groups are chosen by the judge's score, before the rewards are combined; "
            "leave it out."
        )
    pools = pools_of(config)
    trainer = trainer_host(config, pools)
    engine = rollout_host(config, pools.engine_gpus)
    judge, rule = reward_host(config), reward_host(config, "rule", default=RULE)
    # The first one forms the parts of a step, so the slowest one: the other's rewards have arrived by then.
    ask_judge, judged = agent_stages(judge, extra_groups=config.extra_groups)
    ask_rule, ruled = agent_stages(rule)
    respond, val_respond = rollout_stages(config)

    stages = [
        respond.bind(on=pools.sampling, engine=engine),
        ask_judge,
        ask_rule,
        *log_prob_stages(config.algorithm, trainer=trainer, on=pools.training),
        judged,
        ruled,
        combine_stage(
            {"judge": judge.name, "rule": rule.name},
            weights=config.weights.model_dump(),
            length=config.response_length,
        ),
        advantage_stage(config.algorithm).bind(renamed={"rewards": "scores"}),
        actor_stage(config, trainer=trainer, on=pools.training),
        gather_weights.bind(on=pools.training, trainer=trainer),
        sync_weights.bind(on=pools.sampling, engine=engine),
    ]
    return recipe_pipeline(
        config,
        stages,
        validation=[val_respond.bind(on=pools.sampling, engine=engine), val_score.bind(agent=judge)],
        samples=[s.bind(renamed={"rewards": "scores"}) for s in sample_stages(config)],  # with the parts of each score
        resources=pools.with_agents(rule.name),
    )
