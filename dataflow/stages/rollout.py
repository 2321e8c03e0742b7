"""Rollout: prompts become groups of responses, sampled from the engine's copy of the actor weights.

Where the policy streams, groups are handed on in sets while the others are still being sampled.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

from dataflow.batch import Batch
from dataflow.engines.base import RolloutEngine, Sample, Sampling
from dataflow.errors import RunError
from dataflow.graph import Carried, TaskInfo, stage
from dataflow.stage import SAMPLED
from dataflow.system import clock

# Validation draws from streams of its own, whatever the step.
VALIDATION_SEED = 1 << 40


@stage(writes="responses", on="gpu", role="samples", streams=True)
async def rollout(
    prompts: Batch,
    weights: Carried,
    *,
    engine: RolloutEngine,
    sampling: Sampling,
    seed: int,
    sleeps: bool = False,
    task: TaskInfo,
) -> Batch:
    """Samples ``sampling.n`` responses per prompt with the weights the policy allows.

    Args:
        prompts: a row per prompt (``prompt_ids`` and what the reward needs).
        weights: version of the weights that the engine was last given; None before the first sync.
        engine: holds the weights.
        sampling: how to draw.
        seed: of the run; a sample's own stream follows from it, the step, the group and its place in the group.
        sleeps: the engine gives its memory back to whoever shares the GPU while it does not sample.
        task: which step this is.

    Returns:
        What :meth:`RolloutEngine.batch` returns, padded to ``sampling.max_tokens``.

    Raises:
        RunError: the engine holds another version than the graph says.
    """
    check_version(engine, weights, task)
    left = not_handed(prompts, task)
    samples = engine.generate(left, sampling, seed=(seed << 20) + task.step)
    responses = await handed_on(prompts, samples, engine, sampling.n, sampling.max_tokens, task, sleeps)
    task.log({"staleness/rollout": float(task.step - 1 - responses.meta["weights_version"])})
    task.log(length_metrics(responses))
    return responses


@stage(writes="val_responses", on="gpu", role="validates")
async def val_rollout(
    val_prompts: Batch,
    weights: Any,
    *,
    engine: RolloutEngine,
    sampling: Sampling,
    seed: int,
    sleeps: bool = False,
    task: TaskInfo,
) -> Batch:
    """Answers the held-out prompts with the weights of this step."""
    check_version(engine, weights, task)
    samples = engine.generate(val_prompts, sampling, seed=VALIDATION_SEED + seed)
    return await handed_on(val_prompts, samples, engine, sampling.n, sampling.max_tokens, task, sleeps)


def check_version(engine: RolloutEngine, weights: Any, task: TaskInfo) -> None:
    """Fails unless the engine holds the weights that the graph says it does."""
    if engine.version != (weights or 0):
        raise RunError(
            f"{task.stage}[{task.step}]: the engine holds weights version {engine.version}, "
            f"the graph says {weights or 0}; a sync was lost or came too early."
        )


def length_metrics(responses: Batch) -> dict[str, float]:
    """Returns verl's ``response_length/mean``, ``max``, ``min`` and ``clip_ratio``, the share that fills its space."""
    if "response_mask" not in responses:
        return {}
    room = responses["response_mask"].shape[1]
    lengths = responses["attention_mask"][:, -room:].sum(dim=1).float()
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float((lengths == room).float().mean()),
    }


def not_handed(prompts: Batch, task: TaskInfo) -> Batch:
    """Returns the prompts whose responses the task has not handed on yet."""
    done = {group for batch in task.handed.values() for group in batch.ids}
    return prompts.select([group for group in prompts.ids if group not in done])


async def handed_on(
    prompts: Batch,
    samples: AsyncIterator[Sample],
    engine: RolloutEngine,
    n: int,
    length: int,
    task: TaskInfo,
    sleeps: bool = False,
) -> Batch:
    """Makes batches of samples as they come, hands them on if the task streams, and returns all of them.

    Args:
        prompts: all of the task's.
        samples: of those prompts whose responses were not handed on before, in any order.
        engine: makes the batches.
        n: samples of a group.
        length: tokens that responses are padded to.
        task: what it is to hand on, and has.
        sleeps: whether the engine sleeps before and after.
    """
    done: dict[int, Batch] = dict(task.handed)
    sets = Sets(not_handed(prompts, task).ids, n, task)
    async with _awake(engine, sleeps), _closing(samples) as coming:
        async for sample in coming:
            before = sets.whole
            for number, whole in sets.add(sample):
                done[number] = engine.batch(prompts, whole, length)
                task.emit(number, done[number])
            if sets.whole > before:
                task.level(SAMPLED, clock.now(), sets.whole)
    return Batch.concat([done[number] for number in sorted(done)]).select(prompts.ids)


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
    # Who stops in the middle gives up the samples in flight, at once and not when the garbage is collected.
    return contextlib.aclosing(samples) if isinstance(samples, AsyncGenerator) else contextlib.nullcontext(samples)


class Sets:
    """The sets of whole groups that a task hands on: as evenly many groups in each as can be.

    Under ``order="index"`` each set is fixed, since a part is made of the sets of its number; else the groups that end
    first make the first set.

    Args:
        groups: to come.
        n: samples of each.
        task: which sets are to be, and which were handed on before.
    """

    def __init__(self, groups: Sequence[int], n: int, task: TaskInfo) -> None:
        numbers = [number for number in range(task.emits) if number not in task.handed]
        bounds = [len(groups) * at // len(numbers) for at in range(len(numbers) + 1)] if numbers else []
        self._sizes = {number: bounds[at + 1] - bounds[at] for at, number in enumerate(numbers)}
        self._set_of = (
            {group: number for at, number in enumerate(numbers) for group in groups[bounds[at] : bounds[at + 1]]}
            if task.order == "index"
            else {}
        )
        self.whole = 0
        """Groups that have all their samples."""
        self._n = n
        self._open: dict[int, list[Sample]] = {}
        self._ready: dict[int, list[Sample]] = {number: [] for number in numbers}

    def add(self, sample: Sample) -> Iterator[tuple[int, list[Sample]]]:
        """Takes a sample; yields number and samples of a set that is whole with it."""
        group = self._open.setdefault(sample.group, [])
        group.append(sample)
        if len(group) < self._n:
            return
        self.whole += 1
        number = self._set_of.get(sample.group, next(iter(self._ready)))
        mine = self._ready[number]
        mine += self._open.pop(sample.group)
        if len(mine) == self._n * self._sizes[number]:
            del self._ready[number]
            yield number, mine
