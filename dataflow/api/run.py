"""What the commands do, as calls: runs a pipeline from its file or made in Python, resumes, checks and plans."""

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

from dataflow.api.trace import Trace
from dataflow.config.keys.nested import flat
from dataflow.errors import ConfigError
from dataflow.graph import Pipeline
from dataflow.running.preparing.check import Finding

if TYPE_CHECKING:
    from dataflow.planning.plan import Plan
    from dataflow.running.resume import Complete
    from dataflow.running.session import Session

Inputs = Mapping[str, Callable[[int], Any]]
Result = TypeVar("Result")


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

    arguments = arguments_of(overrides, keys)
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

    return _finish(lambda: resumed(Path(directory), arguments_of(overrides, keys), Progress(quiet=quiet)))


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

    return outside_a_loop(lambda: dry_run(partial(load, pipeline), arguments_of(overrides, keys)))


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

    arguments = arguments_of(overrides, keys)
    return outside_a_loop(lambda: make_plan(str(source), arguments))


def arguments_of(overrides: tuple[str, ...], keys: Mapping[str, Any]) -> list[str]:
    """Returns ``key=value`` arguments.

    Args:
        overrides: arguments in this form already.
        keys: values by key; a mapping for a section.

    >>> arguments_of(("seed=1",), {"policy": "both", "trainer": {"lr": 1e-4, "betas": (0.9, 0.99)}, "name": None})
    ['seed=1', 'policy=both', 'trainer.lr=0.0001', 'trainer.betas=[0.9, 0.99]', 'name=null']
    """
    given = (f"{key}={of if isinstance(of, str) else json.dumps(of, default=str)}" for key, of in flat(keys))
    return [*overrides, *given]


def outside_a_loop(work: Callable[[], Result]) -> Result:
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

    return outside_a_loop(work)
