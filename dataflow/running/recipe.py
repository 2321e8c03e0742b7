"""What recipes share besides their graphs: sampling, the actor's update, evaluations, files of samples, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dataflow.algorithms import ESTIMATORS
from dataflow.config.reward import asked_of, model_of, sources_of
from dataflow.engines.base import Sampling
from dataflow.errors import ConfigError
from dataflow.graph import Pipeline
from dataflow.rewards.models.server import Sleeper
from dataflow.running.saving.checkpoints import checkpoint_store
from dataflow.stage import Hosted, Read, Stage
from dataflow.stages.checkpoint import checkpoint_stages
from dataflow.stages.conversation import Talk
from dataflow.stages.log_prob import bypassing
from dataflow.stages.reward import greedy_score
from dataflow.stages.rollout import rollout, val_rollout
from dataflow.stages.update import actor_update


def rollout_stages(config: Any) -> tuple[Stage, Stage]:
    """Returns ``rollout`` and ``val_rollout``, to be bound to an engine; conversations if the run offers tools.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.

    Raises:
        ConfigError: a stop token or a tool does not exist.
    """
    sampling, held_out = sampling_of(config)
    offer = config.tools
    # Sleeping takes time, and is only useful if the trainer uses the same GPU.
    shared = config.placement == "colocated" and config.ray.gpus_per_worker > 0
    how = {"seed": config.seed, "sleeps": shared}
    if offer.offered:
        from dataflow.tools import toolbox_of

        tools = toolbox_of(config).check()
        how["talk"] = Talk(tools, offer.max_turns, offer.max_response_tokens)
    return rollout.bind(sampling=sampling, **how), val_rollout.bind(sampling=held_out, **how)


def greedy_stages(config: Any, val_respond: Stage, *, engine: Any, agent: Any, on: str) -> list[Stage]:
    """Returns the stages that sample a greedy response to each prompt and score it, if the estimator needs that.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
        val_respond: the stage that samples a validation, as of :func:`rollout_stages`.
        engine: the hosted engine.
        agent: the hosted reward agent.
        on: resource of the engine.
    """
    if "reward_baselines" not in ESTIMATORS[config.algorithm.adv_estimator].needs:
        return []
    sampling, _ = sampling_of(config)
    greedy = val_respond.bind(
        name="greedy_rollout", on=on, engine=engine, sampling=replace(sampling, n=1, temperature=0.0)
    )
    # The weights are those of the responses that it is compared with, not this step's.
    reads = (Read("prompts"), Read("weights_version", "carried"))
    respond = replace(greedy, role=None, reads=reads, writes=("greedy_responses",))
    return [respond, greedy_score.bind(agent=agent)]


def sampling_of(config: Any) -> tuple[Sampling, Sampling]:
    """Returns the sampling options of training, and those of the held-out problems.

    ``config`` is a :class:`~dataflow.config.run.RunConfig`; without a model, stop tokens are left out.
    """
    draw = config.engine
    sampling = Sampling(
        n=draw.n,
        temperature=draw.temperature,
        top_p=draw.top_p,
        top_k=draw.top_k,
        max_tokens=draw.max_tokens,
        stop_token_ids=_stop_ids(config.model.path, draw.stop),
    )
    own = {name: getattr(config.val, name) for name in ("n", "temperature", "top_p", "top_k")}
    return sampling, Sampling(max_tokens=draw.max_tokens, stop_token_ids=sampling.stop_token_ids, **own)


def _stop_ids(model: str | None, stop: Sequence[str]) -> tuple[int, ...]:
    if not stop or model is None:
        return ()
    from dataflow.models.tokenizer import load_chat_tokenizer

    vocabulary = load_chat_tokenizer(model).get_vocab()
    for token in stop:
        if token not in vocabulary:
            raise ConfigError(
                f"engine.stop: the tokenizer has no token '{token}'; give single tokens as it writes them, such as "
                "'<|im_end|>'."
            )
    return tuple(vocabulary[token] for token in stop)


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
    nothing else runs on the GPUs. ``stages`` are all of the pipeline, validation included.
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
