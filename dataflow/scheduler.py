"""The scheduler: a pure, deterministic state machine. Events in, instructions out; no clock, no I/O, no randomness.

The state of a task changes as :data:`_TRANSITIONS` says, by one small method for each change:

    waiting -> ready      all that it depends on is done
    ready -> running      it has a slot of its resource: ``Start``
    running -> done       those that waited for it may be ready; the last one of a step: ``StepDone``, ``Release``
    running -> failed     ends the run: ``Cancel``, ``RunDone``
    ready -> waiting      another policy links anew all tasks that have not begun

Invariants (``check`` asserts them): a task starts once, after all it depends on; a resource never runs more
tasks than it has slots; no ready task waits beside a free slot; the tasks of finished steps are forgotten, so memory
follows the window of unfinished steps, not the length of the run. ``story`` returns the history of a task.

Ready tasks of one resource run in order of the work left before the next remote wait: first those with the least work
between them and a reward request, of this step or a later one. So the next rollout starts before this step's
log-probs, its rewards arrive meanwhile, and a weight sync does not queue behind updates that could wait
(docs/decisions/0002-priority.md). Ties go to the longest remaining path through the step, then to the older step.

The scheduler knows nothing of policies: what a task waits for is in its ``deps``, which :mod:`dataflow.policy` makes. A
policy that depends on what the run measures calls :meth:`Scheduler.switch` (by ``Runner.switch``); another order of
ready tasks is another :meth:`Scheduler._key`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from dataflow.errors import DataflowError
from dataflow.graph import Pipeline, Stage, Task, TaskGraph, TaskId

# --- what runner and scheduler exchange -------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskFinished:
    """A task finished after ``elapsed`` seconds; ``groups`` are the ids it chose, if its stage collects."""

    id: TaskId
    elapsed: float = 0.0
    groups: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TaskFailed:
    """A task raised or its process died; with ``drains`` the step in training ends first, if it needs no such task."""

    id: TaskId
    drains: bool = False


@dataclass(frozen=True)
class ChunkEmitted:
    """A running task emitted a chunk: ``id`` has its step and stage, the chunk's number and the number of chunks."""

    id: TaskId
    groups: tuple[int, ...] | None = None


Event: TypeAlias = TaskFinished | TaskFailed | ChunkEmitted


@dataclass(frozen=True)
class Start:
    """Start this task on these groups (None: all of the step). ``waited_for`` is the dependency that finished last."""

    task: Task
    groups: tuple[int, ...] | None = None
    waited_for: TaskId | None = None


@dataclass(frozen=True)
class Cancel:
    """Stop a running task; its result is not needed any more."""

    id: TaskId


@dataclass(frozen=True)
class StepDone:
    """All tasks of the step have finished, except those of optional stages (``every``)."""

    step: int


@dataclass(frozen=True)
class Release:
    """Every task of the step has finished; its values may be dropped."""

    step: int


@dataclass(frozen=True)
class RunDone:
    """The run is over; ``failed`` is the task that ended it, if any."""

    failed: TaskId | None = None


Instruction: TypeAlias = Start | Cancel | StepDone | Release | RunDone

# --- the state --------------------------------------------------------------------------------------------------

State: TypeAlias = Literal["waiting", "ready", "running", "done", "failed"]
Key: TypeAlias = tuple[float, float, int, int, int, TaskId]
"""By which ready tasks are ordered; the smallest is first. The task is last."""


@dataclass(slots=True)
class _Entry:
    """A task of an unfinished step, and the ``history`` of its state in words.

    ``waiting`` is the number of dependencies that are left, ``last_dep`` the one that ended last.
    """

    task: Task
    state: State = "waiting"
    waiting: int = 0
    last_dep: TaskId | None = None
    history: list[str] = field(default_factory=lambda: ["waiting"])

    @property
    def begun(self) -> bool:
        return self.state not in ("waiting", "ready")


