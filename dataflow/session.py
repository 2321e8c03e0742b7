"""A session: one run of a pipeline from its configuration to its summary. It wires what the other modules make.

Everything a user can get wrong is checked before the run's directory exists and before anything is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from loguru import logger

from dataflow import clock
from dataflow.config import RunConfig, dump_yaml
from dataflow.errors import ConfigError, DataflowError, Interrupted, UserError
from dataflow.executors.base import Executor
from dataflow.files import unmakable
from dataflow.graph import TaskGraph
from dataflow.pipeline_file import inputs_of, pipeline_of
from dataflow.policy import SchedulingPolicy, expand
from dataflow.progress import Progress
from dataflow.redaction import redact, redact_values
from dataflow.reward_totals import RewardTotals
from dataflow.runner import Runner
from dataflow.timeline import attribution
from dataflow.timeline.spans import Trace
from dataflow.timeline.writer import TraceWriter
from dataflow.tracking import Tracker, check_backends, step_metrics, write_summary

VALIDATION = ("val_rollout", "val_score")
LAST_EVALUATIONS = 3
"""Single evaluations swing by several points: the mean of this many last ones is told beside the last."""
SHOWN_S = 0.5
"""Seconds between two pictures of a run on a terminal."""


class Session:
    """One run.

    Args:
        config: resolved, as ``dataflow.config.parse_overrides`` returns it.
        module: the pipeline file.
        progress: shows what happens.

    Raises:
        UserError: one sentence; nothing has been written or started.
    """

    def __init__(self, config: RunConfig, module: ModuleType, progress: Progress) -> None:
        self._began = clock.now()
        self.config = config.model_copy(deep=True)
        self.module = module
        self.progress = progress
        self.policy: SchedulingPolicy = config.policy.resolve(config.trainer.mini_batches)
        self.graph: TaskGraph
        self.summary: dict[str, Any] = {}
        self._evaluations: dict[int, float] = {}
        self._before = Trace()
        """Of the evaluation before training, outside the run's clock."""
        self._totals = RewardTotals()
        self._steps_seen = 0
        check_backends(self.config.tracking.backends)
        check_directory(self.config)
        self._check_reward()
        self.expand()  # before the model is made: a wrong policy is said at once
        self.inputs = self._inputs()

    def _check_reward(self) -> None:
        from dataflow.rewards.build import check_reward

        custom, judge = self.config.custom_reward_function, self.config.judge
        check_reward(custom.model_dump(), judge.client_options(), self.config.reward)
        if not custom.path and not judge.url:
            from dataflow.law import parse_law

            parse_law(judge.latency)

    def _inputs(self) -> dict[str, Callable[[int], Any]]:
        """Loads model path, tokenizer and data; returns the pipeline's input fields, a function of the step each.

        A pipeline file may define ``inputs(config)`` and return further ones.
        """
        from dataflow.data.prompts import load_prompts, read_problems
        from dataflow.hosting import check_room
        from dataflow.models.directory import check_weights
        from dataflow.models.tiny import check_model, tiny_model

        # A bad data file is said before a minute of warm-up.
        problems = read_problems(self.config.data)
        path = self.config.model.path or tiny_model(progress=self.progress.warm_up)
        model = check_model(path)
        self.config.model.path = str(model)
        if "rollout" in self.graph.pipeline.hosts():
            check_room(self.config)
        own = inputs_of(self.module, self.config)
        check_weights(model)
        train, held_out = load_prompts(self.config, *problems)
        val = held_out.all(self.config.data.val_size) if self.config.val.every else None
        return {"prompts": train.batch, "val_prompts": lambda step: val, **own}

    def expand(self) -> TaskGraph:
        """Returns the run's task graph (and keeps it)."""
        config = self.config
        pipeline = pipeline_of(self.module, config)
        self.graph = expand(
            pipeline, self.policy, config.steps, config.trainer.mini_batches, groups=config.data.prompts
        )
        return self.graph

    def run(self) -> dict[str, Any]:
        """Runs to the end; returns what summary.json holds.

        Raises:
            StageFailed: a task failed; trace and metrics so far are on disk.
            Interrupted: Ctrl-C or SIGTERM; likewise.
        """
        runs = Path(self.config.runs)
        made = [parent for parent in (runs, *runs.parents) if not parent.exists()]
        self.directory = make_directory(self.config, Path(self.module.__file__ or "run").stem)
        self.config.name = self.directory.name
        (self.directory / "config.yaml").write_text(dump_yaml(self.config), encoding="utf-8")
        try:
            self.tracker = Tracker(
                self.directory,
                self.config.tracking.backends,
                self.config.tracking.project,
                self.directory.name,
                redact_values(self.config.model_dump(mode="json")),
            )
        except UserError:
            _removed(self.directory, made)
            raise
        try:
            with self._judge():
                asyncio.run(self._run())
        except UserError:
            # It could not start (no cluster at that address): nothing half-written stays.
            self.tracker.close()
            _removed(self.directory, made)
            raise
        finally:
            self.tracker.close()
        # Once more, now that everything has ended: by then it is known how long all of it took.
        self.summary["total_s"] = clock.now() - self._began
        write_summary(self.directory / "summary.json", self.summary)
        return self.summary

    @contextlib.contextmanager
    def _judge(self) -> Iterator[None]:
        judge = self.config.judge
        if self.config.custom_reward_function.path or judge.url:
            yield
            return
        from dataflow.rewards.judge_server import start_judge

        with start_judge(judge.latency, judge.time_scale, self.config.seed) as process:
            judge.url = process.url
            yield

    async def _run(self) -> None:
        main = asyncio.current_task()
        assert main is not None
        loop = asyncio.get_running_loop()

        def listen() -> None:
            for sign in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(sign, main.cancel)

        listen()
        graph = self.expand()  # again: the judge's address is known now
        executor = self._executor()
        trace = Trace(meta=self._meta())
        writer = TraceWriter(self.directory / "trace.json", trace.meta)
        trace.sink = writer.add
        try:
            with self.progress.phase("starting workers"):
                await executor.open(graph.pipeline)
            listen()  # again: Ray takes SIGTERM for itself when it starts
            if set(VALIDATION) <= graph.pipeline.by_name.keys():
                with self.progress.phase("evaluating"):
                    await self._evaluate(executor)
            # Both executors' clocks are unix time, by which the trace can be laid over others.
            trace.meta["started"] = executor.now()
            writer.say(trace.meta)
            runner = Runner(
                graph,
                executor,
                inputs=self.inputs,
                trace=trace,
                origin=trace.meta["started"],
                on_step=self._on_step,
            )
            self.trace = trace
            self.progress.start(graph.steps)
            showing = asyncio.create_task(self._show(runner, executor))
            try:
                await runner.run()
                trace.meta["status"] = "finished"
            except asyncio.CancelledError:
                runner.stop()
                raise
            finally:
                showing.cancel()
            self.progress.stop()
            digest = await executor.ask("trainer", "digest") if "trainer" in graph.pipeline.hosts() else None
            stats = await executor.ask("reward", "stats") if "reward" in graph.pipeline.hosts() else None
            self.summary = self._summarise(trace, digest, stats)
        except asyncio.CancelledError:
            trace.meta["status"] = "interrupted"
            raise Interrupted(f"stopped after {self._steps_seen} of {graph.steps} steps") from None
        finally:
            self.progress.stop()
            if trace.meta["status"] == "running":
                trace.meta["status"] = "failed"
            try:
                self._leave(trace, writer)
            finally:
                await executor.close()

    def _leave(self, trace: Trace, writer: TraceWriter) -> None:
        """Ends the run's files, each whatever becomes of the other."""
        try:
            writer.close(trace)
            if writer.left_out:
                logger.warning(f"{writer.path} leaves out {writer.left_out} items whose times are no finite numbers")
        finally:
            if not self.summary:
                self.summary = self._summarise(trace, None, None)
            write_summary(self.directory / "summary.json", self.summary)

    def _executor(self) -> Executor:
        if self.config.executor == "inline":
            from dataflow.executors.inline import InlineExecutor

            return InlineExecutor()
        from dataflow.executors.ray import RayExecutor

        ray = self.config.ray
        return RayExecutor(ray.address, ray.num_cpus, self.config.trainer.threads)

    async def _evaluate(self, executor: Executor) -> None:
        """Scores the held-out problems with the initial weights, as step 0, outside the run's clock."""
        pipeline = self.graph.pipeline.subset(VALIDATION)
        await executor.open(pipeline)
        graph = expand(pipeline, SchedulingPolicy(), steps=0, first=0)
        inputs: Mapping[str, Callable[[int], Any]] = {**self.inputs, "weights": lambda step: 0}
        await Runner(graph, executor, inputs=inputs, trace=self._before, on_step=self._on_step).run()

    def _on_step(self, step: int, metrics: dict[str, float]) -> None:
        scores = [value for name, value in metrics.items() if name.startswith("val-core/")]
        if scores:
            self._evaluations[step] = sum(scores) / len(scores)
            self.progress.accuracy(step, self._evaluations[step])
        self._totals.step(metrics)
        if step > self._steps_seen:
            self._steps_seen = step
            # The last steps' spans say all about this one; a long run is not read again from its beginning.
            per_step = sum(self.graph.parts.values())
            recent = Trace(self.trace.spans[-(self.graph.ahead + 3) * per_step :], meta=self.trace.meta)
            metrics = {**metrics, **step_metrics(recent, step)}
            self.progress.step(step, metrics)
        self.tracker.log(step, metrics)

    async def _show(self, runner: Runner, executor: Executor) -> None:
        """Moves the picture on, while there is one and the run goes."""
        per_step = sum(self.graph.parts.values())
        stats: dict[str, Any] = {}
        while self.progress.moves:
            if "reward" in self.graph.pipeline.hosts():
                try:
                    stats = self._totals.seen(await executor.ask("reward", "stats"))
                except DataflowError as error:
                    # Of an agent that died the run itself tells, or has a new one.
                    logger.debug(f"the reward agent does not answer: {error}")
            self.progress.show(runner.trace, runner.running(), stats, (self.graph.ahead + 3) * per_step)
            await asyncio.sleep(SHOWN_S)

    def _meta(self) -> dict[str, Any]:
        return {
            "policy": self.config.policy.preset,
            "split": self.policy.split,
            "max_staleness": self.policy.max_staleness,
            "order": self.policy.order,
            "stream_rollout": self.policy.stream_rollout,
            "steps": self.config.steps,
            "seed": self.config.seed,
            "status": "running",
            "resources": dict(self.graph.pipeline.resources),
            "started": clock.now(),
            # What 'dataflow plan' needs to run it again on the virtual clock.
            "job": {
                "pipeline": self.graph.pipeline.facts(),
                "prompts": self.config.data.prompts,
                "responses": self.config.engine.n,
                "mini_batches": self.config.trainer.mini_batches,
                "concurrency": self.config.reward.concurrency,
            },
        }

    def _summarise(self, trace: Trace, digest: str | None, stats: dict[str, Any] | None) -> dict[str, Any]:
        numbers = attribution.summary(trace)
        evaluations = [self._evaluations[step] for step in sorted(self._evaluations) if step > 0]
        last = evaluations[-LAST_EVALUATIONS:]
        mean = sum(last) / len(last) if len(last) == LAST_EVALUATIONS else None
        return {
            "policy": self.config.policy.preset,
            "split": self.policy.split,
            "max_staleness": self.policy.max_staleness,
            "order": self.policy.order,
            "status": trace.meta["status"],
            "steps": self._steps_seen,
            "seed": self.config.seed,
            "total_s": clock.now() - self._began,
            "wall_s": numbers["wall_s"],
            "step_s": numbers["step_s"],
            "after_training_s": numbers["after_training_s"],
            "after_training_idle_s": numbers["after_training_idle_s"],
            "gpu_busy_s": numbers["gpu_busy_s"],
            "exposed_wait_s": numbers["exposed_wait_s"],
            "exposed_wait_by_cause": numbers["exposed_wait_by_cause"],
            "reward_service_s": numbers["reward_service_s"],
            "lower_bound_s": numbers["lower_bound_s"],
            "accuracy_before": self._evaluations.get(0),
            "accuracy_after": last[-1] if last else None,
            f"accuracy_mean_last_{LAST_EVALUATIONS}": mean,
            "evaluations": {str(step): self._evaluations[step] for step in sorted(self._evaluations)},
            "weights_sha256": digest,
            "rewards": self._totals.counts((self._before, trace), stats),
        }


