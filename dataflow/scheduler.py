"""The scheduler: a pure, deterministic state machine. Events in, instructions out; no clock, no I/O, no randomness.

Invariants (``check`` asserts them): a task starts once, after all it depends on; a resource never runs more
tasks than it has slots; no ready task waits beside a free slot; the tasks of finished steps are forgotten, so memory
follows the window of unfinished steps, not the length of the run.

Ready tasks of one resource run in order of the work left before the next remote wait: first those with the least work
between them and a reward request, of this step or a later one. So the next rollout starts before this step's
log-probs, its rewards arrive meanwhile, and a weight sync does not queue behind updates that could wait
(docs/decisions/0002-priority.md). Ties go to the longest remaining path through the step, then to the older step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.errors import DataflowError
from dataflow.graph import Task, TaskGraph, TaskId
from dataflow.tasks.entry import Entry
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
from dataflow.tasks.groups import groups_of
from dataflow.tasks.priority import Estimates
from dataflow.tasks.slots import Key, Slots


class Scheduler:
    """Decides which task starts when.

    Args:
        graph: the task graph; unrolled a window of steps at a time.
        estimates: seconds per task of a stage, where known; otherwise learned from ``TaskFinished.elapsed``.
    """

    def __init__(self, graph: TaskGraph, estimates: Mapping[str, float] | None = None) -> None:
        self.graph = graph
        self.failed: TaskId | None = None
        self._estimates = Estimates(graph, estimates or {})
        self._entries: dict[TaskId, Entry] = {}
        self._dependents: dict[TaskId, list[TaskId]] = {}
        self._open: dict[int, set[TaskId]] = {}
        self._required: dict[int, int] = {}
        self._unrolled = graph.first - 1
        self._oldest = graph.first  # all earlier steps have reached StepDone
        self._tasks: dict[int, list[TaskId]] = {}
        self._groups: dict[TaskId, tuple[int, ...] | None] = {}
        self._emitted: dict[int, set[TaskId]] = {}
        self._slots = Slots(graph.pipeline.resources)
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
        self._slots.taken[entry.task.stage.on] -= 1
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
        wanted = self._wanted = set[TaskId]()
        while ahead:
            i = ahead.pop()
            if i not in wanted and i in self._entries:
                wanted.add(i)
                ahead += map(self.graph.pipeline.task_of, self._entries[i].task.deps)
        return step, self._dispatch([])

    def switch(self, policy: Any) -> tuple[int | None, list[Instruction]]:
        """Changes the policy of the steps of which no task has started, and ends nothing for it.

        A later step is the first under the new policy if a task has started that would have to wait for one of this
        step: a sync that overwrites the weights which it would sample with.

        Args:
            policy: the new policy, a :class:`dataflow.policy.SchedulingPolicy`.

        Returns:
            The first step under it, None if no step is left; and the instructions that follow.

        Raises:
            PolicyError, PipelineError: the pipeline cannot run under this policy; nothing has changed.
        """
        assert self.graph.switched is not None
        begun = (i.step for i, e in self._entries.items() if e.begun)
        over = (step for step in range(self._oldest, self._unrolled + 1) if step not in self._open)
        first = max([self._oldest - 1, *begun, *over]) + 1
        if self._finished or self._wanted is not None:
            first = self.graph.steps + 1
        for step in range(first, self.graph.steps + 1):
            graph = self.graph.switched(step, policy)
            if self._may_become(graph, step):
                return step, self._become(graph, step)
        return None, []

    def _may_become(self, graph: TaskGraph, first: int) -> bool:
        """Whether each task that has begun waited for all that it depends on in a graph that differs from ``first``."""
        for step in range(max(graph.first, first - graph.max_staleness - 1), min(first, self._unrolled + 1)):
            for before, after in zip(self.graph.unroll(step), graph.unroll(step), strict=True):
                entry = self._entries.get(before.id)
                if (entry is None or entry.begun) and not set(after.deps).issubset(before.deps):
                    return False
        return True

    def _become(self, graph: TaskGraph, first: int) -> list[Instruction]:
        """Takes another graph, which differs from ``first`` on; all tasks that have not begun are linked anew."""
        self.graph = graph
        self._dependents.clear()
        self._slots.clear()
        known, self._entries = self._entries, {}
        for step in sorted(self._open):
            tasks = graph.unroll(step)
            if step >= first:
                self._register(step, tasks)
            for task in tasks:
                entry = self._entries[task.id] = known[task.id] if step < first else Entry(task)
                if not entry.begun:
                    entry.task = task
        for entry in self._entries.values():
            if not entry.begun:
                self._link(entry)
        out: list[Instruction] = []
        self._unroll(out)
        self._rank()
        return self._dispatch(out)

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
        taken = dict.fromkeys(self._slots.taken, 0)
        ready: dict[str, list[TaskId]] = {resource: [] for resource in taken}
        for s, e in ((e.task.stage, e) for e in self._entries.values()):
            if e.state == "ready":
                ready[s.on].append(e.task.id)
            elif e.state == "running":
                taken[s.on] += 1
        for resource, slots in self.graph.pipeline.resources.items():
            busy = taken[resource]
            assert busy == self._slots.taken[resource], (resource, busy, self._slots.taken[resource])
            assert slots is None or busy <= slots, f"{resource}: {busy} running in {slots} slots"
            free = slots is None or busy < slots
            waits = [i for i in ready[resource] if self._wanted is None or i in self._wanted]
            assert self._finished or not (free and waits), f"{waits[0]} waits beside a free slot of {resource}"
        for step, left in self._open.items():
            assert left, f"step {step} is kept, but nothing of it is left to run"
        assert len(self._entries) == sum(map(len, self._tasks.values()))

    # --- events -------------------------------------------------------------------------------------------

    def _emit(self, entry: Entry, event: ChunkEmitted) -> list[Instruction]:
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

    def _finish(self, entry: Entry, event: TaskFinished) -> list[Instruction]:
        task = entry.task
        if task.emits > 1:
            got = sum(i.stage == task.id.stage for i in self._emitted.get(task.id.step, ()))
            if got != task.emits:
                raise DataflowError(f"scheduler: {task} ended after {got} of {task.emits} chunks.")
        entry.state = "done"
        entry.history.append("done")
        self._estimates.learn(task, event.elapsed)
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

    def _fail(self, entry: Entry, event: TaskFailed) -> list[Instruction]:
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
        self._register(step, tasks)
        for task in tasks:
            entry = self._entries[task.id] = Entry(task)
            self._link(entry)

    def _register(self, step: int, tasks: Sequence[Task]) -> None:
        self._tasks[step] = [t.id for t in tasks]
        self._open[step] = set(self._tasks[step])
        self._required[step] = sum(t.stage.every is None for t in tasks)

    def _link(self, entry: Entry) -> None:
        """Lets a task wait for all that it depends on, or makes it ready."""
        unmet = [dep for dep in entry.task.deps if not self._is_done(dep)]
        entry.waiting = len(unmet)
        for dep in unmet:
            self._dependents.setdefault(dep, []).append(entry.task.id)
        if not unmet:
            self._make_ready(entry)
        elif entry.state == "ready":
            entry.state = "waiting"
            entry.history.append("waiting")

    def _is_done(self, task: TaskId) -> bool:
        # A dependency may be of a later step: the next write of a state waits for readers of the old version.
        if task.step <= self._unrolled and task.step not in self._open:
            return True
        entry = self._entries.get(task)
        if entry is None:
            return task in self._emitted.get(task.step, ())
        return entry.state == "done"

    def _make_ready(self, entry: Entry) -> None:
        if entry.state != "ready":
            entry.history.append(f"ready ({entry.last_dep} done)" if entry.last_dep else "ready")
        entry.state = "ready"
        self._slots.add(entry.task.stage.on, self._key(entry.task.id))

    def _key(self, i: TaskId) -> Key:
        entry = self._entries[i]
        return (*self._priority[i.stage], i.step, entry.task.rank, i.part, i)

    def _rank(self) -> None:
        """Sets the priority of each stage from the estimates of all stages, and re-sorts the ready tasks."""
        self._priority = self._estimates.priorities()
        self._slots.sort(self._key)

    # --- starting -----------------------------------------------------------------------------------------

    def _start(self, entry: Entry, out: list[Instruction]) -> None:
        entry.state = "running"
        entry.history.append("running")
        out.append(Start(entry.task, groups_of(entry.task, self._groups), entry.last_dep))

    def _dispatch(self, out: list[Instruction]) -> list[Instruction]:
        for i in self._slots.take(self._wanted):
            self._start(self._entries[i], out)
        if not self._finished and self._over():
            out += self.stop()
        return out

    def _over(self) -> bool:
        """Whether nothing is left that the run needs."""
        if self._wanted is None:
            return not self._entries and self._unrolled == self.graph.steps
        return not any(i in self._wanted and e.state != "done" for i, e in self._entries.items())