@dataclass(slots=True)
class _Step:
    """An unfinished step.

    Attributes:
        left: number of tasks that have not ended.
        required: of these, those of stages that run on every step.
        chosen: groups of each part that was collected and each chunk that was emitted; None for all.
    """

    tasks: list[TaskId]
    left: int
    required: int
    chosen: dict[TaskId, tuple[int, ...] | None] = field(default_factory=dict)


class Scheduler:
    """Decides which task starts when; the graph is unrolled a window of steps at a time.

    ``estimates`` are seconds per task of a stage, where known; otherwise learned from ``TaskFinished.elapsed``.
    """

    def __init__(self, graph: TaskGraph, estimates: Mapping[str, float] | None = None) -> None:
        self.graph = graph
        self.failed: TaskId | None = None
        self._estimates = _Estimates(graph, estimates or {})
        self._priority = self._estimates.priorities()
        self._entries: dict[TaskId, _Entry] = {}
        self._dependents: dict[TaskId, list[TaskId]] = {}
        self._steps: dict[int, _Step] = {}
        self._unrolled = graph.first - 1
        self._oldest = graph.first  # all earlier steps have reached StepDone
        self._ready: dict[str, list[Key]] = {resource: [] for resource in graph.pipeline.resources}
        self._taken = dict.fromkeys(graph.pipeline.resources, 0)
        self._wanted: set[TaskId] | None = None  # if the run ends early, the tasks that it still needs
        self._finished = False
        self._out: list[Instruction] = []

    def start(self) -> list[Instruction]:
        """Returns the first instructions."""
        self._unroll()
        return self._dispatch()

    def handle(self, event: Event) -> list[Instruction]:
        """Handles one event, of a task that is running; returns the instructions that follow from it."""
        entry = self._entries.get(self.graph.pipeline.task_of(event.id))
        if entry is None or entry.state != "running":
            state = entry.state if entry else "unknown or forgotten"
            raise DataflowError(f"scheduler: {type(event).__name__} for {event.id}, which is {state}, not running.")
        i = event.id
        match event:  # the groups that they name have been checked (executors/parts.py)
            case ChunkEmitted(groups=groups):
                self._steps[i.step].chosen[i] = groups
                entry.history.append(f"emitted {i.part + 1} of {i.parts}")
                self._wake(i, entry.task.id)
            case TaskFailed():
                self._move(entry, "failed")
                if event.drains:
                    self._cut()
                if not event.drains or self._still_wanted(event.id):
                    self._stop()
            case TaskFinished(elapsed=elapsed, groups=groups):
                if entry.task.stage.collects:
                    self._steps[i.step].chosen[i] = groups
                self._estimates.learn(entry.task, elapsed)
                self._move(entry, "done")
                self._unroll()
        return self._dispatch()

    def end_early(self) -> tuple[int, list[Instruction]]:
        """Ends the run as soon as weights, engine and samples are those of one step again.

        That is the last step with a training task that has started. From now on only tasks start that this step and
        those before it need, validations left out; the others that run are cancelled at the end.

        Returns that step, ``graph.first - 1`` if no training has started; and the instructions that follow.
        """
        return self._cut(), self._dispatch()

    def _cut(self) -> int:
        begun = [i.step for i, e in self._entries.items() if e.begun and e.task.stage.role == "trains"]
        # Steps that are over are forgotten; those before the oldest unfinished one have been trained.
        step = max([self._oldest - 1, *begun])
        ahead = [i for i, e in self._entries.items() if i.step <= step and e.task.stage.role != "validates"]
        self._wanted = set()
        while ahead:
            i = ahead.pop()
            if i not in self._wanted and i in self._entries:
                self._wanted.add(i)
                ahead += map(self.graph.pipeline.task_of, self._entries[i].task.deps)
        return step

    def switch(self, policy: Any) -> tuple[int | None, list[Instruction]]:
        """Changes the policy of the steps of which no task has started, and ends nothing for it.

        The change moves to a later step if a task has started that, under the new policy, would have had to wait for a
        task of this step: a sync that overwrites the weights that this step would sample with.

        Returns the first step under it, None if no step is left; and the instructions that follow. If the pipeline
        cannot run under this policy, a :class:`dataflow.policy.SchedulingPolicy`, it raises PolicyError or
        PipelineError, and nothing has changed.
        """
        assert self.graph.switched is not None
        if self._finished or self._wanted is not None:
            return None, []
        begun = (i.step for i, e in self._entries.items() if e.begun)
        over = (step for step in range(self._oldest, self._unrolled + 1) if step not in self._steps)
        first = max([self._oldest - 1, *begun, *over]) + 1
        for step in range(first, self.graph.steps + 1):
            graph = self.graph.switched(step, policy)
            if self._may_become(graph, step):
                self._become(graph, step)
                return step, self._dispatch()
        return None, []

    def stop(self) -> list[Instruction]:
        """Cancels all running tasks, in order, as on an interrupt."""
        self._stop()
        return self._instructions()

    def story(self, task: TaskId) -> str:
        """Returns the history of a task: ``waiting -> ready (sync_weights[10] done) -> running -> failed``."""
        entry = self._entries.get(task)
        return " -> ".join(entry.history) if entry else "unknown"

    def running(self) -> list[TaskId]:
        return sorted(i for i, e in self._entries.items() if e.state == "running")

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        for resource, slots in self.graph.pipeline.resources.items():
            mine = [e for e in self._entries.values() if e.task.stage.on == resource]
            busy = sum(e.state == "running" for e in mine)
            assert busy == self._taken[resource], (resource, busy, self._taken[resource])
            assert slots is None or busy <= slots, f"{resource}: {busy} running in {slots} slots"
            waits = [str(e.task) for e in mine if e.state == "ready" and self._still_wanted(e.task.id)]
            free = slots is None or busy < slots
            assert self._finished or not (free and waits), f"{waits[0]} waits beside a free slot of {resource}"
        for number, step in self._steps.items():
            assert step.left, f"step {number} is kept, but nothing of it is left to run"
            assert step.left == sum(self._entries[i].state != "done" for i in step.tasks)
        assert len(self._entries) == sum(len(step.tasks) for step in self._steps.values())

    # --- changes of state -----------------------------------------------------------------------------------------

    def _move(self, entry: _Entry, state: State) -> None:
        """Changes the state of a task, and does what follows from it."""
        follow = _TRANSITIONS[entry.state, state]
        entry.state = state
        entry.history.append(f"ready ({entry.last_dep} done)" if state == "ready" and entry.last_dep else state)
        follow(self, entry)

    def _waiting_ready(self, entry: _Entry) -> None:
        heapq.heappush(self._ready[entry.task.stage.on], self._key(entry.task.id))

    def _ready_waiting(self, entry: _Entry) -> None:
        ready = self._ready[entry.task.stage.on]
        ready[:] = [key for key in ready if key[-1] != entry.task.id]
        heapq.heapify(ready)

    def _ready_running(self, entry: _Entry) -> None:
        self._taken[entry.task.stage.on] += 1
        self._out.append(Start(entry.task, self._groups_of(entry.task), entry.last_dep))

    def _running_done(self, entry: _Entry) -> None:
        task = entry.task
        self._taken[task.stage.on] -= 1
        self._wake(task.id, task.id)
        step = self._steps[task.id.step]
        step.left -= 1
        if task.stage.every is None:
            step.required -= 1
            if step.required == 0:
                self._out.append(StepDone(task.id.step))
        if step.left == 0:  # an older step may still have a slow validation running
            self._release(task.id.step)

    def _running_failed(self, entry: _Entry) -> None:
        self._taken[entry.task.stage.on] -= 1
        self.failed = entry.task.id

    def _wake(self, done: TaskId, task: TaskId) -> None:
        """Makes tasks ready that waited only for ``done``, which is ``task`` or a chunk of it."""
        for dependent in self._dependents.pop(done, ()):
            waiter = self._entries[dependent]
            waiter.waiting -= 1
            waiter.last_dep = task
            if waiter.waiting == 0:
                self._move(waiter, "ready")

    def _groups_of(self, task: Task) -> tuple[int, ...] | None:
        """Returns the groups that a task works on; None for all of the step."""
        known = self._steps[task.id.step].chosen
        chosen = [groups for i in task.chosen_by if (groups := known[i]) is not None]
        if not chosen:
            return None
        if len(chosen) > 1:
            return tuple(sorted(group for groups in chosen for group in groups))
        groups, (i, n) = chosen[0], task.mini_batch
        size = len(groups) // n
        return groups[i * size : (i + 1) * size]

    # --- the window -------------------------------------------------------------------------------------------

    def _unroll(self) -> None:
        """Unrolls steps up to ``graph.ahead`` past the oldest one that is not done."""
        before = self._unrolled
        while True:
            while self._oldest <= self._unrolled and self._is_over(self._oldest):
                self._oldest += 1
            if self._unrolled >= min(self._oldest + self.graph.ahead, self.graph.steps):
                break
            step = self._unrolled = self._unrolled + 1
            for entry in self._add(step, self.graph.unroll(step)):
                self._link(entry)
            if self._steps[step].required == 0:
                self._out.append(StepDone(step))
            if self._steps[step].left == 0:
                self._release(step)
        if self._unrolled > before:
            self._rank()

    def _add(self, step: int, tasks: Sequence[Task]) -> list[_Entry]:
        required = sum(task.stage.every is None for task in tasks)
        self._steps[step] = _Step([task.id for task in tasks], len(tasks), required)
        entries = {task.id: _Entry(task) for task in tasks}
        self._entries |= entries
        return list(entries.values())

    def _release(self, step: int) -> None:
        """Forgets a step whose tasks have all ended."""
        for task in self._steps.pop(step).tasks:
            del self._entries[task]
        self._out.append(Release(step))

    def _is_over(self, step: int) -> bool:
        return step not in self._steps or self._steps[step].required == 0

    def _link(self, entry: _Entry) -> None:
        """Lets a task wait for all that it depends on, or makes it ready."""
        unmet = [dep for dep in entry.task.deps if not self._is_done(dep)]
        entry.waiting = len(unmet)
        for dep in unmet:
            self._dependents.setdefault(dep, []).append(entry.task.id)
        if not unmet:
            self._move(entry, "ready")

    def _is_done(self, dep: TaskId) -> bool:
        """Whether a task has ended, or a chunk was emitted."""
        # A dependency may be of a later step: the next write of a state waits for readers of the old version.
        step = self._steps.get(dep.step)
        if step is None:
            return dep.step <= self._unrolled
        entry = self._entries.get(dep)
        return dep in step.chosen if entry is None else entry.state == "done"

    # --- another policy ---------------------------------------------------------------------------------------

    def _may_become(self, graph: TaskGraph, first: int) -> bool:
        """Whether each task that has begun waited for all that it depends on in a graph that differs from ``first``."""
        for step in range(max(graph.first, first - graph.max_staleness - 1), min(first, self._unrolled + 1)):
            for before, after in zip(self.graph.unroll(step), graph.unroll(step), strict=True):
                entry = self._entries.get(before.id)
                if (entry is None or entry.begun) and not set(after.deps).issubset(before.deps):
                    return False
        return True

    def _become(self, graph: TaskGraph, first: int) -> None:
        """Takes another graph, which differs from ``first`` on; all tasks that have not begun are linked anew."""
        self.graph = graph
        self._dependents.clear()
        for entry in self._entries.values():
            if entry.state == "ready":
                self._move(entry, "waiting")
        for number, step in self._steps.items():
            tasks = graph.unroll(number)
            if number >= first:
                for i in step.tasks:
                    del self._entries[i]
                self._add(number, tasks)
            for task in tasks:
                if not self._entries[task.id].begun:
                    self._entries[task.id].task = task
        for entry in self._entries.values():
            if not entry.begun:
                self._link(entry)
        self._unroll()
        self._rank()

    # --- starting ---------------------------------------------------------------------------------------------

    def _key(self, i: TaskId) -> Key:
        return (*self._priority[i.stage], i.step, self._entries[i].task.rank, i.part, i)

    def _rank(self) -> None:
        """Sets the priority of each stage from the estimates of all stages, and re-sorts the ready tasks."""
        self._priority = self._estimates.priorities()
        for ready in self._ready.values():
            ready[:] = [self._key(key[-1]) for key in ready]
            heapq.heapify(ready)

    def _still_wanted(self, i: TaskId) -> bool:
        return self._wanted is None or i in self._wanted

    def _dispatch(self) -> list[Instruction]:
        """Starts ready tasks while there are slots, ends the run if nothing is left; returns all instructions."""
        for resource, slots in self.graph.pipeline.resources.items():
            ready = self._ready[resource]
            while ready and not self._finished and (slots is None or self._taken[resource] < slots):
                i = heapq.heappop(ready)[-1]
                if self._still_wanted(i):
                    self._move(self._entries[i], "running")
        if not self._finished and self._nothing_left():
            self._stop()
        return self._instructions()

    def _nothing_left(self) -> bool:
        """Whether nothing is left that the run needs."""
        if self._wanted is None:
            return not self._entries and self._unrolled == self.graph.steps
        return not any(i in self._wanted and e.state != "done" for i, e in self._entries.items())

    def _stop(self) -> None:
        self._finished = True
        self._out += [*map(Cancel, self.running()), RunDone(self.failed)]

    def _instructions(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out


_TRANSITIONS: Mapping[tuple[State, State], Callable[[Scheduler, _Entry], None]] = {
    ("waiting", "ready"): Scheduler._waiting_ready,
    ("ready", "waiting"): Scheduler._ready_waiting,
    ("ready", "running"): Scheduler._ready_running,
    ("running", "done"): Scheduler._running_done,
    ("running", "failed"): Scheduler._running_failed,
}
"""What follows from each change of a task's state; any other change is an error."""


# --- the order of ready tasks -----------------------------------------------------------------------------------

# Estimates for a stage that was not measured yet; a wait on a remote service (no slot limit) is assumed to be long.
GUESS_S = 1.0
GUESS_WAIT_S = 8.0
# Weight of the newest measurement in a stage's running mean.
NEWEST = 0.5


class _Estimates:
    """The seconds that each stage takes in one step, all parts together: their number may change with the policy.

    ``estimates`` are seconds per task of a stage, where known; the others are learned.
    """

    def __init__(self, graph: TaskGraph, estimates: Mapping[str, float]) -> None:
        self._graph = graph
        self._known = {name: each * graph.parts.get(name, 1) for name, each in estimates.items()}

    def learn(self, task: Task, elapsed: float) -> None:
        """Takes the seconds of a task into account."""
        seconds = elapsed * task.id.parts
        known = self._known.setdefault(task.stage.name, seconds)
        self._known[task.stage.name] = known + NEWEST * (seconds - known)

    def priorities(self) -> dict[str, tuple[float, float]]:
        """Returns the priority of each stage, lowest first: work before the next remote wait, then the longest path."""
        pipeline = self._graph.pipeline
        seconds = {s.name: self._seconds(s) for s in pipeline.stages}
        upward: dict[str, float] = {}
        for s in reversed(pipeline.order):
            behind = [upward[t.name] for _s, t, _field, lag in pipeline.edges if _s is s and lag == "none"]
            upward[s.name] = max(behind, default=0.0) + seconds[s.name]
        away = _work_until_a_wait(pipeline, seconds)
        return {s.name: (away[s.name], -upward[s.name]) for s in pipeline.stages}

    def _seconds(self, s: Stage) -> float:
        guess = GUESS_WAIT_S if self._graph.pipeline.resources[s.on] is None else GUESS_S
        return self._known.get(s.name, guess * self._graph.parts[s.name])


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
