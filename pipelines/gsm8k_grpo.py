"""START HERE: GRPO on GSM8K (or on generated problems of its form), the stages in the order of the data.

prompts -> rollout -> responses -> reward_request -> (judge, seconds) -> reward_collect -> rewards
              ^          |                                                                 |
           weights       +-> old_log_prob -+                                               v
              |          +-> ref_log_prob -+-------------------------------> advantage -> actor_update
              +----------------- sync_weights <- gather_weights <--------------------------+

dataflow run pipelines/gsm8k_grpo.py policy=both
dataflow show pipelines/gsm8k_grpo.py policy=mini-batch steps=2
"""

from __future__ import annotations

from pydantic import Field

from dataflow.config.reward import RewardConfig
from dataflow.config.run import RunConfig, TrainerConfig
from dataflow.config.training import toy_trainer
from dataflow.graph import Pipeline
from dataflow.running.recipe import actor_stage, greedy_stages, recipe_pipeline, rollout_stages
from dataflow.running.services.hosting import pools_of, reward_host, rollout_host, trainer_host
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.log_prob import log_prob_stages
from dataflow.stages.reward import reward_collect, reward_request, val_score
from dataflow.stages.samples import sample_stages
from dataflow.stages.sync import gather_weights, sync_weights


class Config(RunConfig):
    """The defaults train a tiny Qwen2 on a laptop; see dataflow/config/run.py for every key."""

    trainer: TrainerConfig = Field(default_factory=toy_trainer)
    # A tiny model often repeats a response, a real one hardly ever. So each response is judged, as with a real model.
    reward: RewardConfig = Field(default_factory=lambda: RewardConfig(share_equal=False))


def pipeline(config: Config) -> Pipeline:
    """Returns the stages of one GRPO step, their engines and the resources they share."""
    pools = pools_of(config)
    trainer = trainer_host(config, pools)
    engine = rollout_host(config, pools.engine_gpus)
    agent = reward_host(config)
    respond, val_respond = rollout_stages(config)  # conversations if the run offers tools

    stages = [
        respond.bind(on=pools.sampling, engine=engine),
        reward_request.bind(agent=agent, extra_groups=config.extra_groups, group_filter=config.group_filter),
        *greedy_stages(config, val_respond, engine=engine, agent=agent, on=pools.sampling),  # for remax
        *log_prob_stages(config.algorithm, trainer=trainer, on=pools.training),
        reward_collect.bind(agent=agent),
        advantage_stage(config.algorithm),
        actor_stage(config, trainer=trainer, on=pools.training),
        gather_weights.bind(on=pools.training, trainer=trainer),
        sync_weights.bind(on=pools.sampling, engine=engine),
    ]
    return recipe_pipeline(
        config,
        stages,
        validation=[val_respond.bind(on=pools.sampling, engine=engine), val_score.bind(agent=agent)],
        samples=sample_stages(config),  # what the model said, for people to read
        resources=pools.resources,
    )
