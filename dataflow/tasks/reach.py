"""How far ahead the tasks of a pipeline depend on each other, which is how many steps must be unrolled. Pure."""

from __future__ import annotations

import functools
import graphlib
from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from typing import Any

from dataflow.errors import PipelineError
from dataflow.graph import Pipeline, Stage, TaskId
from dataflow.tasks.unroll import Unroller

_WIRED = [f.name for f in fields(Stage) if f.name not in ("fn", "services", "accepts", "whole_batch", "imports")]


def reaches_of(pipeline: Pipeline, sizes: Hashable) -> dict[Any, int]:
    """Returns what :func:`reach` has found so far, by the caller's keys: a plan simulates the same policies again.

    Pipelines share it whose tasks depend on each other alike: those that differ in functions and services alone.

    Args:
        pipeline: the stages of one step.
        sizes: what else decides the tasks of all of these keys.
    """
    try:
        return _reaches(
            (pipeline.inputs, tuple(tuple(getattr(s, name) for name in _WIRED) for s in pipeline.stages)), sizes
        )
    except TypeError:  # a stage that was made with lists, which cannot be looked up
        return {}


@functools.lru_cache(maxsize=128)
def _reaches(_wiring: Hashable, _sizes: Hashable) -> dict[Any, int]:
    return {}


def reach(pipeline: Pipeline, unroller: Callable[[Pipeline, range], Unroller], known: int, half: int) -> int:
    """Returns how many steps ahead a task may depend on another, so that the window holds both.

    The next write of a state waits for readers in later steps, which may wait for other writes in turn. Optional
    stages count at every step here, so that a wrong pipeline fails in a short run as in a long one.

    Args:
        pipeline: the stages of one step.
        unroller: makes what unrolls a pipeline over steps.
        known: the steps whose tasks count.
        half: more steps than a task of a valid pipeline may depend ahead.

    Raises:
        PipelineError: tasks depend on each other, or on ever later steps.
    """
    stages = [replace(s, every=s.every and 1) for s in pipeline.stages]
    always = Pipeline(stages, pipeline.inputs, pipeline.resources)
    steps = range(1, known + half + 1)
    unroll = unroller(always, steps).step
    deps = {t.id: [always.task_of(dep) for dep in t.deps] for step in steps for t in unroll(step)}
    latest: dict[TaskId, int] = {}
    try:
        for i in graphlib.TopologicalSorter(deps).static_order():
            latest[i] = max([i.step, *(latest[dep] for dep in deps[i])])
    except graphlib.CycleError as error:
        cycle = " -> ".join(str(i) for i in reversed(error.args[1]))
        raise PipelineError(f"the tasks wait for each other: {cycle}; let one stage read another version.") from error
    ahead, task = max((step - i.step, i) for i, step in latest.items() if i.step <= known)
    if ahead > half:
        raise PipelineError(
            f"stage '{task.stage}' waits for stages of ever later steps, through the states they read; "
            "let one stage read another version."
        )
    return ahead
