"""The sample queue: samples in the order of their requests, and the pauses between them.

A weight sync, sleep and wake need moments at which nothing is in flight. Each waits in the queue until the entries
before it have finished, and later entries wait for it, so nothing starves and each sample is drawn with one version
of the weights. The queue runs on one event loop; its engine may be a thread or another process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dataflow.engines.base import Sample, Sampling
from dataflow.errors import Aborted, ServiceLost

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Job:
    """A requested sample.

    Attributes:
        group, index: of the sample.
        prompt: token ids.
        shown: what the prompt shows beside its text, in the backend's own form; None for a model of text.
        params: sampling parameters in the backend's own form.
        inbox: receives the sample, or an error in its place.
        id: of this try, given when it starts.
        version: of the weights that it is sampled with.
        ended: True once the inbox has its entry, or the job was dropped.
    """

    group: int
    index: int
    prompt: list[int]
    params: Any
    inbox: asyncio.Queue[Sample | Exception]
    shown: Any = None
    id: int = -1
    version: int = -1
    ended: bool = False


@dataclass(frozen=True, eq=False)
class SamplingCall:
    """Sampling options and seed that the jobs of one call share; the seed of a turn is a tuple."""

    sampling: Sampling
    seed: int | tuple[int, ...]


@dataclass(frozen=True)
class FinishedSample:
    """The result of a job.

    Attributes:
        id: the job's.
        tokens, log_probs, finish: as of :class:`~dataflow.engines.base.Sample`.
        cached: prompt tokens found in the prefix cache.
    """

    id: int
    tokens: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length"]
    cached: int


def jobs_of(groups: Sequence[int], prompts: Sequence[list[int]], sampling: Sampling, seed: int) -> list[Job]:
    """Returns the samples of one call, ``sampling.n`` of each prompt.

    Args:
        groups: ids of the prompts' groups.
        prompts: their token ids.
        sampling, seed: of the call.
    """
    call, inbox = SamplingCall(sampling, seed), asyncio.Queue[Sample | Exception]()
    return [
        Job(group, index, prompt, call, inbox)
        for group, prompt in zip(groups, prompts, strict=True)
        for index in range(sampling.n)
    ]


def by_group(jobs: Sequence[Job]) -> list[list[Job]]:
    """Returns jobs in groups: those of one call, by its ``params``, and of one group."""
    groups: dict[tuple[Any, int], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.params, job.group), []).append(job)
    return list(groups.values())


class Backend(Protocol):
    """Draws samples, and calls ``on_finished`` or ``on_refused`` of the queue once for each job."""

    def start(self, jobs: Sequence[Job]) -> None: ...

    def cancel(self, ids: Sequence[int]) -> None:
        """Frees the resources of these jobs; no callback follows for them."""
        ...


class VllmBackend(Backend, Protocol):
    """vLLM, in-process or as processes. Nothing is in flight while these methods run, except for ``close``."""

    async def load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Replaces the weights in place and resets the prefix cache."""
        ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    def close(self) -> bool:
        """Frees everything; True the first time."""
        ...


@dataclass(eq=False)
class _Pause:
    work: Callable[[], Awaitable[None]]
    redraw: bool
    asleep: bool | None
    done: asyncio.Future[None]
    task: asyncio.Task[None] | None = field(default=None)


def _engine_lost(cause: Exception) -> str:
    reason = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
    return f"rollout: vLLM failed ({reason}); the engine has to be rebuilt."


