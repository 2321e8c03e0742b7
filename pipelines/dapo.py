"""DAPO: dynamic sampling, a wider clip range above 1, token-mean loss, and a penalty for overlong responses.

prompts (twice as many) -> rollout -> responses -> reward_request -> (judge) -> reward_collect
                                                                                    |
                 the first data.prompts groups whose accuracies differ, as they arrive: advantage -> actor_update
                 groups of equal ones are left out; requests that are not needed any more are cancelled

dataflow run pipelines/dapo.py policy=both
dataflow run pipelines/dapo.py data.prompts=32 data.gen_batch_size=48
"""

from __future__ import annotations

from pydantic import Field

from dataflow.config.algorithm import AlgorithmConfig, FilterGroupsConfig
from dataflow.config.reward import RewardConfig
from dataflow.config.run import RunConfig, TrainerConfig
from dataflow.config.training import toy_trainer
from dataflow.graph import Pipeline
from dataflow.running.recipe import actor_stage, recipe_pipeline, rollout_stages
from dataflow.running.services.hosting import pools_of, reward_host, rollout_host, trainer_host
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.log_prob import log_prob_stages
from dataflow.stages.reward import reward_collect, reward_request, val_score
from dataflow.stages.samples import sample_stages
from dataflow.stages.sync import gather_weights, sync_weights

OVERLONG = {"overlong_buffer_len": 6}  # the last 6 tokens of the longest response, engine.max_tokens


class Config(RunConfig):
    """The defaults train a tiny Qwen2 on a laptop; see dataflow/config/run.py for every key."""

    trainer: TrainerConfig = Field(default_factory=toy_trainer)
    reward: RewardConfig = Field(
        default_factory=lambda: RewardConfig(share_equal=False, manager="dapo", manager_kwargs=OVERLONG)
    )
    algorithm: AlgorithmConfig = Field(
        default_factory=lambda: AlgorithmConfig(
            preset="dapo",
            # The accuracy, as the penalty may differ within a group that is right or wrong as a whole.
            filter_groups=FilterGroupsConfig(enable=True, metric="acc"),
        )
    )


def pipeline(config: Config) -> Pipeline:
    """Returns the stages of one DAPO step, their engines and the resources they share."""
    pools = pools_of(config)
    trainer = trainer_host(config, pools)
    engine = rollout_host(config, pools.engine_gpus)
    agent = reward_host(config)
    respond, val_respond = rollout_stages(config)

    stages = [
        respond.bind(on=pools.sampling, engine=engine),
        reward_request.bind(agent=agent, extra_groups=config.extra_groups, group_filter=config.group_filter),
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
        samples=sample_stages(config),
        resources=pools.resources,
    )
