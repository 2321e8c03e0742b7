"""What the command line does, as calls: run, check, resume, simulate and plan; and a trace that can be saved."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from dataflow.config.keys.nested import flat
from dataflow.errors import ConfigError, DataError
from dataflow.executors.virtual import Costs, End, VirtualExecutor, chunks_of, groups_by_index
from dataflow.graph import Pipeline, Task, TaskGraph
from dataflow.runner import Runner
from dataflow.running.preparing.check import Finding
from dataflow.timeline import spans

if TYPE_CHECKING:
    from dataflow.planning.plan import Plan
    from dataflow.running.resume import Complete
    from dataflow.running.session import Session

__all__ = ["Finding", "Run", "Trace", "check", "plan", "resume", "run", "simulate"]
Inputs = Mapping[str, Callable[[int], Any]]
Result = TypeVar("Result")


class Trace(spans.Trace):
    """All spans of a run or of a simulation."""

    @classmethod
    def load(cls, run: str | Path) -> Trace:
        """Returns the trace of a run.

        Args:
            run: its directory, or its ``trace.json``.

        Raises:
            DataError: there is none, or it cannot be read.
        """
        from dataflow.timeline import perfetto

        return cls.of(perfetto.load(str(run)))

    @classmethod
    def of(cls, trace: spans.Trace) -> Trace:
        """Returns a trace with the items of another one."""
        return cls(trace.spans, trace.marks, trace.levels, trace.meta)

    def save(self, path: str | Path) -> Path:
        """Writes the trace; the extension selects the kind.

        Args:
            path: ``.html`` is an interactive page, ``.png`` and ``.svg`` are pictures, ``.txt`` is a text, and
                ``.json`` opens in Perfetto, and that of a run of a pipeline file can be planned from. An existing file
                is replaced.

        Returns:
            The path.

        Raises:
            DataError: another extension, or the file cannot be written.
        """
        from dataflow.files import replaced, unwritable
        from dataflow.timeline import files, perfetto

        target = Path(path)
        kinds = (*files.KINDS, ".txt", ".json")
        if target.suffix.lower() not in kinds:
            raise DataError(f"save('{path}'): no such kind, '{target.suffix}'; give a name in {', '.join(kinds)}.")
        if (why := unwritable(target)) is not None:
            raise DataError(f"save('{path}'): {why}")
        if target.suffix.lower() == ".json":
            perfetto.write(self, target)
        elif target.suffix.lower() == ".txt":
            with replaced(target) as temporary:
                temporary.write_text(self.text() + "\n", encoding="utf-8")
        else:
            files.draw({target.stem: self}, target)
        return target

    def text(self, width: int = 100) -> str:
        """Returns the timeline as text, ``width`` columns wide."""
        from dataflow.timeline.text import gantt, idle_lines

        return "\n".join([gantt(self, width), *idle_lines(self)])

    def _repr_html_(self) -> str:
        """Returns the picture of the timeline, and what its GPUs waited for, for notebooks."""
        from dataflow.drawing.notebook import shown
        from dataflow.timeline import files
        from dataflow.timeline.text import idle_lines

        policy = str(self.meta.get("policy") or "timeline")
        if not self.spans:
            return shown("no task has ended yet")
        return shown("\n".join(idle_lines(self)), lambda path: files.draw({policy: self}, path), "timeline")


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        directory: of its files.
        summary: the content of its ``summary.json``.
    """

    directory: Path
    summary: Mapping[str, Any]

    @property
    def trace(self) -> Trace:
        """Its trace, read from its file."""
        return Trace.load(self.directory)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Its metrics, a row for each step in which some were logged, with the column ``step``."""
        from dataflow.running.reporting.tracking import METRICS, read_metrics

        return list(read_metrics(self.directory / METRICS))

    def _repr_html_(self) -> str:
        """Returns the timeline's picture and the results, for notebooks."""
        from dataflow.drawing.notebook import shown
        from dataflow.running.reporting.progress import end_table
        from dataflow.timeline import files

        text = f"{end_table(dict(self.summary))}\n\n{self.summary['status']}: {self.directory}"
        trace = self.trace
        policy = str(self.summary["policy"])
        return shown(text, (lambda path: files.draw({policy: trace}, path)) if trace.spans else None, "timeline")