class SampleQueue:
    """Queued jobs, running jobs, and the pauses between them; set ``backend`` before the first use.

    Args:
        lost: returns the message for a failure: its consequence and the fix.
    """

    backend: Backend

    def __init__(self, lost: Callable[[Exception], str] = _engine_lost) -> None:
        self._story = lost
        self.version = 0
        self.asleep = False
        self.counts = {"samples": 0, "tokens": 0, "prompt_tokens": 0, "cached_tokens": 0}
        self._queue: deque[Job | _Pause] = deque()
        self._running: dict[int, Job] = {}
        self._pause: _Pause | None = None
        self._ids = itertools.count()
        self._lost: Callable[[], Exception] | None = None

    @property
    def unended(self) -> int:
        """Number of requested samples that have not finished."""
        return len(self._running) + sum(isinstance(entry, Job) for entry in self._queue)

    def put(self, jobs: Sequence[Job]) -> None:
        """Queues jobs; each ends with one entry in its inbox.

        Raises:
            RunError: the engine has failed or is closed.
        """
        self._check()
        self._queue.extend(jobs)
        self._advance()

    async def draw(self, jobs: Sequence[Job]) -> AsyncGenerator[Sample, None]:
        """Queues jobs of one inbox and yields each sample as it finishes; closing the generator drops the rest.

        Raises:
            RunError: the engine has failed or is closed.
            Exception: an error in place of a sample.
        """
        self.put(jobs)
        try:
            for _ in jobs:
                entry = await jobs[0].inbox.get()
                if isinstance(entry, Exception):
                    raise entry
                yield entry
        finally:
            self.drop(jobs)

    async def draw_one(self, job: Job) -> Sample:
        """Returns the sample of one job; see :meth:`draw`."""
        async with aclosing(self.draw([job])) as samples:
            return await anext(samples)

    def drop(self, jobs: Sequence[Job]) -> None:
        """Removes the unfinished ones of these jobs and frees their resources."""
        left = [job for job in jobs if not job.ended]
        for job in left:
            job.ended = True
        started = [job.id for job in left if self._running.pop(job.id, None) is not None]
        if len(started) < len(left):
            self._queue = deque(entry for entry in self._queue if isinstance(entry, _Pause) or not entry.ended)
        if started:
            self.backend.cancel(started)
        if left:
            self._advance()

    def abort(self) -> int:
        """Ends all jobs with :class:`Aborted`, including queued ones; returns their number."""
        jobs = self._jobs()
        self.drop(jobs)
        for job in jobs:
            job.inbox.put_nowait(Aborted("rollout: the samples in flight were aborted."))
        return len(jobs)

    async def pause(
        self, work: Callable[[], Awaitable[None]], redraw: bool = False, asleep: bool | None = None
    ) -> None:
        """Runs ``work`` once nothing is in flight; after the entries that were queued before it.

        Args:
            work: coroutine function; if it fails, so does the engine.
            redraw: cancel the jobs in flight and repeat them after the work, instead of waiting for them.
            asleep: whether jobs wait afterwards, until a later pause sets it to False; None changes nothing.

        Raises:
            RunError: the work failed, or the engine has failed before.
        """
        self._check()
        pause = _Pause(work, redraw, asleep, asyncio.get_running_loop().create_future())
        self._queue.append(pause)
        self._advance()
        try:
            await pause.done
        except asyncio.CancelledError:
            if pause in self._queue:  # a pause that has begun is completed
                self._queue.remove(pause)
                self._advance()
            raise

    def on_finished(self, samples: Sequence[FinishedSample]) -> None:
        """Delivers finished samples; those whose job is no longer in flight are ignored."""
        for one in samples:
            if (job := self._running.pop(one.id, None)) is None:
                continue
            self.counts["samples"] += 1
            self.counts["tokens"] += len(one.tokens)
            self.counts["prompt_tokens"] += len(job.prompt)
            self.counts["cached_tokens"] += one.cached
            job.ended = True
            job.inbox.put_nowait(
                Sample(job.group, job.index, one.tokens, one.log_probs, job.version, finish=one.finish)
            )
        self._advance()

    def on_refused(self, id: int, error: Exception) -> None:
        """Ends one job with an error."""
        if (job := self._running.pop(id, None)) is not None:
            job.ended = True
            job.inbox.put_nowait(error)
            self._advance()

    def fail(self, cause: Exception) -> None:
        """Ends all current and future entries with an error that has this cause."""

        def lost() -> Exception:
            error = ServiceLost(self._story(cause))
            error.__cause__ = cause
            return error

        self._end(lost)

    def close(self) -> None:
        """Ends all current and future entries with :class:`Aborted`."""
        self._end(lambda: Aborted("rollout: the engine was closed."))

    def _end(self, lost: Callable[[], Exception]) -> None:
        if self._lost is not None:
            return
        self._lost = lost
        jobs = self._jobs()
        pauses = [entry for entry in (self._pause, *self._queue) if isinstance(entry, _Pause)]
        self._running.clear()
        self._queue.clear()
        self._pause = None
        for job in jobs:
            job.ended = True
            job.inbox.put_nowait(lost())
        for pause in pauses:
            if pause.task is not None:
                pause.task.cancel()
            if not pause.done.done():
                pause.done.set_exception(lost())

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost()

    def _jobs(self) -> list[Job]:
        return [*self._running.values(), *(entry for entry in self._queue if isinstance(entry, Job))]

    def _advance(self) -> None:
        """Starts the entries at the head of the queue that may run now."""
        starting: list[Job] = []
        while self._queue and self._pause is None:
            entry = self._queue[0]
            if isinstance(entry, Job) and self.asleep:
                # Only a pause can wake the engine, so the first one overtakes the jobs.
                pause = next((entry for entry in self._queue if isinstance(entry, _Pause)), None)
                if pause is None:
                    break
                self._queue.remove(pause)
                self._queue.appendleft(pause)
            elif isinstance(entry, Job):
                entry.id, entry.version = next(self._ids), self.version
                starting.append(entry)
                self._queue.popleft()
            elif starting or self._running:
                if not entry.redraw:
                    break
                self._redraw(entry, starting)
                starting = []
            else:
                self._queue.popleft()
                self._pause = entry
                entry.task = asyncio.get_running_loop().create_task(self._do(entry))
        if starting:
            self._running |= {job.id: job for job in starting}
            try:
                self.backend.start(starting)
            except Exception as error:
                self.fail(error)

    def _redraw(self, pause: _Pause, starting: Sequence[Job]) -> None:
        """Puts the jobs in flight, and those about to start, right after the pause at the head of the queue."""
        jobs = [*self._running.values(), *starting]
        self.backend.cancel(list(self._running))
        self._running.clear()
        self._queue.popleft()
        self._queue.extendleft(reversed([pause, *jobs]))

    async def _do(self, pause: _Pause) -> None:
        try:
            await pause.work()
        except Exception as error:
            self.fail(error)
            return
        self._pause = None
        if pause.asleep is not None:
            self.asleep = pause.asleep
        with suppress(asyncio.InvalidStateError):  # the caller was cancelled
            pause.done.set_result(None)
        self._advance()
