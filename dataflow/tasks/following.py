"""Which task gets a slot next, as far as that is certain while another one runs in it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from inspect import iscoroutinefunction

from dataflow.graph import Pipeline, Task, TaskId
from dataflow.tasks.entry import Entry
from dataflow.tasks.slots import Key

WaitsFor = Callable[[TaskId], Collection[TaskId] | None]
"""Returns the tasks that a task waits for; None if it has begun, or is of a step that is not unrolled."""


def following(
    entries: Collection[Entry], pipeline: Pipeline, key: Callable[[TaskId], Key], waits_for: WaitsFor
) -> list[tuple[Task, Task]]:
    """Returns tasks that can be queued in their process, each with the running one that it follows there.

    Args:
        entries: the tasks of the unfinished steps.
        pipeline: of the tasks.
        key: by which ready tasks are ordered.
        waits_for: what a task waits for.
    """
    found, inputs = [], frozenset(pipeline.inputs)
    for running in [e.task for e in entries if e.state == "running" and can_lead(e.task, pipeline)]:
        left = [e for e in entries if not e.begun and e.task.stage.on == running.stage.on]
        if any(e.queued for e in left):
            continue
        task = next_after(running, sorted((e.task for e in left), key=lambda task: key(task.id)), waits_for)
        # The function of an input may raise.
        if task is not None and can_follow(task, running) and inputs.isdisjoint(i.field for i in task.inputs):
            found.append((task, running))
    return found


def can_lead(running: Task, pipeline: Pipeline) -> bool:
    """Whether a task can be queued behind a running one at all."""
    host = running.stage.host
    return (
        host is not None
        and host.lasting
        and pipeline.resources[running.stage.on] == 1
        and not iscoroutinefunction(running.stage.fn)  # while it waits, a queued one would begin
        and running.emits == 1
        and not running.stage.collects  # the groups of the next task are known
    )


def can_follow(task: Task, running: Task) -> bool:
    """Whether a task can be sent to the process of a running one, to begin there when that one ends.

    It runs then in any case. So it is one that an early end needs, too: it trains, or the running one trains its step
    or a later one.
    """
    trains = task.stage.role == "trains"
    return (
        task.stage.host is running.stage.host
        and task.emits == 1
        and task.stage.every is None
        and task.stage.role != "validates"
        and (trains or (running.stage.role == "trains" and task.id.step <= running.id.step))
    )


def next_after(running: Task, tasks: Sequence[Task], waits_for: WaitsFor) -> Task | None:
    """Returns the task that gets the slot of a running one when that one ends; None if this is not certain.

    It waits for nothing else, and each task before it waits for one that cannot end earlier.

    Args:
        running: the task in the only slot of its resource.
        tasks: of this resource that have not begun, by priority.
        waits_for: what a task waits for.
    """

    @cache
    def may_end(i: TaskId) -> bool:
        """Whether a task may end before the running one."""
        left = waits_for(i)
        return left is None or (i not in queued and all(dep != running.id and may_end(dep) for dep in left))

    queued = {task.id for task in tasks}
    for task in tasks:
        left = waits_for(task.id) or ()
        if all(dep == running.id for dep in left):
            return task
        if all(dep == running.id or may_end(dep) for dep in left):
            return None
    return None
