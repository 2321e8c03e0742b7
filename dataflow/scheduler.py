"""The scheduler: a pure, deterministic state machine. Events in, instructions out; no clock, no I/O, no randomness.

Invariants (``check`` asserts them): a task starts once, after all it depends on; a resource never runs more
tasks than it has slots; no ready task waits beside a free slot; a slot that a stage holds until another one has ended
is taken by nothing else; the tasks of finished steps are forgotten, so memory follows the window of unfinished steps,
not the length of the run.

Ready tasks of one resource run in order of the work left before the next remote wait: first those with the least work
between them and a reward request, of this step or a later one. So the next rollout starts before this step's
log-probs, its rewards arrive meanwhile, and a weight sync does not queue behind updates that could wait
(docs/decisions/0002-priority.md). Ties go to the longest remaining path through the step, then to the older step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from dataflow.errors import DataflowError
from dataflow.graph import Pipeline, Stage, Task, TaskGraph, TaskId
from dataflow.tasks.events import (
    Cancel,
    ChunkEmitted,
    Event,
    Instruction,
    Release,
    RunDone,
    Start,
    StepDone,
    TaskFailed,
    TaskFinished,
)

# Estimates for a stage that was not measured yet; a wait on a remote service (no slot limit) is assumed to be long.
GUESS_S = 1.0
GUESS_WAIT_S = 8.0
# Weight of the newest measurement in a stage's running mean.
NEWEST = 0.5

_Key: TypeAlias = tuple[float, float, int, int, int, TaskId]


@dataclass(slots=True)
class _Entry:
    task: Task
    waiting: int
    state: str = "waiting"
    last_dep: TaskId | None = None
    history: list[str] = field(default_factory=lambda: ["waiting"])

    @property
    def begun(self) -> bool:
        return self.state not in ("waiting", "ready")


class Scheduler:
    """Decides which task starts when.

    Args:
        graph: the task graph; unrolled a window of steps at a time.
        estimates: seconds per task of a stage, where known; otherwise learned from ``TaskFinished.elapsed``.
    """

    def __init__(self, graph: TaskGraph, estimates: Mapping[str, float] | None = None) -> None:
        self.graph = graph
        self.failed: TaskId | None = None
        self._estimate = dict(estimates or {})
        self._entries: dict[TaskId, _Entry] = {}
        self._dependents: dict[TaskId, list[TaskId]] = {}
        self._open: dict[int, set[TaskId]] = {}
        self._required: dict[int, int] = {}
        self._unrolled = graph.first - 1
        self._oldest = graph.first  # all earlier steps have reached StepDone
        self._tasks: dict[int, list[TaskId]] = {}
        self._groups: dict[TaskId, tuple[int, ...] | None] = {}
        self._emitted: dict[int, set[TaskId]] = {}
        self._running: dict[str, int] = dict.fromkeys(graph.pipeline.resources, 0)
        self._ready: dict[str, list[_Key]] = {r: [] for r in self._running}
        self._until = {s.name: s.until for s in graph.pipeline.stages if s.until is not None}
        self._in_held_slot = frozenset(self._until.values())
        self._ready_in_held: list[TaskId] = []  # these run in the slot that their holder has left them
        self._priority: dict[str, tuple[float, float]] = {}
        self._finished = False
        self._wanted: set[TaskId] | None = None

    def start(self) -> list[Instruction]:
        """Returns the first instructions."""
        self._rank()
        out: list[Instruction] = []
        self._unroll(out)
        return self._dispatch(out)

    def handle(self, event: Event) -> list[Instruction]:
        """Handles one event; returns the instructions that follow from it.

        Raises:
            DataflowError: the event names a task that is not running.
        """
        entry = self._entries.get(self.graph.pipeline.task_of(event.id))
        if entry is None or entry.state != "running":
            state = entry.state if entry else "unknown or forgotten"
            raise DataflowError(f"scheduler: {type(event).__name__} for {event.id}, which is {state}, not running.")
        if isinstance(event, ChunkEmitted):
            return self._emit(entry, event)
        if isinstance(event, TaskFailed):
            return self._fail(entry, event)
        if entry.task.stage.name not in self._until:
            self._running[entry.task.stage.on] -= 1
        return self._finish(entry, event)

    def end_early(self) -> tuple[int, list[Instruction]]:
        """Ends the run as soon as weights, engine and samples are those of one step again.

        That is the last step with a training task that has started. From now on only tasks start that this step and
        those before it need, validations left out; the others that run are cancelled at the end.

        Returns:
            The step, ``graph.first - 1`` if no training has started; and the instructions that follow.
        """
        training = (e for e in self._entries.values() if e.task.stage.role == "trains")
        begun = [e.task.id.step for e in training if e.begun]
        # Steps that are over are forgotten; those before the oldest unfinished one have been trained.
        step = max([self._oldest - 1, *begun])
        ahead = [i for i, e in self._entries.items() if i.step <= step and e.task.stage.role != "validates"]
        # Other tasks may need a slot that is held.
        ahead += [TaskId(i.step, self._until[i.stage]) for i, e in self._entries.items() if self._holds(e)]
        wanted = self._wanted = set[TaskId]()
        while ahead:
            i = ahead.pop()
            if i not in wanted and i in self._entries:
                wanted.add(i)
                ahead += map(self.graph.pipeline.task_of, self._entries[i].task.deps)
        return step, self._dispatch([])

    def stop(self) -> list[Instruction]:
        """Cancels all running tasks, in order, as on an interrupt."""
        running = sorted(i for i, e in self._entries.items() if e.state == "running")
        self._finished = True
        return [*(Cancel(i) for i in running), RunDone(self.failed)]

    def story(self, task: TaskId) -> str:
        """Returns the history of a task: ``waiting -> ready (sync_weights[10] done) -> running -> failed``."""
        entry = self._entries.get(task)
        return " -> ".join(entry.history) if entry else "unknown"

    def running(self) -> list[TaskId]:
        return sorted(i for i, e in self._entries.items() if e.state == "running")

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        for resource, slots in self.graph.pipeline.resources.items():
            of = [e for e in self._entries.values() if e.task.stage.on == resource]
            in_held = self._in_held_slot
            busy = sum(e.state == "running" and e.task.stage.name not in in_held for e in of)
            busy += sum(e.state == "done" and self._holds(e) for e in of)
            assert busy == self._running[resource], (resource, busy, self._running[resource])
            assert slots is None or busy <= slots, f"{resource}: {busy} running in {slots} slots"
            waits = [e.task.id for e in of if e.state == "ready"]
            free = slots is None or busy < slots
            waits = [i for i in waits if self._wanted is None or i in self._wanted]
            assert self._finished or not (free and waits), f"{waits[0]} waits beside a free slot of {resource}"
        for step, left in self._open.items():
            assert left, f"step {step} is kept, but nothing of it is left to run"
        assert len(self._entries) == sum(map(len, self._tasks.values()))

    # --- events -------------------------------------------------------------------------------------------

    def _emit(self, entry: _Entry, event: ChunkEmitted) -> list[Instruction]:
        task, i = entry.task, event.id
        emitted = self._emitted.setdefault(i.step, set())
        if i.parts != task.emits or i == task.id or i in emitted:
            raise DataflowError(f"scheduler: {task} emits {task.emits} chunks, each once; {i} is none of those left.")
        emitted.add(i)
        self._groups[i] = event.groups
        entry.history.append(f"emitted {i.part + 1} of {i.parts}")
        self._wake_dependents(i, task.id)
        return self._dispatch([])

    def _wake_dependents(self, done: TaskId, task: TaskId) -> None:
        """Makes tasks ready that waited only for ``done``, which is ``task`` or a chunk of it."""
        for dependent in self._dependents.pop(done, ()):
            waiter = self._entries[dependent]
            waiter.waiting -= 1
            waiter.last_dep = task
            if waiter.waiting == 0:
                self._make_ready(waiter)

    def _finish(self, entry: _Entry, event: TaskFinished) -> list[Instruction]:
        task = entry.task
        if task.emits > 1:
            got = sum(i.stage == task.id.stage for i in self._emitted.get(task.id.step, ()))
            if got != task.emits:
                raise DataflowError(f"scheduler: {task} ended after {got} of {task.emits} chunks.")
        entry.state = "done"
        entry.history.append("done")
        self._learn(task, event.elapsed)
        if task.stage.collects:
            if event.groups is None:
                raise DataflowError(f"scheduler: {task} collects a part but named no groups.")
            self._groups[task.id] = event.groups
        self._wake_dependents(task.id, task.id)
        out: list[Instruction] = []
        step = task.id.step
        self._open[step].discard(task.id)
        if task.stage.every is None:
            self._required[step] -= 1
            if self._required[step] == 0:
                out.append(StepDone(step))
        if not self._open[step]:
            self._retire(step, out)
        self._unroll(out)
        return self._dispatch(out)

    def _fail(self, entry: _Entry, event: TaskFailed) -> list[Instruction]:
        entry.state = "failed"
        entry.history.append("failed")
        self.failed = event.id
        return self.stop()

    def _retire(self, step: int, out: list[Instruction]) -> None:
        """Forgets a step whose tasks have all ended; an older step may still have a slow validation running."""
        for task in self._tasks.pop(step):
            del self._entries[task]
            self._groups.pop(task, None)
        for part in self._emitted.pop(step, ()):
            self._groups.pop(part, None)
        del self._open[step], self._required[step]
        out.append(Release(step))

    # --- the window ---------------------------------------------------------------------------------------

    def _unroll(self, out: list[Instruction]) -> None:
        grew = False
        while True:
            while self._oldest <= self._unrolled and not self._required.get(self._oldest):
                self._oldest += 1
            if self._unrolled >= min(self._oldest + self.graph.ahead, self.graph.steps):
                break
            grew = True
            self._unrolled += 1
            self._unroll_step(self._unrolled)
            if not self._required[self._unrolled]:
                out.append(StepDone(self._unrolled))
            if not self._open[self._unrolled]:
                self._retire(self._unrolled, out)
        if grew:
            self._rank()

    def _unroll_step(self, step: int) -> None:
        tasks = self.graph.unroll(step)
        self._tasks[step] = [t.id for t in tasks]
        self._open[step] = set(self._tasks[step])
        self._required[step] = sum(t.stage.every is None for t in tasks)
        for task in tasks:
            unmet = [dep for dep in task.deps if not self._is_done(dep)]
            entry = self._entries[task.id] = _Entry(task, len(unmet))
            for dep in unmet:
                self._dependents.setdefault(dep, []).append(task.id)
            if not unmet:
                self._make_ready(entry)

    def _is_done(self, task: TaskId) -> bool:
        # A dependency may be of a later step: the next write of a state waits for readers of the old version.
        if task.step <= self._unrolled and task.step not in self._open:
            return True
        entry = self._entries.get(task)
        if entry is None:
            return task in self._emitted.get(task.step, ())
        return entry.state == "done"

    def _make_ready(self, entry: _Entry) -> None:
        entry.state = "ready"
        entry.history.append(f"ready ({entry.last_dep} done)" if entry.last_dep else "ready")
        if entry.task.stage.name in self._in_held_slot:
            self._ready_in_held.append(entry.task.id)
            return
        heapq.heappush(self._ready[entry.task.stage.on], self._key(entry))

    def _key(self, entry: _Entry) -> _Key:
        i = entry.task.id
        return (*self._priority[i.stage], i.step, entry.task.rank, i.part, i)

    def _rank(self) -> None:
        """Sets the priority of each stage from the estimates of all stages, and re-sorts the ready tasks."""
        pipeline = self.graph.pipeline
        seconds = {s.name: self._seconds(s) for s in pipeline.stages}
        upward: dict[str, float] = {}
        for s in reversed(pipeline.order):
            behind = [upward[t.name] for _s, t, _field, lag in pipeline.edges if _s is s and lag == "none"]
            upward[s.name] = max(behind, default=0.0) + seconds[s.name]
        away = _work_until_a_wait(pipeline, seconds)
        self._priority = {s.name: (away[s.name], -upward[s.name]) for s in pipeline.stages}
        for resource, ready in self._ready.items():
            self._ready[resource] = [self._key(self._entries[item[-1]]) for item in ready]
            heapq.heapify(self._ready[resource])

    def _seconds(self, s: Stage) -> float:
        """Returns a stage's time in one step: all its parts, which come one after another."""
        known = self._estimate.get(s.name)
        if known is None:
            known = GUESS_WAIT_S if self.graph.pipeline.resources[s.on] is None else GUESS_S
        return known * self.graph.parts[s.name]

    def _learn(self, task: Task, elapsed: float) -> None:
        known = self._estimate.get(task.stage.name)
        self._estimate[task.stage.name] = elapsed if known is None else known + NEWEST * (elapsed - known)

    # --- starting -----------------------------------------------------------------------------------------

    def _holds(self, entry: _Entry) -> bool:
        """Whether a task has taken a slot that is free only when another task has ended, which has not."""
        until = self._until.get(entry.task.stage.name)
        if until is None or not entry.begun:
            return False
        last = self._entries.get(TaskId(entry.task.id.step, until))
        return last is not None and last.state != "done"

    def _start(self, entry: _Entry, out: list[Instruction]) -> None:
        entry.state = "running"
        entry.history.append("running")
        out.append(Start(entry.task, self._groups_of(entry.task), entry.last_dep))

    def _dispatch(self, out: list[Instruction]) -> list[Instruction]:
        wanted = [i for i in self._ready_in_held if self._wanted is None or i in self._wanted]
        self._ready_in_held.clear()
        for i in wanted:
            self._start(self._entries[i], out)
        for resource, slots in self.graph.pipeline.resources.items():
            ready = self._ready[resource]
            if self._wanted is not None:
                ready = self._ready[resource] = [item for item in ready if item[-1] in self._wanted]
                heapq.heapify(ready)
            while ready and (slots is None or self._running[resource] < slots):
                self._running[resource] += 1
                self._start(self._entries[heapq.heappop(ready)[-1]], out)
        if not self._finished and self._over():
            out += self.stop()
        return out

    def _over(self) -> bool:
        """Whether nothing is left that the run needs."""
        if self._wanted is None:
            return not self._entries and self._unrolled == self.graph.steps
        return not any(i in self._wanted and e.state != "done" for i, e in self._entries.items())

    def _groups_of(self, task: Task) -> tuple[int, ...] | None:
        chosen = [groups for i in task.chosen_by if (groups := self._groups[i]) is not None]
        if not chosen:
            return None
        if len(chosen) > 1:
            return tuple(sorted(group for groups in chosen for group in groups))
        groups, (i, n) = chosen[0], task.share
        if len(groups) % n:
            raise DataflowError(f"scheduler: {task} cannot take 1/{n} of {len(groups)} groups.")
        size = len(groups) // n
        return groups[i * size : (i + 1) * size]


