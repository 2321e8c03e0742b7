"""The worker group of a service: its actors, the tasks that run in them, and recovery when they die.

If ``Hosted.restarts`` allows it, no task is lost when a service dies. After every call to the dead service has failed
or answered, the group builds a new one, submits again the groups that the dead one had not returned yet
(:mod:`dataflow.executors.ray.replays`), and then the tasks that were running send their calls again. A call that
answered counts and is not repeated, so no group is returned twice. A task that raises by itself fails the run as usual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from loguru import logger

from dataflow.errors import DataflowError, RunError, ServiceLost
from dataflow.executors.base import Chunk, Done, Report, StageCall
from dataflow.executors.ray.actors import Actors, Membership
from dataflow.executors.ray.answers import cause, died, fetch
from dataflow.executors.ray.logs import log_lines
from dataflow.executors.ray.pickling import pickled
from dataflow.executors.ray.replays import Replays, Submission
from dataflow.graph import Hosted, Pipeline, Stage, Task, TaskId

_NAMED = 4  # tasks named in a warning; the others are counted
_FREEZES = 3  # of a service that end the run: a call that froze it is made again, and freezes it again


class WorkerGroup:
    """The actors of one service, one per rank, and the tasks that run in them.

    Args:
        spec: the service.
        threads: OMP threads in each process.
        deadline_s: seconds that building the service may take.
        on_chunk: called with each chunk that a running task emits.
        cluster: that the run has joined; None for a Ray of its own.

    Attributes:
        actors: of the current service.
        deaths: of the service so far.
        replays: tasks to submit again after a restart.
    """

    def __init__(
        self,
        spec: Hosted,
        threads: int,
        deadline_s: float,
        on_chunk: Callable[[Chunk], None],
        cluster: Membership | None = None,
    ) -> None:
        self.spec = spec
        self.deadline_s = deadline_s
        self.actors = Actors(spec, threads, cluster)
        self.deaths = 0
        self.replays = Replays(spec.name)
        self._on_chunk = on_chunk
        self._blobs: list[bytes] = []
        self._generation = 0
        self._running: dict[TaskId, asyncio.Task[Done] | None] = {}  # the latest call of each; None before the first
        self._restarting: asyncio.Task[None] | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.actors)

    @property
    def opened(self) -> bool:
        """Whether :meth:`open` was called; further stages are added by :meth:`add`."""
        return bool(self._blobs)

    def learn(self, pipeline: Pipeline) -> None:
        """Finds which stages of the pipeline have to run again after a restart."""
        if self.spec.restarts:
            self.replays.learn(pipeline)

    async def place(self) -> None:
        """Starts the actors, so that they get their GPUs before other services.

        Raises:
            RunError: they are not up in time.
        """
        await self._in_time(self.actors.place())

    async def open(self, stages: Mapping[str, Stage]) -> None:
        """Builds the service.

        Raises:
            RunError: it is not up in time, or its factory raised.
        """
        self._blobs.append(pickled(self.spec, stages))
        await self._in_time(self.actors.build(self._blobs))

    async def _in_time(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self.deadline_s):
                await work
        except Exception as error:
            self._raise_not_built(error)

    async def add(self, stages: Mapping[str, Stage]) -> None:
        """Adds stages of the service."""
        blob = pickled(self.spec, stages)
        self._blobs.append(blob)
        await self._all(lambda actor: actor.add.remote(blob))

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the service on all ranks; returns the first rank's answer."""
        answers = await self._all(lambda actor: actor.ask.remote(method, *arguments))
        return answers[0]

    def end(self) -> None:
        """Rebuilds the service no more; its calls may fail from now on."""
        self._closed = True
        if self._restarting is not None:
            self._restarting.cancel()

    # --- tasks --------------------------------------------------------------------------------------------

    async def run(self, task: Task, call: StageCall, values: Sequence[Any], now: float) -> Done:
        """Runs a task to its end, across restarts of the service.

        Args:
            task: the task.
            call: of its stage function.
            values: handles of its fields.
            now: when it was started, in seconds of :func:`dataflow.system.clock.now`.

        Raises:
            RunError: the service died more often than it may, or could not be rebuilt; or the task streams, but the
                service runs one call at a time.
        """
        if task.emits > 1 and not self.spec.concurrent:
            raise RunError(
                f"stage '{task.stage.name}' streams, but '{self.spec.name}' runs one call at a time; "
                "give Hosted(concurrent=True), or leave +stream out of the policy."
            )
        emitted: dict[int, tuple[Any, ...]] = {}
        lost = 0
        self._running[task.id] = None
        try:
            while True:
                await self._up()
                generation = self._generation
                attempt = self._running[task.id] = asyncio.ensure_future(self._attempt(task, call, values, emitted))
                try:
                    done = await attempt
                    break
                except Exception as error:
                    await self._restarted(generation, error)
                    lost += 1
        except asyncio.CancelledError:
            if len(self._running) == 1 and self._restarting is not None:
                self._restarting.cancel()  # nothing waits for it any more
            raise
        finally:
            del self._running[task.id]
        if lost:
            assert done.report is not None
            done.report.begin = min(done.report.begin, now)  # exposed waits for it count from its first start
            done.report.facts["restarted"] = lost
        return done

    async def _attempt(
        self, task: Task, call: StageCall, values: Sequence[Any], emitted: dict[int, tuple[Any, ...]]
    ) -> Done:
        """Makes one call; records its effect on the service in the step of the event loop in which it ends.

        So the record of replays is complete when all attempts have ended.
        """
        call = replace(self.replays.narrowed(task, call), emitted=tuple(emitted))
        refs: list[Any] = []
        try:
            if task.emits > 1:
                before = [value for chunk in emitted.values() for value in chunk]
                answers = self.actors.first.stream.options(num_returns="streaming").remote(call, *values, *before)
                refs = [answers]
                report, written = await self._streamed(task, answers, emitted)
            else:
                # The first rank returns the values; the others take part in collectives and only report.
                calls = [actor.run for actor in self.actors]
                first = calls[0].options(num_returns=1 + len(task.stage.writes)).remote(call, True, *values)
                answer, *handles = first if isinstance(first, list) else [first]
                refs = [answer, *(each.remote(call, False, *values) for each in calls[1:])]
                (report, *_others), written = await self.actors.outcome(refs), tuple(handles)
        except asyncio.CancelledError:
            import ray

            for ref in refs:
                ray.cancel(ref, force=False)
            raise
        log_lines(report.logged)
        if self.spec.restarts:
            submission = None if report.held is None else Submission(task, call, values, report.held)
            self.replays.ended(submission, task, report.groups)
        return Done(task.id, report, written)

    async def _streamed(
        self, task: Task, answers: Any, emitted: dict[int, tuple[Any, ...]]
    ) -> tuple[Report, tuple[Any, ...]]:
        """Waits for the end of one streaming call and passes on its chunks."""
        while True:
            found = await fetch(await anext(answers))
            values = tuple([await anext(answers) for _field in task.stage.writes])
            if isinstance(found, Report):
                return found, values
            emitted[found.id.part] = values
            self._on_chunk(replace(found, values=values))

    # --- deaths -------------------------------------------------------------------------------------------

    async def _all(self, call: Callable[[Any], Any]) -> list[Any]:
        """Calls every rank; a call that dies with the service is repeated after the restart."""
        while True:
            await self._up()
            generation = self._generation
            try:
                return await self.actors.outcome([call(actor) for actor in self.actors])
            except Exception as error:
                await self._restarted(generation, error)

    async def _restarted(self, generation: int, error: Exception) -> None:
        """Waits until the service that failed a call has been rebuilt.

        Args:
            generation: of the service that was called; each restart begins a new one.
            error: that the call raised.

        Raises:
            ServiceLost: it died with its node, and may not be rebuilt.
            Exception: ``error``, if the service did not die or may not be rebuilt.
        """
        if not died(error) or self._closed:
            raise error
        if not self.spec.restarts:
            if reason := await self.actors.death_reason(error):
                raise ServiceLost(f"'{self.spec.name}' died: {reason.rstrip('.')}") from error
            raise error
        if generation == self._generation and self._restarting is None:
            self._restarting = asyncio.create_task(self._restart(error))
        await self._up()

    async def _up(self) -> None:
        """Waits for a restart in progress."""
        restarting = self._restarting
        if restarting is None:
            return
        try:
            # Shielded, so that a cancelled waiter does not cancel the restart for the others.
            await asyncio.shield(restarting)
        except asyncio.CancelledError:
            if not restarting.cancelled():
                raise
            raise RunError(f"'{self.spec.name}' died and was not rebuilt: the run was stopped.") from None

    async def _restart(self, error: Exception) -> None:
        """Rebuilds the service, again if it dies meanwhile; the tasks that wait for it send their calls again then."""
        while True:
            reason = await self.actors.death_reason(error)
            self._count(error, reason)
            self.actors.kill()
            try:
                async with asyncio.timeout(self.deadline_s):
                    if calls := [attempt for attempt in self._running.values() if attempt is not None]:
                        await asyncio.wait(calls)
                    left = self.replays.left()
                    self._warn(left, reason)
                    await self.actors.build(self._blobs)
                    for submission in left:
                        await self._replay(submission)
                break
            except Exception as newer:
                if not died(newer):
                    self._raise_not_built(newer)
                error = newer
        self._generation += 1
        self._restarting = None

    def _count(self, error: Exception, reason: str) -> None:
        self.deaths += 1
        if self.actors.freezes >= _FREEZES:
            raise RunError(f"'{self.spec.name}' froze {self.actors.freezes} times; the last: {reason}") from error
        if self.deaths > self.spec.restarts:
            raise RunError(
                f"{self.deaths} deaths of '{self.spec.name}' with restarts={self.spec.restarts}; the last: "
                f"{reason or cause(error)}"
            ) from error

    def _warn(self, left: Sequence[Submission], reason: str) -> None:
        submitted = [f"{s.task} for {len(s.groups)} groups" if s.groups else str(s.task) for s in left]
        again = submitted + [str(i) for i in self._running]
        names = ", ".join(again[:_NAMED]) + (f" and {len(again) - _NAMED} more" if len(again) > _NAMED else "")
        logger.warning(
            "'{}' died ({}): restart {} of {}; rebuilding it{}.",
            self.spec.name,
            reason.rstrip(".") or "killed, or out of memory",
            self.deaths,
            self.spec.restarts,
            f", then running again: {names}" if again else "",
        )

    async def _replay(self, submission: Submission) -> None:
        try:
            await self._attempt(submission.task, submission.call, submission.values, {})
        except Exception as error:
            if died(error):
                raise
            why = cause(error)
            raise RunError(
                f"'{self.spec.name}' died, and {submission.task} could not run again after the restart: "
                f"{type(why).__name__}: {why}"
            ) from why

    def _raise_not_built(self, error: Exception) -> NoReturn:
        """Raises the error of a service that could not be built, with the likely cause."""
        import ray

        spec, why = self.spec, cause(error)
        if isinstance(error, TimeoutError) and not isinstance(error, ray.exceptions.RayError):
            share = " x ".join(f"{n:g}" for n in (spec.ranks, spec.devices, spec.gpus) if n != 1 or n is spec.gpus)
            gpus = f"it needs {share} GPUs: does the cluster have them ('ray status')?"
            busy = "is the machine out of memory, or busy with something else?"
            missing = self.actors.lacking() if ray.is_initialized() else ""
            hint = f"{missing}." if missing else gpus if spec.gpus else busy
            raise RunError(f"'{spec.name}' was not up after {self.deadline_s:.0f} s; {hint}") from error
        if isinstance(why, DataflowError):
            raise why from (error.__cause__ if why is error else error)  # never from itself: a lost value is its cause
        raise RunError(f"'{spec.name}' could not be built: {type(why).__name__}: {why}") from why
