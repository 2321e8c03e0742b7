"""The balance: which of several replicas is handed which groups, and what comes back of them.

The rule: the next group goes to the replica with the fewest samples outstanding (the first of those that have as few),
but to none that has as many as it decodes at once. The groups behind it wait here, and each sample that ends may let
the next one go. So a replica that drew short responses takes what another, with long ones, would have had, and none
is idle while a group waits. What goes to a replica at the same moment is one call; what ends at the same moment
comes back as one message.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.engines.base import Sample, Sampling
from dataflow.engines.sync_queue import FinishedSample, Job, SampleQueue
from dataflow.errors import DataflowError, RunError, UserError


@dataclass(frozen=True, eq=False)
class SamplingCall:
    """How the jobs of one call are drawn; a turn's seed is several numbers."""

    sampling: Sampling
    seed: int | tuple[int, ...]


@dataclass(eq=False)
class ReplicaHandle:
    """A replica, seen from here: its actor, its samples outstanding, and what it last said of itself."""

    name: str
    actor: Any
    outstanding: int = 0
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Hand:
    """Groups that were handed to a replica in one call: what it still owes, by group and index."""

    key: int
    replica: ReplicaHandle
    jobs: dict[tuple[int, int], Job]
    reading: asyncio.Task[None] | None = None


class Balance:
    """Hands groups to replicas and takes their samples: a :class:`~dataflow.engines.sync_queue.Backend`."""

    def __init__(self, replicas: Sequence[ReplicaHandle], most: int, queue: SampleQueue) -> None:
        self._replicas = replicas
        self._most = most
        self._queue = queue
        self._waiting: deque[list[Job]] = deque()
        self._out: dict[int, tuple[Hand, Job]] = {}  # by the job's id
        self._keys = itertools.count()
        self._cancelling: set[asyncio.Task[None]] = set()

    def start(self, jobs: Sequence[Job]) -> None:
        """See :meth:`Backend.start`."""
        groups: dict[tuple[SamplingCall, int], list[Job]] = {}
        for job in jobs:
            groups.setdefault((job.params, job.group), []).append(job)
        self._waiting.extend(groups.values())
        self._hand_out()

    def cancel(self, ids: Sequence[int]) -> None:
        """See :meth:`Backend.cancel`."""
        gone = set(ids)
        left = ([job for job in group if job.id not in gone] for group in self._waiting)
        self._waiting = deque(group for group in left if group)
        for id in ids:
            if id not in self._out:
                continue
            hand, job = self._out[id]
            self._over(hand, job)
            if not hand.jobs and hand.reading is not None:
                hand.reading.cancel()
                task = asyncio.ensure_future(self._let_go(hand))
                self._cancelling.add(task)
                task.add_done_callback(self._cancelling.discard)
        self._hand_out()

    async def settled(self) -> None:
        """Waits until the engines are rid of what was cancelled."""
        here = asyncio.get_running_loop()
        await asyncio.gather(*(task for task in self._cancelling if task.get_loop() is here))

    def close(self) -> None:
        """Hands out nothing more and reads no more answers."""
        self._waiting.clear()
        for hand in dict.fromkeys(hand for hand, _job in self._out.values()):
            if hand.reading is not None and not hand.reading.get_loop().is_closed():
                hand.reading.cancel()
        self._out.clear()

    def _hand_out(self) -> None:
        calls: dict[tuple[ReplicaHandle, SamplingCall], list[Job]] = {}
        while self._waiting:
            replica = min(self._replicas, key=lambda replica: replica.outstanding)
            if replica.outstanding >= self._most:
                break
            group = self._waiting.popleft()
            replica.outstanding += len(group)
            calls.setdefault((replica, group[0].params), []).extend(group)
        for (replica, ask), jobs in calls.items():
            hand = Hand(next(self._keys), replica, {(job.group, job.index): job for job in jobs})
            self._out |= {job.id: (hand, job) for job in jobs}
            prompts = {job.group: job.prompt for job in jobs}
            draw = replica.actor.draw.options(num_returns="streaming")
            hand.reading = asyncio.ensure_future(
                self._read(hand, draw.remote(hand.key, prompts, ask.sampling, ask.seed))
            )

    async def _read(self, hand: Hand, answers: Any) -> None:
        name = hand.replica.name
        try:
            async for answer in answers:
                samples, hand.replica.stats = await answer
                self._take(hand, samples)
            if hand.jobs:
                raise RunError(f"{name} ended without {len(hand.jobs)} of the samples that it was to draw")
        except Exception as error:
            why = reason(name, error)
            if not isinstance(why, UserError):
                self._fail(why)
                return
            for job in list(hand.jobs.values()):
                self._over(hand, job)
                self._queue.refused(job.id, why)
            self._hand_out()

    def _take(self, hand: Hand, samples: Sequence[Sample]) -> None:
        drawn = []
        for sample in samples:
            # A group of which some were cancelled is drawn as a whole: the others nobody waits for.
            if (job := hand.jobs.get((sample.group, sample.index))) is None:
                continue
            if sample.version != job.version:
                versions = f"version {sample.version} of the weights, not {job.version}"
                raise RunError(f"{hand.replica.name} drew a sample of group {job.group} with {versions}")
            self._over(hand, job)
            drawn.append(FinishedSample(job.id, list(sample.tokens), list(sample.log_probs), sample.finish, cached=0))
        self._hand_out()
        self._queue.ended(drawn)

    def _over(self, hand: Hand, job: Job) -> None:
        del hand.jobs[job.group, job.index], self._out[job.id]
        hand.replica.outstanding -= 1

    async def _let_go(self, hand: Hand) -> None:
        try:
            await hand.replica.actor.cancel.remote(hand.key)
        except Exception as error:
            self._fail(reason(hand.replica.name, error))

    def _fail(self, why: Exception) -> None:
        self._waiting.clear()
        self._queue.fail(why)


def reason(name: str, error: BaseException) -> Exception:
    """Returns what the engine raised, if that is an error for users; else one sentence with the replica's name."""
    from ray import exceptions

    inner = error.cause if isinstance(error, exceptions.RayTaskError) else error
    if isinstance(inner, DataflowError) and (not isinstance(inner, RunError) or inner is error):
        return inner
    words = (str(inner).strip().splitlines() or [""])[0]
    gone = (exceptions.RayActorError, exceptions.OutOfMemoryError, exceptions.NodeDiedError)
    if isinstance(inner, gone) and inner is error:
        return RunError(f"{name} died (killed, or out of memory); see Ray's log for its last words: {words}")
    failed = RunError(f"{name} failed ({type(inner).__name__}: {words})")
    failed.__cause__ = inner
    return failed
