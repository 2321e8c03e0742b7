"""PPO with a critic: GAE from the values of a model that is trained beside the actor.

prompts -> rollout -> responses -> reward_request -> (judge, seconds) -> reward_collect -> rewards
              ^          |                                                                 |
           weights       +-> old_log_prob -+                                               v
              |          +-> values -------+-------------------------------> advantage -> actor_update
              |                ^                                                       -> critic_update
              |                +---------------- critic of the step before <-----------------+
              +----------------- sync_weights <- gather_weights <--------------------------+

dataflow run pipelines/ppo_critic.py policy=both
dataflow run pipelines/ppo_critic.py critic.lr=1e-3 critic.warmup=2 algorithm.lam=0.95
dataflow run pipelines/ppo_critic.py policy=baseline algorithm.whiten=step    # as verl's loop whitens
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.keys import verl_keys
from dataflow.config.reward import RewardConfig
from dataflow.config.run import RunConfig, TrainerConfig
from dataflow.config.training import CriticConfig, toy_critic, toy_trainer
from dataflow.graph import Pipeline
from dataflow.models.directory import check_model
from dataflow.models.tokenizer import check_same_tokens
from dataflow.running.recipe import actor_stage, recipe_pipeline, rollout_stages
from dataflow.running.services.hosting import critic_host, pools_of, reward_host, rollout_host, trainer_host
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.critic import critic_update, values
from dataflow.stages.log_prob import log_prob_stages
from dataflow.stages.reward import reward_collect, reward_request, val_score
from dataflow.stages.samples import sample_stages
from dataflow.stages.sync import gather_weights, sync_weights


class Config(RunConfig):
    """The defaults train a tiny Qwen2 on a laptop; see dataflow/config/run.py and training.py for every key."""

    elsewhere = staticmethod(verl_keys.hint_with_critic)
    trainer: TrainerConfig = Field(default_factory=toy_trainer)
    critic: CriticConfig = Field(default_factory=toy_critic)
    algorithm: AlgorithmConfig = Field(
        # Whitened over the whole step, as in verl, no policy could split a step. lam is verl's default: with less, the
        # errors of a critic that has just begun count, while the score says at the end what a response was worth.
        default_factory=lambda: AlgorithmConfig(preset="ppo", lam=1.0, whiten="mini-batch")
    )
    # A tiny model often repeats a response, a real one hardly ever. So each response is judged, as with a real model.
    reward: RewardConfig = Field(default_factory=lambda: RewardConfig(share_equal=False))

    @model_validator(mode="after")
    def _the_critic_fits(self) -> Config:
        self.critic.check_mini_batches(self.policy.resolve(self.optimizer_steps), self.data.prompts)
        return self


def pipeline(config: Config) -> Pipeline:
    """Returns the stages of one PPO step, their engines and the resources they share."""
    pools = pools_of(config, critic=True)
    trainer, critic = trainer_host(config, pools), critic_host(config, pools)
    engine, agent = rollout_host(config, pools.engine_gpus), reward_host(config)
    respond, val_respond = rollout_stages(config)
    groups, whitens = config.data.prompts, config.algorithm.whiten == "mini-batch"

    stages = [
        respond.bind(on=pools.sampling, engine=engine),
        reward_request.bind(agent=agent, extra_groups=config.extra_groups, group_filter=config.group_filter),
        *log_prob_stages(config.algorithm, trainer=trainer, on=pools.training),
        values.bind(on=pools.training, value_model=critic),
        reward_collect.bind(agent=agent),
        advantage_stage(config.algorithm),
        actor_stage(config, trainer=trainer, on=pools.training, warmup=config.critic.warmup, whiten=whitens),
        critic_update.bind(
            on=pools.training,
            value_model=critic,
            groups=groups,
            max_skipped=config.trainer.max_skipped,
            mini_batches=config.critic.mini_batches,
            epochs=config.critic.epochs,
        ),
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


def inputs(config: Config) -> dict[str, Any]:
    """Checks that a critic of another model reads the actor's tokens; adds no input."""
    if config.critic.path:
        other = check_model(config.critic.path, "critic.path")
        check_same_tokens(str(config.model.path), str(other), "critic.path")
    return {}
