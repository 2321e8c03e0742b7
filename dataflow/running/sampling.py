"""Sampling of a run: from its configuration to the rollout stages and their sampling options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dataflow.algorithms import ESTIMATORS
from dataflow.engines.base import Sampling
from dataflow.errors import ConfigError, nearest
from dataflow.stage import Read, Stage
from dataflow.stages.conversation import Talk
from dataflow.stages.reward import greedy_score
from dataflow.stages.rollout import rollout, val_rollout


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
        how["talk"] = Talk(tools, offer.max_turns, offer.max_response_tokens, config.data.max_prompt_length)
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

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`; without a model, stop tokens are left out.

    Raises:
        ConfigError: the model's tokenizer lacks a stop token.
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
            special = [name for name in vocabulary if name.startswith("<")]
            raise ConfigError(
                f"engine.stop: the tokenizer has no token '{token}'{nearest(token, special) or '.'} "
                "Give single tokens as it writes them, such as '<|im_end|>'."
            )
    return tuple(vocabulary[token] for token in stop)
