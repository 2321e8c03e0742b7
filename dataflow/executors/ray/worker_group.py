"""The worker group of a service: its actors, the tasks that run in them, and recovery when they die.

If ``Hosted.restarts`` allows it, no task is lost when a service dies. After every call to the dead service has failed
or answered, the group builds a new one, submits again the groups that the dead one had not handed out yet
(:mod:`dataflow.executors.ray.replays`), and then sends the tasks that were running. A call that answered counts and is
not repeated, so no group is handed out twice. A task that raises by itself fails the run as usual.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from loguru import logger

from dataflow.cluster.answer import DIED, cause, died, fetch, first_failure, last_words
from dataflow.cluster.log import log_lines
from dataflow.cluster.pickling import pickled
from dataflow.errors import DataflowError, RunError
from dataflow.executors.base import Call, Done, Part, Report
from dataflow.executors.ray.actors import Actors
from dataflow.executors.ray.replays import Replays, Submission
from dataflow.graph import Hosted, Pipeline, Stage, Task, TaskId

NAMED = 4  # tasks named in a warning; the others are counted


@dataclass(eq=False)
class Running:
    """A task that a worker group was given.

    Attributes:
        begin: when that was, in seconds of :func:`dataflow.system.clock.now`.
        attempt: its newest call; None while the tool is down.
        refs: of that call, a list per rank: the pickled answer, then a handle per field.
        handed: what a streaming task has handed on: a handle per field, by set.
        generation: of the tool that was called.
        lost: how many of its calls died with the tool.
    """

    task: Task
    call: Call
    values: Sequence[Any]
    begin: float
    attempt: asyncio.Task[Done] | None = None
    refs: list[list[Any]] = field(default_factory=list)
    handed: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    generation: int = 0
    lost: int = 0

    @property
    def to_send(self) -> bool:
        """Whether it waits for a tool: it was never sent, or died with the last one."""
        if self.attempt is None:
            return True
        ended = self.attempt.done() and not self.attempt.cancelled()
        return ended and died(self.attempt.exception())


class WorkerGroup:
    """The actors of one hosted tool, one per rank.

    Args:
        spec: the tool.
        threads: OMP threads in each process.
        deadline_s: seconds that building it may take.
        read: called with the bytes of each answer that the controller reads.
        hand_on: called with each set that a running task hands on.

    Attributes:
        actors: of the tool that is up now.
        deaths: of the tool so far.
        replays: what must be submitted again to a tool built anew.
    """

    def __init__(
        self,
        spec: Hosted,
        threads: int,
        deadline_s: float,
        read: Callable[[int], None],
        hand_on: Callable[[Part], None],
    ) -> None:
        self.spec = spec
        self.deadline_s = deadline_s
        self.actors = Actors(spec, threads)
        self.deaths = 0
        self.replays = Replays(spec.name)
        self._read = read
        self._hand_on = hand_on
        self._blobs: list[bytes] = []
        self._generation = 0
        self._running: dict[TaskId, Running] = {}
        self._reviving: asyncio.Task[None] | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.actors)

    @property
    def opened(self) -> bool:
        """Whether the tool was to be built already: further stages are for :meth:`add`."""
        return bool(self._blobs)

    def learn(self, pipeline: Pipeline) -> None:
        """Finds out what a tool built anew must be given again."""
        if self.spec.restarts:
            self.replays.learn(pipeline)

    async def place(self) -> None:
        """Starts the actors, before others that want the same GPUs.

        Raises:
            RunError: they are not up in time.
        """
        await self._in_time(self.actors.place())

    async def open(self, stages: Mapping[str, Stage]) -> None:
        """Builds the tool.

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
            self._say_not_built(error)

    async def add(self, stages: Mapping[str, Stage]) -> None:
        """Takes further stages of the tool."""
        blob = pickled(self.spec, stages)
        self._blobs.append(blob)
        await self._all(lambda actor: actor.add.remote(blob))

    async def ask(self, method: str) -> Any:
        """Calls a method of the tool on all its ranks; returns the first one's answer."""
        answers = await self._all(lambda actor: actor.ask.remote(method))
        return answers[0]

    # --- tasks --------------------------------------------------------------------------------------------

    def start(self, task: Task, call: Call, values: Sequence[Any], now: float) -> Running:
        """Starts a task, or keeps it until the tool is up again; :meth:`end_of` waits for it.

        Raises:
            RunError: it is to stream, and its tool runs one call at a time.
        """
        if task.emits > 1 and not self.spec.concurrent:
            raise RunError(
                f"stage '{task.stage.name}' is to stream, but '{self.spec.name}' runs one call at a time; "
                "give Hosted(concurrent=True) and make the stage async, or leave +stream out of the policy."
            )
        running = Running(task, call, values, now)
        self._running[task.id] = running
        if self._reviving is None:
            self._send(running)
        return running

    async def end_of(self, running: Running) -> Done:
        """Waits for a task's end, over as many tools as that takes.

        Raises:
            RunError: the tool died more often than it may, or could not be built anew.
        """
        try:
            while True:
                if running.attempt is None:
                    await self._up()
                assert running.attempt is not None
                try:
                    return await running.attempt
                except Exception as error:
                    await self._revived(running.generation, error)
        finally:
            self._running.pop(running.task.id, None)

    def drop(self, i: TaskId) -> None:
        """Gives a task up. With the last one ends the building of a new tool: nobody needs it."""
        import ray

        running = self._running.pop(i, None)
        if running is None:
            return
        if running.attempt is not None:
            running.attempt.cancel()
        for first, *_rest in running.refs:
            ray.cancel(first, force=False)
        if not self._running and self._reviving is not None:
            self._reviving.cancel()

    def end(self) -> None:
        """From now on a death is final."""
        self._closed = True
        for running in self._running.values():
            if running.attempt is not None:
                running.attempt.cancel()
        self._running.clear()
        if self._reviving is not None:
            self._reviving.cancel()

    def _send(self, running: Running) -> None:
        task, running.refs = running.task, []
        running.generation = self._generation
        if task.emits > 1:
            call = replace(running.call, handed=tuple(running.handed))
            values = [*running.values, *(value for values in running.handed.values() for value in values)]
            answers = self.actors.first.stream.options(num_returns="streaming").remote(call, *values)
            running.refs.append([answers])
            running.attempt = asyncio.create_task(self._streamed(running, answers))
            return
        for rank, actor in enumerate(self.actors):
            # The first rank's values count; the others take part in the collectives and report.
            returns = 1 + len(task.stage.writes) if rank == 0 else 1
            answer = actor.run.options(num_returns=returns).remote(running.call, rank == 0, *running.values)
            running.refs.append(answer if isinstance(answer, list) else [answer])
        running.attempt = asyncio.create_task(self._attempt(running))

    async def _attempt(self, running: Running) -> Done:
        """Waits for the answer of one call, and books what it left in the tool or took out of it.

        Booked here, in one go with the answer: who has waited for all attempts knows all that was handed out.
        """
        small, *_others = await first_failure([first for first, *_rest in running.refs])
        self._read(len(small))
        return self._ended(running, *pickle.loads(small), tuple(running.refs[0][1:]))

    async def _streamed(self, running: Running, answers: Any) -> Done:
        """Waits for the end of one call that streams, and hands on what it does."""
        while True:
            small = await fetch(await anext(answers))
            self._read(len(small))
            values = tuple([await anext(answers) for _field in running.task.stage.writes])
            found = pickle.loads(small)
            if not isinstance(found, Part):
                return self._ended(running, *found, values)
            running.handed[found.id.part] = values
            self._hand_on(replace(found, values=values))

    def _ended(self, running: Running, report: Report, held: tuple[int, ...] | None, values: tuple[Any, ...]) -> Done:
        task = running.task
        log_lines(report.logged)
        if self.spec.restarts:
            submission = None if held is None else Submission(task, running.call, running.values, held)
            self.replays.ended(submission, task, report.groups)
        if running.lost:
            # Under way since it was first started: whoever waited for it waited since then.
            report.begin = min(report.begin, running.begin)
            report.facts["restarted"] = running.lost
        return Done(task.id, report, values)

    # --- deaths -------------------------------------------------------------------------------------------

    async def _all(self, call: Callable[[Any], Any]) -> list[Any]:
        """Calls every rank; a call that dies with the tool is made again."""
        while True:
            if self._reviving is not None:
                await self._up()
            generation = self._generation
            try:
                return await first_failure([call(actor) for actor in self.actors])
            except Exception as error:
                await self._revived(generation, error)

    async def _revived(self, generation: int, error: Exception) -> None:
        """Waits until there is a newer tool than that of a generation, whose call failed.

        Raises:
            Exception: the error itself, if it was no death, or one that nothing is done about.
        """
        if not died(error) or not self.spec.restarts or self._closed:
            raise error
        if generation == self._generation and self._reviving is None:
            self._reviving = asyncio.create_task(self._revive(error))
        if self._reviving is not None:
            await self._up()

    async def _up(self) -> None:
        """Waits for the new tool."""
        reviving = self._reviving
        if reviving is None:
            return
        try:
            # Shielded: one of those who wait may give up, the others go on waiting.
            await asyncio.shield(reviving)
        except asyncio.CancelledError:
            if not reviving.cancelled():
                raise
            raise RunError(f"'{self.spec.name}' died and was not built anew: the run was stopped.") from None

    async def _revive(self, error: Exception) -> None:
        """Builds the tool anew, as often as it may die, and gives it what the dead one was at work on."""
        while True:
            words = self.actors.last_words()
            self._count(error, words)
            self.actors.kill()
            try:
                async with asyncio.timeout(self.deadline_s):
                    await self._settled()
                    left = self.replays.left()
                    lost = [running for running in self._running.values() if running.to_send]
                    self._warn(left, lost, words)
                    await self.actors.build(self._blobs)
                    for submission in left:
                        await self._replay(submission)
                break
            except Exception as new:
                if not died(new):
                    self._say_not_built(new)
                error = new
        self._generation += 1
        self._reviving = None
        for running in self._running.values():
            if running.to_send:
                running.lost += running.attempt is not None
                running.call = self.replays.narrowed(running.task, running.call)
                self._send(running)

    def _count(self, error: Exception, words: str) -> None:
        self.deaths += 1
        if self.deaths > self.spec.restarts and words:
            raise RunError(
                f"{self.deaths} deaths of '{self.spec.name}' with restarts={self.spec.restarts}; the last: {words}"
            ) from error
        if self.deaths > self.spec.restarts:
            raise RunError(
                f"{DIED}: {self.deaths} deaths of '{self.spec.name}' with restarts={self.spec.restarts}; "
                f"see Ray's log for its last words: {last_words(error)}"
            ) from error

    async def _settled(self) -> None:
        """Waits until every call to the dead tool has failed, or has answered after all."""
        calls = [running.attempt for running in self._running.values() if running.attempt is not None]
        if calls:
            await asyncio.wait(calls)

    def _warn(self, left: Sequence[Submission], lost: Sequence[Running], words: str) -> None:
        again = [f"{s.task} for {len(s.groups)} groups" for s in left] + [str(running.task) for running in lost]
        names = ", ".join(again[:NAMED]) + (f" and {len(again) - NAMED} more" if len(again) > NAMED else "")
        logger.warning(
            "'{}' died ({}): restart {} of {}; it is built anew{}.",
            self.spec.name,
            words.rstrip(".") or "killed, or out of memory",
            self.deaths,
            self.spec.restarts,
            f", then runs again {names}" if again else "",
        )

    async def _replay(self, submission: Submission) -> None:
        running = Running(submission.task, submission.call, submission.values, begin=0.0)
        self._send(running)
        assert running.attempt is not None
        try:
            await running.attempt
        except Exception as error:
            if died(error):
                raise
            why = cause(error)
            raise RunError(
                f"'{self.spec.name}' died, and {submission.task} could not run again in the new one: "
                f"{type(why).__name__}: {why}"
            ) from why

    def _say_not_built(self, error: Exception) -> NoReturn:
        """Raises what a user is told of a tool that could not be built."""
        import ray

        spec, why = self.spec, cause(error)
        if isinstance(error, TimeoutError) and not isinstance(error, ray.exceptions.RayError):
            asked = " x ".join(f"{n:g}" for n in (spec.ranks, spec.devices, spec.gpus) if n != 1 or n is spec.gpus)
            asks = f"it asks for {asked} GPUs: does the cluster have them ('ray status')?"
            busy = "is the machine out of memory, or busy with something else?"
            raise RunError(
                f"'{spec.name}' was not up after {self.deadline_s:.0f} s; {asks if spec.gpus else busy}"
            ) from error
        if isinstance(why, DataflowError):
            raise why from error
        raise RunError(f"'{spec.name}' could not be built: {type(why).__name__}: {why}") from why
