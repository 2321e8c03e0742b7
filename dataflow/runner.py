"""The runner: the only loop between scheduler and executor. It passes handles, never values.

The executor yields events (``Done``, ``Chunk``), the scheduler turns each into instructions, and the runner executes
them: it starts and cancels tasks, records what ended, reports steps and drops the handles of those that are over.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from loguru import logger

from dataflow.batch import Batch
from dataflow.errors import DataflowError, RewardFailed, RunError, StageFailed
from dataflow.executors.base import Chunk, Done, Executor, Report, StageCall
from dataflow.executors.parts import Parts
from dataflow.graph import Input, Task, TaskGraph, TaskId, TaskInfo
from dataflow.metrics import of_step
from dataflow.scheduler import (
    Cancel,
    ChunkEmitted,
    Instruction,
    Release,
    RunDone,
    Scheduler,
    Start,
    StepDone,
    TaskFailed,
    TaskFinished,
)
from dataflow.timeline.spans import Level, Mark, Span, Trace
from dataflow.usercode.copies import readable_once
from dataflow.usercode.failures import message_of, named

if TYPE_CHECKING:
    from dataflow.policy import SchedulingPolicy

OnStep: TypeAlias = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Ahead:
    """An input that depends on the step alone, so that it can be made while the step before runs.

    Others, which may depend on what stages have done or on the order of the calls, are made when a task needs them.
    """

    function: Callable[[int], Any]

    def __call__(self, step: int) -> Any:
        return self.function(step)


@dataclass(frozen=True)
class Restored:
    """What a run resumes from: the graph's states, and fields of steps whose tasks ran before the checkpoint.

    ``fields`` are values of later steps, by field and step; a task that would write them is not run again.
    """

    states: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[tuple[str, int], Any] = field(default_factory=dict)

    def holds(self, task: Task) -> bool:
        """Whether all that a task writes is restored."""
        writes = task.stage.writes
        return bool(writes) and all((name, task.id.step) in self.fields for name in writes)

    def events(self, task: Task, now: float, put: Callable[[Any], Any]) -> Iterator[Done | Chunk]:
        """Yields the events of a held task as if it ran: its chunks, in the order of the groups, and its end."""
        values = {name: self.fields[name, task.id.step] for name in task.stage.writes}
        written = {name: value.ids for name, value in values.items() if isinstance(value, Batch)}
        ids = next(iter(written.values()), ())
        for number in range(task.emits if task.emits > 1 else 0):
            mine = ids[len(ids) * number // task.emits : len(ids) * (number + 1) // task.emits]
            chunk = tuple(put(value.select(mine)) for value in values.values())
            yield Chunk(task.id._replace(part=number, parts=task.emits), now, mine, chunk)
        report = Report(now, now, ids if task.stage.collects else None, written=written)
        yield Done(task.id, report, tuple(put(value) for value in values.values()))


@dataclass
class _Running:
    """A task that was started and has not ended; ``waited_for`` is the last that it waited for.

    ``since`` and, by number of the chunk, ``emitted_at`` are seconds of the executor's clock.
    """

    task: Task
    waited_for: TaskId | None
    since: float
    emitted_at: dict[int, float] = field(default_factory=dict)


class Runner:
    """Runs one task graph to its end.

    Args:
        executor: that runs the tasks; already opened.
        inputs: for each input field (``prompts``) a function from step to value.
        trace: receives a span per finished task, with its marks and levels.
        origin: second 0 of the trace, on the executor's clock; by default the start of the first task.
        estimates: seconds per task of a stage, where known.
        on_step: called with a step and its metrics when its training tasks are done, and again with the metrics of
            optional stages (validation) that ended later.
        handles: of input fields, by field and step, from another runner of the same executor.
        drains: whether the step in training shall end before the run does, given a task that failed and its error.
        restored: what the steps before ``graph.first`` left, if the run resumes from a checkpoint.
    """

    def __init__(
        self,
        graph: TaskGraph,
        executor: Executor,
        *,
        inputs: Mapping[str, Callable[[int], Any]],
        trace: Trace,
        origin: float | None = None,
        estimates: Mapping[str, float] | None = None,
        on_step: OnStep | None = None,
        restored: Restored | None = None,
        handles: Mapping[tuple[str, int], Any] | None = None,
        drains: Callable[[Task, BaseException], bool] = lambda task, error: False,
    ) -> None:
        self.graph = graph
        self.executor = executor
        self.scheduler = Scheduler(graph, estimates)
        self.trace = trace
        self._on_step = on_step
        self._drains = drains
        self._parts = Parts(graph)
        self._inputs, self._handles = inputs, handles or {}
        self._fetched: dict[tuple[str, int], Any] = {}  # handles of inputs, and what their functions raised
        self._tasks: dict[TaskId, _Running] = {}
        self._values: dict[int, dict[tuple[TaskId, str], Any]] = {}
        self._newest = graph.first  # step whose inputs were fetched, some of them ahead
        self._over = False
        self._restored = restored or Restored()
        self._ended: deque[Done | Chunk] = deque()  # of tasks whose values are restored
        self._unrecorded: tuple[_Running, Report] | None = None
        self._states = {name: executor.put(value) for name, value in self._restored.states.items()}
        self._metrics: dict[int, dict[str, list[float]]] = {}
        self._done: set[int] = set()  # steps that were reported, and have optional tasks left
        self._origin = origin
        self._failure: BaseException | None = None

    async def run(self) -> Trace:
        """Runs all tasks and returns the trace.

        If a task fails, the other running ones are cancelled, and StageFailed is raised with its error as the cause.
        """
        try:
            await self._drive()
            if self._failure is not None:
                raise self._failure
        except BaseException:
            # A task that failed, an interrupt, a callback that raised: no task may keep running.
            self.stop()
            try:
                self._report_late()
            except Exception as error:  # the first one counts
                logger.warning(f"the metrics of the last steps are not all reported: {error!r}")
            raise
        self._report_late()
        return self.trace

    async def _drive(self) -> None:
        finished = self._execute(self.scheduler.start())
        async with contextlib.aclosing(self.executor.events()) as events:  # type: ignore[type-var]
            while not (finished or self._over):
                done = self._ended.popleft() if self._ended else await anext(events, None) if self._tasks else None
                if done is None:
                    raise DataflowError("deadlock: tasks are left, but none is running.")
                finished = self._execute(self._on_event(done))

    def end_early(self) -> int:
        """Ends the run at the next consistent cut, see :meth:`dataflow.scheduler.Scheduler.end_early`.

        Returns:
            Its step. If :attr:`over` is true then, it is reached, and nothing runs any more.
        """
        step, instructions = self.scheduler.end_early()
        self._over = self._execute(instructions)
        return step

    def switch(self, policy: SchedulingPolicy) -> int | None:
        """Changes the policy from the first step on that allows it, and returns that step; None if none is left.

        See :meth:`dataflow.scheduler.Scheduler.switch`.
        """
        step, instructions = self.scheduler.switch(policy)
        self.graph = self.scheduler.graph
        self._execute(instructions)
        return step

    def trace_now(self) -> float:
        """Returns the seconds since second 0 of the trace."""
        return self.executor.now() - (self._origin or 0.0)

    @property
    def over(self) -> bool:
        """Whether :meth:`end_early` found nothing left to do."""
        return self._over

    def handles(self, step: int) -> dict[tuple[str, int], Any]:
        """Returns a handle for each state, under ``step``, and for each field of the later steps, under theirs."""
        found: dict[tuple[str, int], Any] = {(name, step): value for name, value in self._states.items()}
        for later, values in self._values.items():
            if later > step:
                found |= {(name, later): value for (source, name), value in values.items() if source.parts == 1}
        return found

    def stop(self) -> None:
        """Cancels all running tasks; ``run`` does so itself when it is cancelled or fails."""
        self._execute(self.scheduler.stop())

    # --- events in ----------------------------------------------------------------------------------------

    def _on_event(self, event: Done | Chunk) -> list[Instruction]:
        # Cancelled before it ended, by this runner or by the one before it on the same executor, of another pipeline.
        known = event.id.stage in self.graph.pipeline.by_name
        if not known or self.graph.pipeline.task_of(event.id) not in self._tasks:
            return []
        return self._on_chunk(event) if isinstance(event, Chunk) else self._on_done(event)

    def _on_done(self, done: Done) -> list[Instruction]:
        running, report = self._tasks.pop(done.id), done.report
        task = running.task
        if done.error is not None or report is None:
            return self._failed(running, done.error or DataflowError("no report"))
        try:
            self._parts.finished(task, report.groups, report.written)
        except DataflowError as error:
            return self._failed(running, error)
        self._keep(task, task.id, done.values)
        metrics = self._metrics.setdefault(task.id.step, {})
        for name, number in report.metrics.items():
            metrics.setdefault(name, []).append(number)
        if not self._restored.holds(task):  # else its span is in the trace already
            self._unrecorded = (running, report)
        return self.scheduler.handle(TaskFinished(task.id, report.end - report.begin, report.groups))

    def _on_chunk(self, chunk: Chunk) -> list[Instruction]:
        i = self.graph.pipeline.task_of(chunk.id)
        running = self._tasks[i]
        try:
            self._parts.emitted(running.task, chunk.id.part, chunk.groups)
        except DataflowError as error:
            del self._tasks[i]
            self.executor.cancel(i)
            return self._failed(running, error)
        self._keep(running.task, chunk.id, chunk.values)
        running.emitted_at[chunk.id.part] = chunk.at
        return self.scheduler.handle(ChunkEmitted(chunk.id, chunk.groups))

    def _keep(self, task: Task, source: TaskId, handles: tuple[Any, ...]) -> None:
        values = self._values.setdefault(task.id.step, {})
        for name, value in zip(task.stage.writes, handles, strict=True):
            if name in self.graph.pipeline.states:
                self._states[name] = value
            else:
                values[source, name] = value

    def _failed(self, running: _Running, error: BaseException) -> list[Instruction]:
        task = running.task
        instructions = self.scheduler.handle(TaskFailed(task.id, self._drains(task, error)))
        if self._failure is None:
            elapsed = self.executor.now() - running.since
            self._failure = _failure(task, error, elapsed, self.scheduler.story(task.id))
            self._failure.__cause__ = error
        return instructions

    def _record(self, running: _Running, report: Report) -> None:
        """Adds a task that has ended to the trace: its span, and the spans and levels inside it."""
        assert self._origin is not None
        task, i = running.task, running.task.id
        facts = dict(report.facts)
        if task.stage.every is not None:
            facts["optional"] = True
        if running.emitted_at:
            facts["emitted_s"] = [at - self._origin for _number, at in sorted(running.emitted_at.items())]
        span = Span(
            stage=i.stage,
            step=i.step,
            part=i.part,
            parts=i.parts,
            resource=task.stage.on,
            begin=report.begin - self._origin,
            end=report.end - self._origin,
            args=facts,
            waited_for=str(running.waited_for or ""),
        )
        inside: list[Mark | Level] = []
        for mark in report.marks:
            if "value" in mark:
                inside.append(Level(mark["name"], mark["at"] - self._origin, float(mark["value"])))
                continue
            facts = {k: v for k, v in mark.items() if k not in ("name", "begin", "end")}
            if i.parts > 1:
                facts = {"part": i.part, **facts}
            if task.stage.collects and len(self.graph.pipeline.collectors) > 1:
                facts = {"collector": i.stage, **facts}
            begin, end = mark["begin"] - self._origin, mark["end"] - self._origin
            inside.append(Mark(mark["name"], task.stage.on, begin, end, {"step": i.step, **facts}))
        self.trace.add(span, *inside)

    # --- instructions out ---------------------------------------------------------------------------------

    def _execute(self, instructions: list[Instruction]) -> bool:
        """Executes instructions; returns whether the run is over."""
        try:  # tasks start first: recording thousands of reward requests takes longer than handing on the rewards
            for instruction in instructions:
                if isinstance(instruction, Start):
                    self._start(instruction)
        finally:  # one that cannot start does not undo what has ended
            if self._unrecorded is not None:
                ended, self._unrecorded = self._unrecorded, None
                self._record(*ended)
            finished = self._end(instructions)
        self._fetch_ahead(max((i.task.id.step for i in instructions if isinstance(i, Start)), default=0) + 1)
        return finished

    def _end(self, instructions: list[Instruction]) -> bool:
        """Reports the steps that are done, forgets finished ones, cancels tasks; returns whether the run is over."""
        finished = False
        for instruction in instructions:
            match instruction:
                case StepDone(step=step):
                    self._done.add(step)
                    self._report_step(step, self._metrics.pop(step, {}))
                case Release(step=step):
                    self._done.discard(step)
                    if late := self._metrics.pop(step, None):
                        self._report_step(step, late)
                    self._parts.release(step)
                    self._values.pop(step, None)
                    self._fetched = {key: handle for key, handle in self._fetched.items() if key[1] != step}
                case Cancel(id=task):
                    self._tasks.pop(task, None)
                    self.executor.cancel(task)
                case RunDone():
                    finished = True
        return finished

    def _fetch_ahead(self, step: int) -> None:
        """Fetches inputs of a step while the tasks before it run, so that none of its own waits for them."""
        ahead = {name for name, function in self._inputs.items() if isinstance(function, Ahead)}
        if not ahead or not self._newest < step <= self.graph.steps:
            return
        self._newest = step
        read = {item.field for task in self.graph.unroll(step) for item in task.inputs if not item.sources}
        for name in sorted(ahead & read):
            self._fetch(name, step)  # what it raised is raised when a task needs it: the step may never begin

    def _report_late(self) -> None:
        """Reports what ended after its step, of steps that have other tasks left: the run ends before they do."""
        for step in sorted(self._done & self._metrics.keys()):
            self._report_step(step, self._metrics.pop(step))

    def _report_step(self, step: int, metrics: Mapping[str, list[float]]) -> None:
        if self._on_step is not None:
            self._on_step(step, {name: of_step(name, numbers) for name, numbers in metrics.items()})

    def _start(self, instruction: Start) -> None:
        task = instruction.task
        call, values = self._call(task, instruction.groups)
        now = self.executor.now()
        if self._origin is None:
            self._origin = now
        self._tasks[task.id] = _Running(task, instruction.waited_for, now)
        if self._restored.holds(task):
            self._ended += self._restored.events(task, now, self.executor.put)
            return
        self.executor.start(task, call, values)

    def _call(self, task: Task, groups: tuple[int, ...] | None) -> tuple[StageCall, list[Any]]:
        """Returns a call of a stage function and handles of its fields."""
        i = task.id
        layout: list[tuple[str, int, bool]] = []
        values: list[Any] = []
        for item in task.inputs:
            found = self._find(item, i.step)
            layout.append((item.field, len(found), item.state or item.whole))
            values += found
        info = TaskInfo(
            step=i.step,
            stage=i.stage,
            part=i.part,
            parts=i.parts,
            epoch=task.epoch,
            epochs=task.stage.epochs,
            groups=groups,
            take=task.take,
            order=self.graph.order,
            max_staleness=task.max_staleness,
            sampled_ahead=self.graph.sampled_ahead(i.step),
            emits=task.emits,
        )
        return StageCall(i.stage, info, tuple(layout), groups, (), task.aligned, task.keeps), values

    def _find(self, item: Input, step: int) -> list[Any]:
        if item.state:
            return [self._states[item.field]] if item.field in self._states else []
        if item.sources:
            return [self._values[i.step][i, item.field] for i in item.sources]
        if item.field not in self._inputs and (item.field, step) not in self._handles:
            return []
        found = self._fetch(item.field, step)
        if isinstance(found, Exception):
            raise found
        return [found]

    def _fetch(self, field: str, step: int) -> Any:
        """Returns the handle of an input, made once; or what its function raised."""
        key = (field, step)
        if key in self._handles:
            return self._handles[key]
        if key not in self._fetched:
            try:
                self._fetched[key] = self._made(field, step)
            except Exception as error:
                self._fetched[key] = error
        return self._fetched[key]

    def _made(self, field: str, step: int) -> Any:
        where = f"input '{field}' of step {step}"
        try:
            value = self._inputs[field](step)
        except DataflowError:
            raise
        except (Exception, SystemExit) as error:
            raise RunError(f"{where}: its function raised {named(error)}; correct it.") from error
        if (once := readable_once(value)) is not None:
            raise RunError(f"{where}: its function returned {once}; return the value itself.")
        if isinstance(value, Batch):
            self._parts.written(step, field, value.ids)
        try:
            return self.executor.put(value)
        except DataflowError:
            raise
        except Exception as error:
            raise RunError(
                f"{where}: its value cannot be copied ({named(error)}); return one that can be pickled."
            ) from error


def _failure(task: Task, error: BaseException, elapsed: float, story: str) -> StageFailed:
    """Returns the error that ends a run: the task, its resource, the cause, and the task's history."""
    kind = "" if isinstance(error, RewardFailed | DataflowError) else f"{type(error).__name__}: "
    what = str(error) if isinstance(error, DataflowError) else f"{kind}{message_of(error)}".rstrip(": ")
    if place := _place_in(task.stage.fn, error):
        what = f"{what.rstrip('.')} ({place}){'.' * what.endswith('.')}"
    return StageFailed(
        f"{task.id.stage}[step {task.id.step}"
        + (f", part {task.id.part + 1} of {task.id.parts}" if task.id.parts > 1 else "")
        + f"] failed on '{task.stage.on}' after {elapsed:.1f} s: {what}\n  history: {story}"
    )


def _place_in(fn: Callable[..., Any], error: BaseException) -> str:
    """Returns file and line in the file of a stage of the user's that an exception was raised in; "" if there is none.

    One of another process has its traceback as a note.
    """
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None or fn.__module__.startswith("dataflow."):
        return ""
    file = code.co_filename
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    notes = "\n".join(map(str, getattr(error, "__notes__", ())))
    lines += re.findall(rf'File "{re.escape(file)}", line (\d+)', notes)
    return f"{os.path.basename(file)}:{lines[-1]}" if lines else ""