def run(
    pipeline: Pipeline | str | Path, *overrides: str, inputs: Inputs | None = None, quiet: bool = True, **keys: Any
) -> Run:
    """Runs a pipeline to the end, as ``dataflow run`` does.

    Args:
        pipeline: its file (or the ``config.yaml`` of a run), or the pipeline itself, which runs inline in this process
            unless ``executor="ray"``.
        *overrides: ``key=value`` arguments, as of the command line.
        inputs: the pipeline's input fields, a function of the step each; for a pipeline made in Python.
        quiet: whether to show no progress.
        **keys: configuration by name: ``run(p, policy="both", steps=5, trainer={"lr": 1e-4})``.

    Returns:
        The run, with its files in ``runs/NAME``; with ``resume="auto"`` also one that was complete before.

    Raises:
        UserError: a key, the pipeline or the data is wrong, in one sentence; nothing has been written.
        StageFailed: a task failed; trace and metrics so far are on disk.
    """
    from dataflow.config.keys.overrides import parse_overrides
    from dataflow.config.loading.saved import load
    from dataflow.running.reporting.progress import Progress
    from dataflow.running.resume import began
    from dataflow.running.session import Session

    arguments = _arguments_of(overrides, keys)
    if isinstance(pipeline, Pipeline):
        module = _module(pipeline, inputs or {})
        config = parse_overrides(module.Config, arguments)
    elif inputs is not None:
        raise ConfigError("run: a pipeline file supplies its inputs itself; define inputs(config) in it.")
    else:
        module, config = load(pipeline, arguments)
    return _finish(lambda: began(module, config, arguments, Progress(quiet=quiet), Session))


def resume(directory: str | Path, *overrides: str, quiet: bool = True, **keys: Any) -> Run:
    """Resumes a run from its last whole checkpoint, as ``dataflow resume`` does.

    Args:
        directory: of the run.
        *overrides: ``key=value`` arguments that change its configuration.
        quiet: whether to show no progress.
        **keys: the same by name: ``resume(path, steps=60)``.

    Raises:
        UserError: there is no such run, it has no checkpoint, or a key may not change; in one sentence.
        StageFailed: a task failed; trace and metrics so far are on disk.
    """
    from dataflow.running.reporting.progress import Progress
    from dataflow.running.resume import resumed

    return _finish(lambda: resumed(Path(directory), _arguments_of(overrides, keys), Progress(quiet=quiet)))


def check(pipeline: str | Path, *overrides: str, **keys: Any) -> list[Finding]:
    """Makes all checks of a run, as ``dataflow run ... dry=true`` does; starts nothing and leaves nothing behind.

    Args:
        pipeline: its file, a recipe, or the ``config.yaml`` of a run.
        *overrides: ``key=value`` arguments, as of the command line.
        **keys: configuration by name, as of :func:`run`.

    Returns:
        What each check found; ``state`` is ``ok``, ``warning``, ``problem`` or ``not checked``.
    """
    from dataflow.config.loading.saved import load
    from dataflow.running.dry import dry_run

    return _outside_a_loop(lambda: dry_run(partial(load, pipeline), _arguments_of(overrides, keys)))


def plan(source: str | Path, *overrides: str, **keys: Any) -> Plan:
    """Returns the predicted time of every policy, with advice.

    Args:
        source: a run's directory or trace, a verl log, or a ``costs.yaml``.
        *overrides: ``key=value`` arguments, as of ``dataflow plan``.
        **keys: the same by name: ``plan(run, reward={"concurrency": 128})``.

    Raises:
        UserError: the source or a key is wrong, in one sentence.
    """
    from dataflow.planning.plan import make_plan

    arguments = _arguments_of(overrides, keys)
    return _outside_a_loop(lambda: make_plan(str(source), arguments))


