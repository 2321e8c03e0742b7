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
from dataflow.config.run import RunConfig
from dataflow.errors import ConfigError
from dataflow.graph import Hosted, Pipeline
from dataflow.running.hosting import rollout_host
from dataflow.running.sampling import rollout_stages
from dataflow.running.saving.checkpoints import checkpoint_store
from dataflow.stages.advantage import advantage
from dataflow.stages.checkpoint import checkpoint_stages
from dataflow.stages.log_prob import old_log_prob, ref_log_prob
from dataflow.stages.reward import reward_collect, reward_request, val_score
from dataflow.stages.samples import sample_stages
from dataflow.stages.sync import gather_weights, sync_weights
from dataflow.stages.update import update_stage

# Shares of a GPU for trainer and rollout. On a shared GPU the trainer's share is over a half, so that Ray never puts
# two ranks on one GPU.
SHARES = {"colocated": (0.6, 0.3), "disaggregated": (1.0, 1.0)}


class Config(RunConfig):
    """The defaults train a tiny Qwen2 on a laptop; see dataflow/config/run.py for every key."""

    # A tiny model often repeats a response, a real one hardly ever. So each response is judged, as with a real model.
    reward: RewardConfig = Field(default_factory=lambda: RewardConfig(share_equal=False))


def pipeline(config: Config) -> Pipeline:
    """Returns the stages of one GRPO step, their engines and the resources they share."""
    gpus = config.ray.gpus_per_worker
    device = "cuda" if gpus else "cpu"
    train, draw, judge = config.trainer, config.engine, config.judge
    apart = config.placement == "disaggregated"
    if not apart and gpus not in (0, 1):
        raise ConfigError(
            f"ray.gpus_per_worker={gpus:g}: colocated, engine and trainer share whole GPUs; give 1, a rank for each "
            "GPU (trainer.world_size), or placement=disaggregated."
        )
    # Tasks of one pool exclude each other. Colocated there is one pool; otherwise trainer and engine have one each.
    training, sampling_on = ("train", "rollout") if apart else ("gpu", "gpu")
    trainer_share, rollout_share = SHARES[config.placement]
    trainer = Hosted(
        "trainer",
        "dataflow.engines.verl.trainer:VerlTrainer",
        {
            "model": config.model.path,
            "trainer": train,
            "algorithm": config.algorithm,
            "total_steps": config.steps,
            "response_length": config.response_length,
            "temperature": draw.temperature,
            "seed": config.seed,
            "device": device,
            "reference": config.algorithm.use_kl_loss,
            "shares_gpu": gpus > 0 and not apart,
        },
        ranks=train.world_size,
        gpus=gpus * trainer_share,
        concurrent=True,  # a checkpoint is written while it trains
    )
    engine = rollout_host(config, gpus * rollout_share)
    agent = Hosted(
        "reward",
        "dataflow.running.agent:host_agent",
        {
            "custom": config.custom_reward_function.model_dump(),
            "default": {"target": "dataflow.rewards.judge.judge:Judge", "kwargs": judge.client_options()},
            "options": config.reward,
            "run": config.name or "run",
            "ledger": config.run_file("rewards.sqlite"),
            "tokenizer": config.model.path,
        },
        concurrent=True,
        restarts=config.reward.restarts,
    )
    respond, val_respond = rollout_stages(config)  # conversations if the run offers tools

    stages = [
        respond.bind(on=sampling_on, engine=engine),
        reward_request.bind(agent=agent, extra_groups=config.reward.extra_groups),
        old_log_prob.bind(on=training, trainer=trainer),
        reward_collect.bind(agent=agent),
        advantage.bind(algorithm=config.algorithm),
        update_stage(config.algorithm.use_kl_loss).bind(on=training, trainer=trainer, groups=config.data.prompts),
        gather_weights.bind(on=training, trainer=trainer),
        sync_weights.bind(on=sampling_on, engine=engine),
    ]
    if config.algorithm.use_kl_loss:
        stages.insert(3, ref_log_prob.bind(on=training, trainer=trainer))
    if config.val.every:
        stages += [
            val_respond.bind(on=sampling_on, engine=engine, every=config.val.every),
            val_score.bind(agent=agent, every=config.val.every),
        ]
    stages += sample_stages(config)  # what the model said, for people to read
    if config.checkpoint.every:
        store = checkpoint_store(config)
        stages += checkpoint_stages(
            stages, every=config.checkpoint.every, trainer=trainer, store=store, steps=config.steps, on=training
        )
    return Pipeline(
        stages,
        inputs=["prompts", "val_prompts"] if config.val.every else ["prompts"],
        resources={training: 1, sampling_on: 1, "reward": None, "controller": 1, "io": 1},
    )
