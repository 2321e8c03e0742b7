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
    for running in [e.task for e in entries if e.state == "running" and e.task.stage.host is not None]:
        resource = running.stage.on
        if pipeline.resources[resource] == 1:
            left = [e for e in entries if not e.begun and e.task.stage.on == resource]
            tasks = sorted((e.task for e in left), key=lambda task: key(task.id))
            task = None if any(e.queued for e in left) else next_after(running, tasks, waits_for)
            # The function of an input may raise.
            if task is not None and can_follow(task, running) and inputs.isdisjoint(i.field for i in task.inputs):
                found.append((task, running))
    return found


def can_follow(task: Task, running: Task) -> bool:
    """Whether a task can be sent to the process of a running one, to begin there when that one ends."""
    host = running.stage.host
    return (
        host is not None
        and task.stage.host is host
        and host.lasting
        and not iscoroutinefunction(running.stage.fn)  # while it waits, a queued one would begin
        and task.emits == running.emits == 1
        and task.stage.every is None
        and not running.stage.collects  # the groups of the next task are known
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