def _arguments_of(overrides: tuple[str, ...], keys: Mapping[str, Any]) -> list[str]:
    """Returns ``key=value`` arguments.

    Args:
        overrides: arguments in this form already.
        keys: values by key; a mapping for a section.

    >>> _arguments_of(("seed=1",), {"policy": "both", "trainer": {"lr": 1e-4, "betas": (0.9, 0.99)}, "name": None})
    ['seed=1', 'policy=both', 'trainer.lr=0.0001', 'trainer.betas=[0.9, 0.99]', 'name=null']
    """
    given = (f"{key}={of if isinstance(of, str) else json.dumps(of, default=str)}" for key, of in flat(keys))
    return [*overrides, *given]


def _outside_a_loop(work: Callable[[], Result]) -> Result:
    """Calls a function; where this thread has an event loop already (a notebook), in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, "dataflow run") as pool:
        return pool.submit(work).result()


def _module(pipeline: Pipeline, inputs: Inputs) -> ModuleType:
    """Returns what a pipeline file would be loaded as."""
    from dataflow.config.base import PipelineConfig

    module = ModuleType("dataflow_pipeline_in_python")
    module.__dict__.update(
        __file__="", Config=PipelineConfig, pipeline=lambda config: pipeline, inputs=lambda config: inputs
    )
    return module


def _finish(begin: Callable[[], Session | Complete]) -> Run:
    from dataflow.running.resume import Complete

    def work() -> Run:
        session = begin()
        summary = session.summary if isinstance(session, Complete) else session.run()
        return Run(session.directory, summary)

    return _outside_a_loop(work)


class StepSeconds(Costs):
    """The same seconds for each step of a stage, shared equally by its tasks of the step.

    A stage that collects rewards takes no time of its own: they arrive evenly over its seconds, counted from the end of
    the request, in the order of the groups. Without a stage that requests, it is a stage like any other.

    Args:
        graph: whose tasks run.
        seconds: by stage.
    """

    def __init__(self, graph: TaskGraph, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds
        self._groups = graph.groups or 1
        self._requests = {s.name for s in graph.pipeline.with_role("requests")}
        self._requested: dict[int, float] = {}

    def start(self, task: Task, groups: tuple[int, ...] | None, now: float) -> End:
        """See :meth:`Costs.start`."""
        i, seconds = task.id, self._seconds[task.id.stage]
        end = now + seconds / i.parts
        if task.stage.collects:
            if self._requests:
                end = max(now, self._requested[i.step] + seconds * (i.part + 1) / i.parts)
            return End(end, groups=groups_by_index(task, self._groups))
        if i.stage in self._requests:
            self._requested.setdefault(i.step, end)
        return End(end, chunks=chunks_of(task, self._groups, now, end))


def simulate(graph: TaskGraph, costs: Costs | Mapping[str, float]) -> Trace:
    """Runs a task graph on the virtual clock, without calling any stage.

    Args:
        graph: of :func:`dataflow.expand`.
        costs: seconds of each stage in one step, all its tasks together; for a stage that collects rewards, the seconds
            from the request to the last reward of a step alone. Or an object that gives the end of each task.

    Returns:
        The trace, in seconds from the first task.

    Raises:
        ConfigError: a stage has no seconds.

    >>> from dataflow import Pipeline, expand, preset, stage
    >>> @stage(writes="text", on="gpu")
    ... def write(prompts): ...
    >>> graph = expand(Pipeline([write], inputs=["prompts"]), preset("baseline", 1), steps=3)
    >>> simulate(graph, {"write": 2.0}).wall
    6.0
    """
    pipeline = graph.pipeline
    if not isinstance(costs, Costs):
        if missing := [s.name for s in pipeline.stages if s.name not in costs]:
            raise ConfigError(f"simulate: no seconds for stage {', '.join(map(repr, missing))}; give all of a step.")
        costs = StepSeconds(graph, costs)
    trace = Trace(meta={"resources": dict(pipeline.resources), "steps": graph.steps, "status": "finished"})
    trace.meta["job"] = {"pipeline": pipeline.facts()}
    inputs = dict.fromkeys(pipeline.inputs, lambda _step: None)
    runner = Runner(graph, VirtualExecutor(costs), inputs=inputs, trace=trace)
    _outside_a_loop(lambda: asyncio.run(runner.run()))
    return trace