def _work_until_a_wait(pipeline: Pipeline, seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns for each stage the least seconds of work, its own included, before a remote wait downstream of it.

    Paths into later steps through carried state count: a weight sync leads to the next rollout and its rewards.
    Infinity if there is no such wait: the stage fills idle intervals.
    """
    waits = {s.name for s in pipeline.stages if pipeline.resources[s.on] is None and not s.every}
    before: dict[str, list[str]] = {s.name: [] for s in pipeline.stages}
    for source, target, _field, _lag in pipeline.edges:
        if not target.every:
            before[target.name].append(source.name)
    away = dict.fromkeys(before, math.inf)
    queue: list[tuple[float, str]] = [(0.0, name) for name in sorted(waits)]
    while queue:
        so_far, name = heapq.heappop(queue)
        if so_far < away[name]:
            away[name] = so_far
            for earlier in before[name]:
                if earlier not in waits:
                    heapq.heappush(queue, (so_far + seconds[earlier], earlier))
    held_in = pipeline.states & pipeline.writer.keys()
    for s in pipeline.stages:
        if s.every:
            # No training stage reads what an optional stage writes, but the next sync waits until it has read.
            held = [away[pipeline.writer[r.field].name] for r in s.reads if r.field in held_in]
            away[s.name] = seconds[s.name] + min(held, default=math.inf)
    return away
