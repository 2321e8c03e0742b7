"""What recipes share besides their graphs: the actor's update, evaluations, files of samples, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dataflow.config.reward import asked_of, model_of, sources_of
from dataflow.errors import ConfigError
from dataflow.graph import Pipeline
from dataflow.rewards.models.server import Sleeper
from dataflow.running.saving.checkpoints import checkpoint_store
from dataflow.stage import Hosted, Stage
from dataflow.stages.checkpoint import checkpoint_stages
from dataflow.stages.log_prob import bypassing
from dataflow.stages.update import actor_update


def actor_stage(config: Any, *, trainer: Hosted, on: str, **options: Any) -> Stage:
    """Returns ``actor_update``, bound to the trainer and to the run's groups and epochs.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
        trainer: the hosted trainer.
        on: its resource.
        options: further options of :func:`~dataflow.stages.update.actor_update`, such as ``warmup``.
    """
    update = bypassing(actor_update) if config.algorithm.bypass_mode else actor_update
    return update.bind(
        on=on,
        trainer=trainer,
        groups=config.data.prompts,
        epochs=config.trainer.epochs,
        epochs_over=config.trainer.epochs_over,
        max_skipped=config.trainer.max_skipped,
        **options,
    )


def recipe_pipeline(
    config: Any,
    stages: Sequence[Stage],
    *,
    validation: Sequence[Stage] = (),
    samples: Sequence[Stage] = (),
    resources: Mapping[str, int | None],
) -> Pipeline:
    """Returns the pipeline of these stages, with what a run has besides: evaluations, files of samples, checkpoints.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
        stages: of a training step; those with the role ``trains`` name the services that checkpoints hold.
        validation: the stages that sample and score ``val_prompts``; left out with ``val.every=0``, and otherwise run
            every ``val.every`` steps.
        samples: the stages that write samples (:func:`~dataflow.stages.samples.sample_stages`).
        resources: slots of each resource; None for no limit.

    Raises:
        PipelineError: the stages form no valid graph, or checkpoints are on and no stage trains a hosted service.
    """
    whole, inputs = list(stages), ["prompts"]
    if config.val.every and validation:
        whole += [each.bind(every=config.val.every) for each in validation]
        inputs.append("val_prompts")
    whole = colocated(config, whole + list(samples))
    if every := config.checkpoint.every:
        whole += checkpoint_stages(whole, every=every, store=checkpoint_store(config), steps=config.steps)
    return Pipeline(whole, inputs, resources)


def colocated(config: Any, stages: Sequence[Stage]) -> list[Stage]:
    """Returns the stages of a run, with those that ask reward models on the GPUs of trainer and engine on these GPUs.

    Such a stage wakes the model, waits until all its requests have ended, and lets the model sleep again; meanwhile
    nothing else runs on the GPUs.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
        stages: of the pipeline, validation included.

    Raises:
        ConfigError: nothing samples, or a stage asks for rewards in another way.
    """
    models, found = config.reward.models, list(stages)
    asleep = {
        source.name: name
        for source in sources_of(config)
        if (name := model_of(config, source) or asked_of(config, source)) in models
        and models[name].placement == "colocated"
    }
    pool = next((s.on for s in stages if s.role == "samples"), None)
    for at, s in enumerate(stages):
        if s.host is None or (name := asleep.get(s.host.name)) is None or s.role == "collects":
            continue
        key = f"reward.models.{name}.placement=colocated"
        if pool is None:
            raise ConfigError(
                f"{key}: this pipeline has no rollout whose GPUs the model could share; give placement=own."
            )
        if s.role not in ("requests", "validates"):
            raise ConfigError(f"{key}: stage '{s.name}' asks for rewards while the model sleeps; give placement=own.")
        model = models[name]
        sleeper = Sleeper(f"reward model '{name}'", model.each_server, model.start_timeout)
        found[at] = replace(s.bind(on=pool, sleeper=sleeper), per="step")
    return found
