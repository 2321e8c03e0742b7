"""On-policy distillation: a teacher on GPUs of its own scores each token that the student samples; no reward at all.

prompts -> rollout -> responses -> teacher_log_prob (the teacher's GPUs) -> distill_advantage -> actor_update
              ^          |                                                        ^                   |
           weights       +-> old_log_prob (the student's GPUs) -------------------+                   |
              +-------------------- sync_weights <- gather_weights <----------------------------------+

The teacher's scores take the place of the judge's: `mini-batch` trains on a part while the teacher scores the next, and
`off-policy` samples the next step meanwhile.

dataflow run pipelines/distill.py policy=both
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, PositiveInt

from dataflow.config.run import ModelConfig, RunConfig, TrainerConfig
from dataflow.config.training import toy_trainer
from dataflow.graph import Hosted, Pipeline
from dataflow.models.tokenizer import check_same_tokens
from dataflow.rewards.gsm8k import compute_score
from dataflow.running.recipe import actor_stage, recipe_pipeline, rollout_stages
from dataflow.running.services.hosting import pools_of, rollout_host, trainer_host
from dataflow.running.services.training import check_reader
from dataflow.stages.distill import distill_advantage, teacher_log_prob
from dataflow.stages.log_prob import bypassing, log_prob_stages
from dataflow.stages.sync import gather_weights, sync_weights
from dataflow.stages.validate import val_check


class TeacherConfig(ModelConfig):
    """The teacher; it must have the student's tokens."""

    tiny: ClassVar[str] = "teacher"

    world_size: PositiveInt = 1
    """Processes that share a part's rows."""
    micro_batch_size: PositiveInt = 64
    """Rows per process in one forward pass."""


ADVANTAGES = "the advantage of a token is how much likelier it is under the teacher"
REWARDS = "it has no reward agent"


class Config(RunConfig):
    """The defaults distil a tiny Qwen2 into another on a laptop; see dataflow/config/run.py for every key."""

    unread: ClassVar[Mapping[str, str]] = {
        **{f"algorithm.{key}": ADVANTAGES for key in ("adv_estimator", "gamma", "lam", "whiten")},
        "algorithm.use_kl_in_reward": f"{ADVANTAGES}, and algorithm.use_kl_loss adds a KL term to the loss",
        "algorithm.filter_groups.enable": REWARDS,
        **dict.fromkeys(("custom_reward_function", "reward", "judge"), REWARDS),
        "samples.every": "it keeps no samples",
    }

    trainer: TrainerConfig = Field(default_factory=toy_trainer)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)


def pipeline(config: Config) -> Pipeline:
    """Returns the stages of one step of distillation, their engines and the resources they share."""
    pools = pools_of(config)
    trainer = trainer_host(config, pools)
    engine = rollout_host(config, pools.engine_gpus)
    gpus = config.ray.gpus_per_worker
    teacher = Hosted(
        "teacher",
        "dataflow.engines.verl.trainer:VerlTeacher",
        {
            "model": config.teacher.path,
            "options": TrainerConfig(micro_batch_size=config.teacher.micro_batch_size),
            "temperature": config.engine.temperature,
            "device": "cuda" if gpus else "cpu",
            "threads": config.trainer.threads,
        },
        ranks=config.teacher.world_size,
        gpus=gpus,
    )
    respond, val_respond = rollout_stages(config)

    stages = [
        respond.bind(on=pools.sampling, engine=engine),
        # The groups of a mini-batch at a time, so that splitting a step changes no digit.
        teacher_log_prob.bind(teacher=teacher, together=config.data.prompts // config.trainer.mini_batches),
        *log_prob_stages(config.algorithm, trainer=trainer, on=pools.training),
        bypassing(distill_advantage) if config.algorithm.bypass_mode else distill_advantage,
        actor_stage(config, trainer=trainer, on=pools.training),
        gather_weights.bind(on=pools.training, trainer=trainer),
        sync_weights.bind(on=pools.sampling, engine=engine),
    ]
    return recipe_pipeline(
        config,
        stages,
        validation=[val_respond.bind(on=pools.sampling, engine=engine), val_check.bind(compute_score=compute_score)],
        resources={**pools.resources, "teacher": 1},
    )


def inputs(config: Config) -> dict[str, Any]:
    """Checks that the teacher can read what the student writes; adds no input."""
    check_same_tokens(str(config.model.path), str(config.teacher.path), "teacher.path")
    check_reader(config, str(config.teacher.path), "teacher.path")
    return {}