def _removed(directory: Path, parents: Sequence[Path]) -> None:
    """Removes a run's directory, and those above it that were made for it."""
    shutil.rmtree(directory)
    with contextlib.suppress(OSError):  # another run has begun in one
        for parent in parents:
            parent.rmdir()


def check_directory(config: RunConfig) -> None:
    """Checks that the run's directory can be made, without making it.

    Raises:
        ConfigError: a run of that name exists, or the directory cannot be written.
    """
    runs = Path(config.runs)
    if (why := unmakable(runs)) is not None:
        raise ConfigError(f"runs={config.runs}: {why}")
    if config.name and os.path.lexists(runs / config.name):
        raise ConfigError(f"name={config.name}: {runs / config.name!s} exists; choose another name or remove it.")


def make_directory(config: RunConfig, stem: str) -> Path:
    """Makes the run's directory: the name given, or pipeline, policy and a number that is free.

    Raises:
        ConfigError: a run of that name exists, or the directory cannot be written.
    """
    runs = Path(config.runs)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        if config.name:
            (runs / config.name).mkdir()
            return runs / config.name
        for number in range(1, 1_000_000):
            path = runs / f"{stem}-{config.policy.preset}-{number}"
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except FileExistsError as error:
        raise ConfigError(
            f"name={config.name}: {runs / config.name!s} exists; choose another name or remove it."
        ) from error
    except OSError as error:
        raise ConfigError(f"runs={config.runs}: cannot write there: {error.strerror}.") from error
    raise ConfigError(f"runs={config.runs}: no free name for a run; give name=.")


def prepare_logging() -> None:
    """Keeps our own log lines short; libraries' chatter goes to their logs."""
    import sys

    logger.remove()
    # Looked up at each line: while a picture moves, stderr is what writes above it.
    # Not diagnose: it shows the values of variables.
    logger.add(lambda line: sys.stderr.write(redact(line)), level="INFO", format="<level>{message}</level>",
               colorize=sys.stderr.isatty(), diagnose=False)  # fmt: skip
