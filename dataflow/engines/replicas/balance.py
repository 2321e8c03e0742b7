"""Balances groups over replicas of an engine and collects their samples.

The next group goes to the replica with the fewest outstanding samples (the first one among equals), unless it already
has as many as it decodes at once. Further groups wait here; each finished sample may start the next one. So replicas
with short responses take over work from those with long ones, and none is idle while a group waits. Groups that go to
a replica at the same moment share one call; samples that finish at the same moment share one message.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.engines.base import Sample
from dataflow.engines.sync_queue import FinishedSample, Job, SampleQueue, SamplingCall, by_group
from dataflow.errors import DataflowError, RunError, UserError


@dataclass(eq=False)
class ReplicaHandle:
    """A replica as seen by the balance: its actor, its outstanding samples, and its latest stats."""

    name: str
    actor: Any
    outstanding: int = 0
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Dispatch:
    """Groups sent to a replica in one call; ``jobs`` are the outstanding ones, by group and index."""

    key: int
    replica: ReplicaHandle
    jobs: dict[tuple[int, int], Job]
    reading: asyncio.Task[None] | None = None


class Balance:
    """Sends groups to replicas and collects their samples: a :class:`~dataflow.engines.sync_queue.Backend`."""

    def __init__(self, replicas: Sequence[ReplicaHandle], most: int, queue: SampleQueue) -> None:
        self._replicas = replicas
        self._most = most
        self._queue = queue
        self._waiting: deque[list[Job]] = deque()
        self._sent: dict[int, tuple[Dispatch, Job]] = {}  # by the job's id
        self._keys = itertools.count()
        self._cancelling: set[asyncio.Task[None]] = set()

    def start(self, jobs: Sequence[Job]) -> None:
        """See :meth:`Backend.start`."""
        self._waiting.extend(by_group(jobs))
        self._send()

    def cancel(self, ids: Sequence[int]) -> None:
        """See :meth:`Backend.cancel`."""
        gone = set(ids)
        left = ([job for job in group if job.id not in gone] for group in self._waiting)
        self._waiting = deque(group for group in left if group)
        for id in ids:
            if id not in self._sent:
                continue
            dispatch, job = self._sent[id]
            self._remove(dispatch, job)
            if not dispatch.jobs and dispatch.reading is not None:
                dispatch.reading.cancel()
                task = asyncio.ensure_future(self._cancel(dispatch))
                self._cancelling.add(task)
                task.add_done_callback(self._cancelling.discard)
        self._send()

    async def settled(self) -> None:
        """Waits until the engines have freed all cancelled samples."""
        here = asyncio.get_running_loop()
        await asyncio.gather(*(task for task in self._cancelling if task.get_loop() is here))

    def close(self) -> None:
        """Stops sending groups and reading answers."""
        self._waiting.clear()
        for dispatch in dict.fromkeys(dispatch for dispatch, _job in self._sent.values()):
            if dispatch.reading is not None and not dispatch.reading.get_loop().is_closed():
                dispatch.reading.cancel()
        self._sent.clear()

    def _send(self) -> None:
        calls: dict[tuple[ReplicaHandle, SamplingCall], list[Job]] = {}
        while self._waiting:
            replica = min(self._replicas, key=lambda replica: replica.outstanding)
            if replica.outstanding >= self._most:
                break
            group = self._waiting.popleft()
            replica.outstanding += len(group)
            calls.setdefault((replica, group[0].params), []).extend(group)
        for (replica, call), jobs in calls.items():
            dispatch = Dispatch(next(self._keys), replica, {(job.group, job.index): job for job in jobs})
            self._sent |= {job.id: (dispatch, job) for job in jobs}
            prompts = {job.group: job.prompt for job in jobs}
            draw = replica.actor.draw.options(num_returns="streaming")
            dispatch.reading = asyncio.ensure_future(
                self._read(dispatch, draw.remote(dispatch.key, prompts, call.sampling, call.seed))
            )

    async def _read(self, dispatch: Dispatch, answers: Any) -> None:
        name = dispatch.replica.name
        try:
            async for answer in answers:
                samples, dispatch.replica.stats = await answer
                self._take(dispatch, samples)
            if dispatch.jobs:
                raise RunError(f"{name} ended without {len(dispatch.jobs)} of its samples")
        except Exception as error:
            why = reason(name, error)
            if not isinstance(why, UserError):
                self._fail(why)
                return
            for job in list(dispatch.jobs.values()):
                self._remove(dispatch, job)
                self._queue.on_refused(job.id, why)
            self._send()

    def _take(self, dispatch: Dispatch, samples: Sequence[Sample]) -> None:
        finished = []
        for sample in samples:
            # A partly cancelled group is still sampled as a whole; the cancelled samples are ignored.
            if (job := dispatch.jobs.get((sample.group, sample.index))) is None:
                continue
            if sample.version != job.version:
                versions = f"version {sample.version} of the weights, not {job.version}"
                raise RunError(f"{dispatch.replica.name} sampled group {job.group} with {versions}")
            self._remove(dispatch, job)
            finished.append(
                FinishedSample(job.id, list(sample.tokens), list(sample.log_probs), sample.finish, cached=0)
            )
        self._send()
        self._queue.on_finished(finished)

    def _remove(self, dispatch: Dispatch, job: Job) -> None:
        del dispatch.jobs[job.group, job.index], self._sent[job.id]
        dispatch.replica.outstanding -= 1

    async def _cancel(self, dispatch: Dispatch) -> None:
        try:
            await dispatch.replica.actor.cancel.remote(dispatch.key)
        except Exception as error:
            self._fail(reason(dispatch.replica.name, error))

    def _fail(self, why: Exception) -> None:
        self._waiting.clear()
        self._queue.fail(why)


def reason(name: str, error: BaseException) -> Exception:
    """Returns the engine's own error if it is one for users, else one sentence that names the replica."""
    from ray import exceptions

    inner = error.cause if isinstance(error, exceptions.RayTaskError) else error
    if isinstance(inner, DataflowError) and (not isinstance(inner, RunError) or inner is error):
        return inner
    first_line = (str(inner).strip().splitlines() or [""])[0]
    gone = (exceptions.RayActorError, exceptions.OutOfMemoryError, exceptions.NodeDiedError)
    if isinstance(inner, gone) and inner is error:
        return RunError(f"{name} died (killed, or out of memory); see Ray's log for its last output: {first_line}")
    failed = RunError(f"{name} failed ({type(inner).__name__}: {first_line})")
    failed.__cause__ = inner
    return failed
