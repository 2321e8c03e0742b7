"""Rollout: prompts become groups of responses, sampled from the engine's copy of the actor weights.

If the policy streams, finished groups are emitted in chunks while the others are still being sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

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
    """Samples the responses that the task has not emitted before, and returns all of them."""
    if engine.version != (weights_version or 0):
        raise RunError(
            f"{task.stage}[{task.step}]: the engine holds weights version {engine.version}, "
            f"where the graph needs {weights_version or 0}; a sync was lost or came too early."
        )
    if talk is None:
        samples = engine.generate(not_emitted(prompts, task), sampling, seed=seed)
        return await emit_batches(prompts, samples, engine, sampling.n, sampling.max_tokens, task, sleeps)
    described = await asyncio.to_thread(talk.tools.ready, prompts, talk.max_prompt_length)
    samples = conversations(not_emitted(described, task), engine, sampling, talk, seed)
    return await emit_batches(described, samples, engine, sampling.n, talk.max_tokens, task, sleeps)


def length_metrics(responses: Batch) -> dict[str, float]:
    """Returns verl's ``response_length/mean``, ``max`` and ``min``, of the model's own tokens, and ``clip_ratio``.

    The last is the share of responses that a limit cut off.
    """
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


def token_metrics(responses: Batch, task: TaskInfo) -> dict[str, float]:
    """Returns the tokens of a step: ``perf/total_num_tokens``, as verl counts them, and ``perf/response_tokens``.

    Tools' answers are among the first, not among the second.

    Args:
        responses: of one of the step's parts.
        task: of that part.
    """
    if "attention_mask" not in responses or "response_mask" not in responses:
        return {}
    masks = {"perf/total_num_tokens": "attention_mask", "perf/response_tokens": "response_mask"}
    tokens = {name: int(responses.nonzero(mask).sum()) for name, mask in masks.items()}
    return {name: Sum(number) for name, number in tokens.items()}


def not_emitted(prompts: Batch, task: TaskInfo) -> Batch:
    """Returns the prompts whose responses the task has not emitted yet."""
    done = {group for batch in task.emitted.values() for group in batch.ids}
    return prompts.select([group for group in prompts.ids if group not in done])


async def emit_batches(
    prompts: Batch,
    samples: AsyncIterator[Sample],
    engine: RolloutEngine,
    n: int,
    length: int,
    task: TaskInfo,
    sleeps: bool = False,
) -> Batch:
    """Makes batches of samples as they arrive, emits them if the task streams, and returns all of them.

    Args:
        prompts: all prompts of the task.
        samples: of the prompts whose responses were not emitted before, in any order.
        engine: makes the batches.
        n: samples per group.
        length: tokens that responses are padded to.
        task: emits the batches, and holds those that were emitted before.
        sleeps: whether to wake the engine before sampling and let it sleep afterwards.
    """
    done: dict[int, Batch] = dict(task.emitted)
    chunks = Chunks(not_emitted(prompts, task).ids, n, task)
    compact = None
    async with _awake(engine, sleeps), _closing(samples) as coming:
        async for sample in coming:
            prompts = compact = compact or _compact(prompts)  # while the engine samples
            before = chunks.whole
            for number, whole in chunks.add(_prepared(sample, engine)):
                done[number] = engine.batch(prompts, whole, length)
                task.emit(number, done[number])
            if chunks.whole > before:
                task.level(SAMPLED, clock.now(), chunks.whole)
    return Batch.concat([done[number] for number in sorted(done)]).select(prompts.ids)


def _compact(prompts: Batch) -> Batch:
    """Returns prompts with arrays of token ids, see :meth:`Sample.compact`."""
    if "prompt_ids" not in prompts:
        return prompts
    return prompts.merge(prompts.like(prompt_ids=[np.asarray(ids, dtype=np.int32) for ids in prompts["prompt_ids"]]))


def _prepared(sample: Sample, engine: RolloutEngine) -> Sample:
    """Returns a sample ready for a batch; at the end of the rollout, nothing would hide the time that this takes."""
    if sample.text is None and isinstance(engine, Writes):
        sample = replace(sample, text=engine.text(sample.tokens))
    return sample.compact()


@contextlib.asynccontextmanager
async def _awake(engine: RolloutEngine, sleeps: bool) -> AsyncIterator[None]:
    if not sleeps:
        yield
        return
    await engine.wake()
    try:
        yield
    finally:
        await engine.sleep()


def _closing(samples: AsyncIterator[Sample]) -> Any:
    # A caller that stops early abandons the samples in flight at once, not when the generator is garbage-collected.
    return contextlib.aclosing(samples) if isinstance(samples, AsyncGenerator) else contextlib.nullcontext(samples)


class Chunks:
    """The chunks of whole groups that a task emits; their sizes differ by at most one group.

    Under ``order="index"`` the groups of each chunk are fixed, since a part is made of the chunks with its number;
    otherwise the groups that finish first make the first chunk.

    Args:
        groups: ids of the groups that are still to be sampled.
        n: samples per group.
        task: gives the number of chunks, and those emitted before.
    """

    def __init__(self, groups: Sequence[int], n: int, task: TaskInfo) -> None:
        numbers = [number for number in range(task.emits) if number not in task.emitted]
        bounds = [len(groups) * at // len(numbers) for at in range(len(numbers) + 1)] if numbers else []
        self._sizes = {number: bounds[at + 1] - bounds[at] for at, number in enumerate(numbers)}
        self._chunk_of = (
            {group: number for at, number in enumerate(numbers) for group in groups[bounds[at] : bounds[at + 1]]}
            if task.order == "index"
            else {}
        )
        self.whole = 0
        """Number of groups that have all their samples."""
        self._n = n
        self._open: dict[int, list[Sample]] = {}
        self._ready: dict[int, list[Sample]] = {number: [] for number in numbers}

    def add(self, sample: Sample) -> Iterator[tuple[int, list[Sample]]]:
        """Adds a sample; yields the number and the samples of a chunk that it completes."""
        group = self._open.setdefault(sample.group, [])
        group.append(sample)
        if len(group) < self._n:
            return
        self.whole += 1
        number = self._chunk_of.get(sample.group, next(iter(self._ready)))
        mine = self._ready[number]
        mine += self._open.pop(sample.group)
        if len(mine) == self._n * self._sizes[number]:
            del self._ready[number]
            yield number, mine
