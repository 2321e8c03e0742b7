"""Runs a pipeline, from its file or made in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dataflow.api.arguments import arguments_of
from dataflow.api.notebook import outside_a_loop
from dataflow.api.trace import Trace
from dataflow.errors import ConfigError
from dataflow.graph import Pipeline

if TYPE_CHECKING:
    from dataflow.running.resume import Complete
    from dataflow.running.session import Session

Inputs = Mapping[str, Callable[[int], Any]]


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
