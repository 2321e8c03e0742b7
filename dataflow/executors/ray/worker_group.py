"""The worker group of a service: the tasks that run in its actors, and recovery when they die.

If ``Hosted.restarts`` allows it, no task is lost when a service dies. After every call to the dead service has failed
or answered, the group builds a new one, submits again the groups that the dead one had not returned yet
(:mod:`dataflow.executors.ray.replays`), and then the tasks that were running send their calls again. A call that
answered counts and is not repeated, so no group is returned twice. A task that raises by itself fails the run as usual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from loguru import logger

from dataflow.errors import DataflowError, RunError, ServiceLost
from dataflow.executors.base import Chunk, Done, Report, StageCall
from dataflow.executors.ray.actors import Actors
from dataflow.executors.ray.answers import cause, died, first_failure
from dataflow.executors.ray.host import log_lines
from dataflow.executors.ray.nodes import Cluster
from dataflow.executors.ray.replays import Replays, Submission
from dataflow.graph import Hosted, Pipeline, Stage, Task
from dataflow.usercode.pickling import dumps

T = TypeVar("T")
_FREEZES = 3  # of a service that end the run: a call that froze it is made again, and freezes it again


class WorkerGroup:
    """The tasks of one service; building it, once or again, may take ``deadline_s``."""

    def __init__(
        self,
        spec: Hosted,
        threads: int,
        deadline_s: float,
        on_chunk: Callable[[Chunk], None],
        cluster: Cluster | None = None,
    ) -> None:
        self.spec, self.deadline_s = spec, deadline_s
        self.actors = Actors(spec, threads, cluster)
        self.stages: dict[str, Stage] = {}
        self.deaths = 0
        self.replays = Replays(spec.name)
        self._on_chunk = on_chunk
        self.built = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._restarting: asyncio.Task[None] | None = None
        self._closed = False

    def learn(self, pipeline: Pipeline) -> None:
        """Finds which stages of the pipeline have to run again after a restart."""
        if self.spec.restarts:
            self.replays.learn(pipeline)

    async def place(self) -> None:
        """Starts the actors, so that they get their GPUs before other services."""
        await self._in_time(self.actors.place())

    async def open(self, stages: Mapping[str, Stage]) -> None:
        """Builds the service with these stages, or adds them to those that it has."""
        self.stages |= stages
        if self.built:
            blob = dumps(dict(stages))
            await self._all(lambda actor: actor.add.remote(blob))
        else:
            await self._in_time(self._build())
            self.built = True

    def preload(self) -> None:
        """Lets the actors import what their stages need later; nothing waits for it."""
        for actor in self.actors.handles:
            actor.preload.remote()

    async def _build(self) -> None:
        await self.actors.build(dumps((self.spec, self.stages)))

    async def _in_time(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self.deadline_s):
                await work
        except Exception as error:
            self._raise_not_built(error)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the service on all ranks; returns the first rank's answer."""
        return (await self._all(lambda actor: actor.ask.remote(method, *arguments)))[0]

    async def _all(self, call: Callable[[Any], Any]) -> list[Any]:
        async def attempt() -> list[Any]:
            return await first_failure([call(actor) for actor in self.actors.handles])

        answers, _deaths = await self._until_answered(attempt)
        return answers

    def end(self) -> None:
        """Rebuilds the service no more; its calls may fail from now on."""
        self._closed = True
        if self._restarting is not None:
            self._restarting.cancel()

    # --- tasks --------------------------------------------------------------------------------------------

    async def run(self, task: Task, call: StageCall, values: Sequence[Any], now: float) -> Done:
        """Runs a task, started at ``now``, to its end, across restarts of the service."""
        if task.emits > 1 and not self.spec.concurrent:
            raise RunError(
                f"stage '{task.stage.name}' streams, but '{self.spec.name}' runs one call at a time; "
                "give Hosted(concurrent=True), or leave +stream out of the policy."
            )
        emitted: dict[int, tuple[Any, ...]] = {}
        done, deaths = await self._until_answered(lambda: self._attempt(task, call, values, emitted))
        if deaths:
            assert done.report is not None
            done.report.begin = min(done.report.begin, now)  # exposed waits for it count from its first start
            done.report.facts["restarted"] = deaths
        return done

    async def _attempt(
        self, task: Task, call: StageCall, values: Sequence[Any], emitted: dict[int, tuple[Any, ...]]
    ) -> Done:
        """Makes one call; records its effect on the service in the step of the event loop in which it ends.

        So the record of replays is complete when all attempts have ended.
        """
        call = replace(self.replays.narrowed(task, call), emitted=tuple(emitted))
        first, *others = self.actors.handles
        refs: list[Any] = []
        try:
            if task.emits > 1:
                before = [value for chunk in emitted.values() for value in chunk]
                answers = first.stream.options(num_returns="streaming").remote(call, *values, *before)
                refs = [answers]
                report, written = await self._streamed(task, answers, emitted)
            else:
                # The first rank returns the values; the others take part in collectives and only report.
                made = first.run.options(num_returns=1 + len(task.stage.writes)).remote(call, True, *values)
                answer, *handles = made if isinstance(made, list) else [made]
                refs = [answer, *(actor.run.remote(call, False, *values) for actor in others)]
                (report, *_others), written = await first_failure(refs), tuple(handles)
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
            found = await (await anext(answers))
            values = tuple([await anext(answers) for _field in task.stage.writes])
            if isinstance(found, Report):
                return found, values
            emitted[found.id.part] = values
            self._on_chunk(replace(found, values=values))

    # --- deaths -------------------------------------------------------------------------------------------

    async def _until_answered(self, attempt: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, int]:
        """Makes a call, and again after each restart of the service; returns its answer, and the number of restarts."""
        deaths = 0
        while True:
            await self._up()
            began = self.deaths
            call = asyncio.create_task(attempt())
            self._calls.add(call)
            try:
                return await call, deaths
            except Exception as error:
                if not died(error) or self._closed:
                    raise
                if not self.spec.restarts:
                    why = self.actors.death_reason()
                    raise (ServiceLost(f"'{self.spec.name}' died: {why}") if why else cause(error)) from error
                if began == self.deaths and self._restarting is None:  # else it was rebuilt since then
                    self._restarting = asyncio.create_task(self._restart(error))
                deaths += 1
            finally:
                self._calls.discard(call)

    async def _up(self) -> None:
        """Waits for a restart in progress."""
        if self._restarting is not None:
            # Shielded, so that a cancelled waiter does not cancel the restart for the others.
            await asyncio.shield(self._restarting)

    async def _restart(self, error: Exception) -> None:
        """Rebuilds the service, again if it dies meanwhile; the tasks that wait for it send their calls again then."""
        while True:
            reason = self.actors.death_reason()
            self._count(error, reason)
            self.actors.kill()
            try:
                async with asyncio.timeout(self.deadline_s):
                    if self._calls:
                        await asyncio.wait(self._calls)
                    left = self.replays.left()
                    logger.warning(
                        "'{}' died ({}): restart {} of {}; rebuilding it, then running its tasks again{}.",
                        self.spec.name,
                        reason.rstrip(".") or "killed, or out of memory",
                        self.deaths,
                        self.spec.restarts,
                        "".join(f", {s.task} for {len(s.groups)} groups" for s in left if s.groups),
                    )
                    await self._build()
                    for submission in left:
                        await self._replay(submission)
                break
            except Exception as newer:
                if not died(newer):
                    self._raise_not_built(newer)
                error = newer
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
            missing = self.actors.lacking() if ray.is_initialized() else ""
            needs = f"it needs {spec.ranks * spec.devices * spec.gpus:g} GPUs: are they free ('ray status')?"
            busy = "is the machine out of memory, or busy with something else?"
            hint = f"{missing}." if missing else needs if spec.gpus else busy
            raise RunError(f"'{spec.name}' was not up after {self.deadline_s:.0f} s; {hint}") from error
        if isinstance(why, DataflowError):
            raise why from (error.__cause__ if why is error else error)  # never from itself: a lost value is its cause
        raise RunError(f"'{spec.name}' could not be built: {type(why).__name__}: {why}") from why
