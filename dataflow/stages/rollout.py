"""Rollout: prompts become groups of responses, sampled from the engine's copy of the actor weights.

If the policy streams, finished groups are emitted in chunks while the others are still being sampled.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Annotated

import numpy as np

from dataflow.batch import Batch
from dataflow.engines.base import RolloutEngine, Sample, Sampling, Writes
from dataflow.errors import RunError
from dataflow.graph import Carried, TaskInfo, stage
from dataflow.metrics import Provisional, Sum
from dataflow.stage import SAMPLED
from dataflow.stages.conversation import Talk, conversations, turn_metrics
from dataflow.system import clock

CLIP_RATIO = "response_length/clip_ratio"
# Validation draws from random streams that no training step uses.
VALIDATION_SEED = 1 << 40


@stage(writes="responses", on="gpu", role="samples", streams=True)
async def rollout(
    prompts: Batch,
    weights_version: Annotated[int | None, Carried],
    *,
    engine: RolloutEngine,
    sampling: Sampling,
    seed: int,
    talk: Talk | None = None,
    sleeps: bool = False,
    task: TaskInfo,
) -> Batch:
    """Samples ``sampling.n`` responses per prompt with the weights the policy allows.

    Args:
        prompts: a row per prompt (``prompt_ids`` and what the reward needs; for conversations ``raw_prompt``, too).
        weights_version: of the weights that the engine must hold; None before the first sync.
        engine: holds the weights.
        sampling: how to draw.
        seed: of the run; each sample has a random stream of its own, derived from the seed, the step, the group and
            its index in the group.
        talk: makes each response a conversation with tools; None for one turn.
        sleeps: whether the engine frees its GPU memory while it does not sample.
        task: gives the step, and takes the metrics of lengths, staleness and turns.

    Returns:
        What :meth:`RolloutEngine.batch` returns, padded to the longest response, with the facts of
        :func:`~dataflow.stages.conversation.conversations`.

    Raises:
        RunError: the engine holds another version.
        DataError: a prompt with its tools is too long, or its ``tools_kwargs`` do not fit them.
    """
    drawn = (seed << 20) + task.step
    responses = await _sampled(prompts, weights_version, drawn, engine, sampling, talk, sleeps, task)
    task.log({"staleness/rollout": float(task.step - 1 - responses.meta["weights_version"])})
    task.log({name: Provisional(value) for name, value in length_metrics(responses).items()})
    if talk is not None:
        task.log(turn_metrics(responses))
    return responses


@stage(writes="val_responses", on="gpu", role="validates")
async def val_rollout(
    val_prompts: Batch,
    weights_version: int | None,
    *,
    engine: RolloutEngine,
    sampling: Sampling,
    seed: int,
    talk: Talk | None = None,
    sleeps: bool = False,
    task: TaskInfo,
) -> Batch:
    """Answers the held-out prompts with the weights of this step; see :func:`rollout`."""
    return await _sampled(val_prompts, weights_version, VALIDATION_SEED + seed, engine, sampling, talk, sleeps, task)


async def _sampled(
    prompts: Batch,
    weights_version: int | None,
    seed: int,
    engine: RolloutEngine,
    sampling: Sampling,
    talk: Talk | None,
    sleeps: bool,
    task: TaskInfo,
) -> Batch:
    """Samples the responses that the task has not emitted before, emits them in chunks if it streams; returns all."""
    if engine.version != (weights_version or 0):
        raise RunError(
            f"{task.stage}[{task.step}]: the engine holds weights version {engine.version}, "
            f"where the graph needs {weights_version or 0}; a sync was lost or came too early."
        )
    done: dict[int, Batch] = dict(task.emitted)
    emitted = {group for batch in done.values() for group in batch.ids}
    length = sampling.max_tokens
    if talk is not None:
        await asyncio.to_thread(talk.tools.check_rows, prompts)
        length = talk.max_tokens
    left = prompts.select([group for group in prompts.ids if group not in emitted])
    if "prompt_ids" in prompts:  # arrays, see Sample.compact
        prompts = prompts.merge(prompts.like(prompt_ids=[np.asarray(i, np.int32) for i in prompts["prompt_ids"]]))
    # The chunks that are left, whose sizes differ by at most one group. Under order="index" the groups of each are
    # fixed, since a part is made of the chunks with its number; otherwise those that finish first make the first one.
    numbers = [number for number in range(task.emits) if number not in done]
    bounds = [len(left.ids) * at // max(1, len(numbers)) for at in range(len(numbers) + 1)]
    planned = {number: left.ids[bounds[at] : bounds[at + 1]] for at, number in enumerate(numbers)}
    chunks: dict[int, list[Sample]] = {number: [] for number in numbers}
    groups: dict[int, list[Sample]] = {group: [] for group in left.ids}
    finished = 0
    async with AsyncExitStack() as stack:
        if sleeps:
            await engine.wake()
            stack.push_async_callback(engine.sleep)
        if talk is None:
            samples = engine.generate(left, sampling, seed=seed)
        else:
            samples = conversations(left, engine, sampling, talk, seed)
        # A caller that stops early abandons the samples in flight at once, not when the generator is collected.
        await stack.enter_async_context(aclosing(samples))
        async for sample in samples:
            if sample.text is None and isinstance(engine, Writes):  # now: at the end, nothing would hide its time
                sample = replace(sample, text=engine.text(sample.tokens))
            group = groups[sample.group]
            group.append(sample.compact())
            if len(group) < sampling.n:
                continue
            finished += 1
            number = next(n for n in chunks if task.order != "index" or sample.group in planned[n])
            chunks[number] += group
            if len(chunks[number]) == sampling.n * len(planned[number]):
                done[number] = engine.batch(prompts, chunks.pop(number), length)
                task.emit(number, done[number])
            task.level(SAMPLED, clock.now(), finished)
    return Batch.concat([done[number] for number in sorted(done)]).select(prompts.ids)


def length_metrics(responses: Batch) -> dict[str, float]:
    """Returns verl's ``response_length/*`` of the model's own tokens; ``clip_ratio`` is the share that was cut off."""
    if "response_mask" not in responses:
        return {}
    lengths = responses.nonzero("response_mask")
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        CLIP_RATIO: float(cut_off(responses).mean()),
    }


def cut_off(responses: Batch) -> np.ndarray:
    """Returns which responses were cut off by a limit, bool ``[rows]``.

    Those of a rollout that gives no ``finish_reason`` count as cut off if they are as long as the longest possible.
    """
    if "finish_reason" in responses:
        return np.array([reason == "length" for reason in responses["finish_reason"]])
    room = responses.shape("response_mask")[1]
    return np.asarray(responses.nonzero("attention_mask", room) == room)


def token_metrics(responses: Batch) -> dict[str, float]:
    """Returns ``perf/total_num_tokens``, as verl counts them, and ``perf/response_tokens``, without tools' answers."""
    if "attention_mask" not in responses or "response_mask" not in responses:
        return {}
    masks = {"perf/total_num_tokens": "attention_mask", "perf/response_tokens": "response_mask"}
    return {name: Sum(int(responses.nonzero(mask).sum())) for name, mask in masks.items()}
