"""One attempt to train: builds the services, restores a checkpoint, runs the task graph, and closes the services.

A run has one attempt, and another one after each death of a service that only a checkpoint can restore.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from loguru import logger

from dataflow.config.base import BaseConfig
from dataflow.config.loading.saved import CONFIG, read_values
from dataflow.errors import DataflowError, NotOffered, RunError, ServiceLost
from dataflow.executors.base import Executor
from dataflow.graph import Task, TaskGraph
from dataflow.policy import SchedulingPolicy, expand
from dataflow.runner import Restored, Runner
from dataflow.running.record import Record
from dataflow.running.replanning import AutoPolicy
from dataflow.running.reporting.progress import Progress
from dataflow.running.saving.checkpoints import Checkpoint, CheckpointStore
from dataflow.running.saving.export import MODEL, card
from dataflow.running.services.nodes import node_labels
from dataflow.stages.checkpoint import FAILED
from dataflow.system.supervisor import report
from dataflow.timeline.spans import Trace
from dataflow.usercode.failures import causes_of

if TYPE_CHECKING:
    from dataflow.running.services.served_models import ServedModels

_MOST_FAILED = 3
"""Checkpoints that may fail one after another before the run ends."""


class Attempt:
    """Runs a task graph on an executor of its own.

    Args:
        config: of the run.
        graph: its tasks, from the first step that is left.
        inputs: input fields of the pipeline, a function of the step each.
        record: of the run.
        progress: shows the progress.
        models: the reward models that the run serves; None without any.
        auto: changes the policy; None for a run that keeps it.
    """

    def __init__(
        self,
        config: BaseConfig,
        graph: TaskGraph,
        inputs: Mapping[str, Callable[[int], Any]],
        record: Record,
        progress: Progress,
        models: ServedModels | None = None,
        auto: AutoPolicy | None = None,
    ) -> None:
        self._config = config
        self._graph = graph
        self._inputs = inputs
        self._record = record
        self._progress = progress
        self._models = models
        self._auto = auto
        self._executor = self._make_executor()
        self._hosts = graph.pipeline.hosts()
        self._runner: Runner | None = None
        self._training: asyncio.Future[Trace] | None = None
        self._cut: int | None = None
        """Step that an interrupted run saves."""
        self._grace: asyncio.TimerHandle | None = None
        """Ends the saving after ``checkpoint.grace_s``."""
        self._drained = False
        """Whether a task failed, and the step in training ended nevertheless, unless it needed that task."""
        self._skipped = False
        """Whether it was said that an update was skipped."""
        self._failed = 0
        """Checkpoints that failed, one after another."""

    async def run(self, point: Checkpoint | None) -> dict[str, Any]:
        """Runs to the end, from a checkpoint if one is given; a failed task raises StageFailed.

        Returns:
            Facts of the summary: ``digest`` of the actor's weights, ``NAME_weights_sha256`` of those of each other
            service that is trained.
        """
        graph, executor, record = self._graph, self._executor, self._record
        with self._progress.phase("starting workers"):
            await executor.open(graph.pipeline, *([] if self._models is None else [self._models.hosts]))
        if self._models is not None:
            with self._progress.phase("waiting for the reward models"):
                await self._models.open(executor)
        restored = Restored()
        if point is not None:
            with self._progress.phase(f"restoring step {point.step}"):
                restored = await self._restore(point)
        before = point.step if point else 0
        validates = graph.pipeline.with_role("validates")
        due = bool(validates) and (before == graph.steps or any(before % (s.every or 1) == 0 for s in validates))
        if due and before not in record.evaluations:
            with self._progress.phase("evaluating"):
                await self._evaluate(before, restored.states)
        origin = record.begin(executor.now())
        if before < graph.steps:
            await self._make_steps(restored, origin)
        self._progress.stop()
        if self._config.checkpoint.export and "trainer" in self._hosts:
            about = card(record.directory, read_values(record.directory / CONFIG), graph.steps)
            with self._progress.phase("writing the model"):
                try:
                    await self._offered("trainer", "export", str(record.directory / MODEL), about)
                except DataflowError as error:
                    logger.warning(f"the trained model is not written: {error}")
        facts = {"digest": await self._offered("trainer", "digest")}
        trained = {s.host.name for s in graph.pipeline.with_role("trains") if s.host is not None}
        for name in sorted(trained - {"trainer"}):
            if (found := await self._offered(name, "digest")) is not None:
                facts[f"{name}_weights_sha256"] = found
        return facts

    async def _make_steps(self, restored: Restored, origin: float) -> None:
        """Runs the steps that are left; of a run that is interrupted, those to its cut, which is saved.

        An interruption is raised as CancelledError.
        """
        runner = self._runner = Runner(
            self._graph,
            self._executor,
            inputs=self._inputs,
            trace=self._record.trace,
            origin=origin,
            on_step=self._on_step,
            restored=restored,
            drains=self._drains,
        )
        if self._auto is not None:
            self._auto.begin(runner)
        self._progress.reached("the first task starts")
        self._progress.start(self._graph.steps)
        report(training=True)
        training = self._training = asyncio.ensure_future(runner.run())
        try:
            try:
                await training
            except asyncio.CancelledError:
                if self._cut is None or not runner.over:
                    training.cancel()
                    raise
            if self._cut is not None:
                await self._save(runner, self._cut)
                raise asyncio.CancelledError
        except DataflowError:
            step = runner.end_early()
            if self._drained and step == self._record.steps >= self._graph.first:
                try:
                    await self._save(runner, step)
                except DataflowError as second:  # the first one counts
                    logger.warning(f"step {step} cannot be saved: {second}")
            raise
        finally:
            if self._grace is not None:
                self._grace.cancel()  # it would cancel the closing of the services
            if self._auto is not None:
                await self._auto.close()

    def interrupt(self, main: asyncio.Task[Any]) -> None:
        """Ends the run, if possible after the step in training and with a checkpoint.

        ``main`` is cancelled when there is nothing to save, or ``checkpoint.grace_s`` is over.
        """
        options, runner, training = self._config.checkpoint, self._runner, self._training
        saves = options.grace_s and self._graph.pipeline.with_role("saves")
        if not saves or runner is None or training is None or training.done():
            main.cancel()
            return
        step = runner.end_early()
        if step < self._graph.first:
            main.cancel()  # no step was trained since the checkpoint that the run resumed from
            return
        self._cut = step
        report(grace=options.grace_s)
        self._grace = asyncio.get_running_loop().call_later(options.grace_s, main.cancel)
        logger.info(f"interrupted: step {step} ends and is saved, within {options.grace_s:g} s; Ctrl-C ends it at once")
        if runner.over:
            training.cancel()

    def _drains(self, task: Task, error: BaseException) -> bool:
        """Whether a run that a task ends can be saved: what is trained lives, as when rewards fail for good."""
        pipeline, host = self._graph.pipeline, task.stage.host
        trained = {s.host.name for s in pipeline.with_role("saves") if s.host is not None}
        lost = any(isinstance(each, ServiceLost) for each in causes_of(error))
        self._drained = bool(trained) and not lost and (host is None or host.name not in trained)
        return self._drained

    async def _save(self, runner: Runner, step: int) -> None:
        """Saves a checkpoint of a step that all services have reached, if there is none."""
        pipeline, executor = self._graph.pipeline, self._executor
        staleness = runner.graph.sampled_ahead(step)
        if step in CheckpointStore(self._record.directory / "checkpoints").whole():
            return
        saves = pipeline.with_role("saves")
        for host in {s.host.name for s in saves if s.host is not None}:
            await executor.ask(host, "settle")  # discards a copy whose write was cancelled
        handles, last = runner.handles(step), min(step + staleness, self._graph.steps)
        policy = SchedulingPolicy(max_staleness=staleness)
        early = pipeline.subset(s.name for s in saves if s.ahead_of is not None)
        if last > step and early.stages:
            graph = expand(early, policy, steps=last, first=step + 1)
            await Runner(graph, executor, inputs={}, handles=handles, trace=Trace()).run()
        graph = expand(pipeline.subset(s.name for s in saves if s.ahead_of is None), policy, steps=step, first=step)
        await Runner(graph, executor, inputs={}, handles=handles, trace=Trace()).run()

    async def _offered(self, host: str, method: str, *arguments: Any) -> Any:
        """Calls a method of a service; returns None if the service or its method is not there."""
        if host not in self._hosts:
            return None
        try:
            return await self._executor.ask(host, method, *arguments)
        except NotOffered:
            return None

    async def close(self, under_way: BaseException | None) -> None:
        """Closes the services; if the run ended with an error, that error takes precedence."""
        if self._models is not None:
            await self._models.close()
        try:
            await self._executor.close()
        except RunError as error:
            if under_way is None:
                raise
            logger.debug(str(error))

    def _make_executor(self) -> Executor:
        if self._config.executor == "inline":
            from dataflow.executors.inline import InlineExecutor

            return InlineExecutor()
        from dataflow.executors.ray import RayExecutor

        ray = self._config.ray
        return RayExecutor(
            ray.address,
            ray.num_cpus,
            self._config.worker_threads,
            lambda name: self._progress.reached(f"{name} is up"),
            nodes=node_labels(self._config),
            directory=str(self._record.directory.absolute()),
            deadline_s=ray.start_timeout,
        )

    async def _restore(self, point: Checkpoint) -> Restored:
        """Loads a checkpoint into the services; returns what the runner continues from."""
        pipeline = self._graph.pipeline
        states = point.states()
        # A run may continue without further checkpoints, and then has no stages that save.
        stages = pipeline.with_role("saves") or pipeline.with_role("trains")
        for host in sorted({s.host.name for s in stages if s.host is not None}):
            await self._executor.ask(host, "load", str(point.service(host)))
        synced = [s.name for s in pipeline.with_role("syncs")]
        if synced:
            # The engine gets the weights by the run's own stages, which leave it as they did after that step.
            graph = expand(pipeline.subset(synced), SchedulingPolicy(), steps=point.step, first=point.step)
            await Runner(graph, self._executor, inputs=_constant(states), trace=Trace()).run()
        oldest = point.step - self._graph.sampled_ahead(point.step)
        fields = {
            (name, step): value
            for step, values in point.samples().items()
            for name, value in values.items()
            # With a smaller max_staleness than before, samples may be too old: they are drawn again.
            if getattr(value, "meta", {}).get("weights_version", oldest) >= step - 1 - self._graph.staleness(step)
        }
        return Restored(states, fields)

    async def _evaluate(self, step: int, states: Mapping[str, Any]) -> None:
        """Scores the held-out problems with the weights of a step, outside the run's clock."""
        pipeline = self._graph.pipeline.subset(s.name for s in self._graph.pipeline.with_role("validates"))
        await self._executor.open(pipeline)
        graph = expand(pipeline, SchedulingPolicy(), steps=step, first=step)
        inputs = {**self._inputs, **_constant(states)}
        await Runner(graph, self._executor, inputs=inputs, trace=self._record.before, on_step=self._on_step).run()

    def _on_step(self, step: int, metrics: dict[str, float]) -> None:
        if not self._skipped and any(name.endswith("/skipped_updates") and of for name, of in metrics.items()):
            self._skipped = True
            logger.warning(
                f"step {step}: an update changed nothing, as its gradient was not finite or no sample was left to "
                "train on; trainer.max_skipped of them in a row end the run."
            )
        ended = step > self._record.steps
        if ended and self._auto is not None:
            metrics = {**metrics, **self._auto.metrics(step)}
        graph = self._graph if self._runner is None else self._runner.graph
        # The spans of the last steps include all of this one.
        shown = self._record.step(step, metrics, window=(graph.ahead + 3) * sum(graph.parts.values()))
        if step in self._record.evaluations and any(name.startswith("val-core/") for name in metrics):
            self._progress.evaluation(step, self._record.evaluations[step], self._record.accurate[step])
        if shown is not None:
            self._progress.step(step, shown)
        if ended and self._auto is not None:
            self._auto.ended(step)
        if FAILED in metrics:
            self._failed = self._failed + 1 if metrics[FAILED] else 0
            if self._failed >= _MOST_FAILED:
                raise RunError(
                    f"the last {self._failed} checkpoints could not be written; make room in "
                    f"{self._record.directory}, then 'dataflow resume {self._record.directory}' continues it."
                )


def _constant(values: Mapping[str, Any]) -> dict[str, Callable[[int], Any]]:
    """Returns values as inputs of a graph, the same at every step."""
    return {name: partial(lambda value, _step: value, value) for name, value in values.items()}
