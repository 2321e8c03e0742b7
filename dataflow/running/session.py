"""A session: one run of a pipeline from its configuration to its summary. It connects the parts of other modules.

All input of the user is checked before the run's directory is made and before anything is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from loguru import logger

from dataflow.config.pipeline_file import inputs_of, pipeline_of
from dataflow.config.run import RunConfig, dump_yaml
from dataflow.errors import DataflowError, Interrupted, RunError, UserError
from dataflow.executors.base import Executor
from dataflow.files import written
from dataflow.graph import TaskGraph
from dataflow.policy import SchedulingPolicy, expand
from dataflow.runner import Runner
from dataflow.running.directory import check_directory, make_directory, remove_directory
from dataflow.running.progress import Progress
from dataflow.running.remains import finish, stopped, summarise
from dataflow.running.reward_totals import RewardTotals
from dataflow.running.tracking import Tracker, check_backends, step_metrics, write_summary
from dataflow.system import clock
from dataflow.system.redaction import redact, redact_values
from dataflow.system.stopping import stopping
from dataflow.system.supervisor import report
from dataflow.timeline.spans import Trace
from dataflow.timeline.writer import TraceWriter

SHOWN_S = 0.5
"""Seconds between two frames of the picture on a terminal."""


class Session:
    """One run.

    Args:
        config: as ``dataflow.config.overrides.parse_overrides`` returns it.
        module: the pipeline file.
        progress: shows the progress.

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
        """Trace of the evaluation before training, outside the run's clock."""
        self._totals = RewardTotals()
        self._steps_seen = 0
        check_backends(self.config.tracking.backends)
        check_directory(self.config)
        self._lost: RunError | None = None
        self._cancel: Callable[[], object] | None = None
        self._check_reward()
        self.expand()  # before the model is made, so that an invalid policy fails at once
        self.inputs = self._inputs()

    def _check_reward(self) -> None:
        from dataflow.running.agent import check_reward

        custom, judge = self.config.custom_reward_function, self.config.judge
        check_reward(custom.model_dump(), judge.client_options(), self.config.reward)
        if not custom.path and not judge.url:
            from dataflow.distribution import parse_distribution

            parse_distribution(judge.latency)

    def _inputs(self) -> dict[str, Callable[[int], Any]]:
        """Loads model path, tokenizer and data; returns the pipeline's input fields, a function of the step each.

        A pipeline file may define ``inputs(config)`` and return further ones.
        """
        from dataflow.data.prompts import load_prompts, read_problems
        from dataflow.models.directory import check_weights
        from dataflow.models.tiny import check_model, tiny_model
        from dataflow.running.hosting import check_room
        from dataflow.tools import toolbox_of

        # Before the warm-up, which takes a minute, so that an invalid data file fails at once.
        problems = read_problems(self.config.data)
        path = self.config.model.path or tiny_model(progress=self.progress.warm_up)
        model = check_model(path)
        self.config.model.path = str(model)
        if "rollout" in self.graph.pipeline.hosts():
            check_room(self.config)
        own = inputs_of(self.module, self.config)
        check_weights(model)
        schemas = toolbox_of(self.config).schemas if self.config.tools.offered else None
        train, held_out = load_prompts(self.config, *problems, schemas)
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
        """Runs to the end; returns the content of summary.json.

        Raises:
            StageFailed: a task failed; trace and metrics so far are on disk.
            Interrupted: by Ctrl-C or SIGTERM; trace and metrics so far are on disk.
        """
        runs = Path(self.config.runs)
        made = [parent for parent in (runs, *runs.parents) if not parent.exists()]
        self.directory = make_directory(self.config, Path(self.module.__file__ or "run").stem)
        report(directory=str(self.directory.absolute()), steps=self.graph.steps)
        with stopping:
            try:
                self._run_in_directory()
                # Write it once more, with the total time, now that everything has ended.
                self.summary["total_s"] = clock.now() - self._began
                write_summary(self.directory / "summary.json", self.summary)
            except UserError:
                # The run could not start (no cluster at that address): leave no directory behind.
                remove_directory(self.directory, made)
                raise
            except BaseException as error:
                if self.summary.get("status") == "finished":  # a service or a file could not be closed
                    with contextlib.suppress(RunError):
                        write_summary(self.directory / "summary.json", {**self.summary, "status": "failed"})
                status = "failed" if isinstance(error, Exception) else "interrupted"
                said = finish(self.directory, status, self.graph.steps)
                if isinstance(error, KeyboardInterrupt):
                    raise Interrupted(said) from None
                error.add_note(said)
                raise
        return self.summary

    def _run_in_directory(self) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        self.config.name = self.directory.name
        with written("configuration", self.directory / "config.yaml"):
            (self.directory / "config.yaml").write_text(dump_yaml(self.config), encoding="utf-8")
        with stopping.deferred():  # from its end on closing is not interrupted
            stopping.calls(interrupt)
            self.tracker = Tracker(
                self.directory,
                self.config.tracking.backends,
                self.config.tracking.project,
                self.directory.name,
                redact_values(self.config.model_dump(mode="json")),
            )
            try:
                with self._judge():
                    asyncio.run(self._run())
            except BaseException:
                with contextlib.suppress(RunError):  # the first error counts
                    self.tracker.close(exit_code=1)
                raise
            self.tracker.close()

    @contextlib.contextmanager
    def _judge(self) -> Iterator[None]:
        judge = self.config.judge
        if self.config.custom_reward_function.path or judge.url:
            yield
            return
        from dataflow.rewards.judge.keeper import JudgeKeeper

        with JudgeKeeper(judge.latency, judge.time_scale, self.config.seed, self._lose) as keeper:
            judge.url = keeper.url
            yield

    def _lose(self, error: RunError) -> None:
        """Ends the run with an error, from any thread."""
        self._lost = error
        if self._cancel is not None:
            self._cancel()

    async def _run(self) -> None:
        main = asyncio.current_task()
        assert main is not None
        loop = asyncio.get_running_loop()
        # Not at once, as the handler interrupts whatever the loop is doing.
        self._cancel = partial(loop.call_soon_threadsafe, main.cancel)
        stopping.calls(self._cancel)
        graph = self.expand()  # again, as the judge's address is known now
        executor = self._executor()
        trace = Trace(meta=self._meta())
        writer = TraceWriter(self.directory / "trace.json", trace.meta)
        trace.sink = writer.add
        try:
            with self.progress.phase("starting workers"):
                await executor.open(graph.pipeline)
            if graph.pipeline.with_role("validates"):
                with self.progress.phase("evaluating"):
                    await self._evaluate(executor)
            # Both executors' clocks are unix time, so that the trace can be merged with others.
            trace.meta["started"] = executor.now()
            writer.describe(trace.meta)
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
            report(training=True)
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
        except (asyncio.CancelledError, RunError) as error:
            if self._lost is not None:
                raise self._lost from error  # without its judge a run fails in many ways
            if stopping.received is None and isinstance(error, RunError):
                raise
            # A signal to all processes of the run may have ended others first.
            trace.meta["status"] = "interrupted"
            raise Interrupted(stopped(self.directory, self._steps_seen, graph.steps)) from None
        finally:
            stopping.calls(None)  # closing is not interrupted
            self._cancel = None
            self.progress.stop()
            if trace.meta["status"] == "running":
                trace.meta["status"] = "failed"
            try:
                self._leave(trace, writer)
            finally:
                await self._close(executor, sys.exception())

    async def _close(self, executor: Executor, under_way: BaseException | None) -> None:
        """Closes the services; if the run ended with an error, that error takes precedence."""
        try:
            await executor.close()
        except RunError as error:
            if under_way is None:
                raise
            logger.debug(str(error))

    def _leave(self, trace: Trace, writer: TraceWriter) -> None:
        """Ends all of the run's files, even if one of them fails; an error that the run ended with takes precedence.

        Raises:
            RunError: one of them cannot be written, and the run has not failed otherwise.
        """
        under_way = sys.exception()
        problem: RunError | None = None
        try:
            writer.close(trace)
            if writer.left_out:
                logger.warning(f"{writer.path} leaves out {writer.left_out} items whose times are not finite")
        except RunError as error:
            problem = error
            if under_way is None:
                trace.meta["status"] = "failed"
        if not self.summary or problem is not None:
            self.summary = {**self._summarise(trace, None, None), **self.summary, "status": trace.meta["status"]}
        try:
            write_summary(self.directory / "summary.json", self.summary)
        except RunError as error:
            problem = problem or error
        if problem is None:
            return
        if under_way is None:
            raise problem
        # Not if the error has named the disk already, or the run's directory is removed.
        if not isinstance(under_way.__cause__, OSError) and not isinstance(under_way, UserError):
            logger.warning(str(problem))

    def _executor(self) -> Executor:
        if self.config.executor == "inline":
            from dataflow.executors.inline import InlineExecutor

            return InlineExecutor()
        from dataflow.executors.ray import RayExecutor

        ray = self.config.ray
        # Batches hold tensors.
        return RayExecutor(ray.address, ray.num_cpus, self.config.trainer.threads, imports=["torch"])

    async def _evaluate(self, executor: Executor) -> None:
        """Scores the held-out problems with the initial weights, as step 0, outside the run's clock."""
        pipeline = self.graph.pipeline.subset(s.name for s in self.graph.pipeline.with_role("validates"))
        await executor.open(pipeline)
        graph = expand(pipeline, SchedulingPolicy(), steps=0, first=0)
        inputs: Mapping[str, Callable[[int], Any]] = {**self.inputs, "weights_version": lambda step: 0}
        await Runner(graph, executor, inputs=inputs, trace=self._before, on_step=self._on_step).run()

    def _on_step(self, step: int, metrics: dict[str, float]) -> None:
        scores = [value for name, value in metrics.items() if name.startswith("val-core/")]
        if scores:
            self._evaluations[step] = sum(scores) / len(scores)
            self.progress.accuracy(step, self._evaluations[step])
        self._totals.step(metrics)
        if step > self._steps_seen:
            self._steps_seen = step
            # The spans of the last steps suffice; the whole trace of a long run is not read again.
            per_step = sum(self.graph.parts.values())
            recent = Trace(self.trace.spans[-(self.graph.ahead + 3) * per_step :], meta=self.trace.meta)
            metrics = {**metrics, **step_metrics(recent, step)}
            self.progress.step(step, metrics)
        self.tracker.log(step, metrics)

    async def _show(self, runner: Runner, executor: Executor) -> None:
        """Redraws the picture during the run, if there is one."""
        per_step = sum(self.graph.parts.values())
        stats: dict[str, Any] = {}
        while self.progress.moves:
            if "reward" in self.graph.pipeline.hosts():
                try:
                    stats = self._totals.seen(await executor.ask("reward", "stats"))
                except DataflowError as error:
                    # The death of an agent ends the run or makes a new agent, so it is not reported here.
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
            # The facts that 'dataflow plan' needs to run it again on the virtual clock.
            "job": {
                "pipeline": self.graph.pipeline.facts(),
                "prompts": self.config.data.prompts,
                "responses": self.config.engine.n,
                "mini_batches": self.config.trainer.mini_batches,
                "concurrency": self.config.reward.concurrency,
            },
        }

    def _summarise(self, trace: Trace, digest: str | None, stats: dict[str, Any] | None) -> dict[str, Any]:
        rewards = self._totals.counts((self._before, trace), stats)
        return summarise(trace, self._steps_seen, self._evaluations, rewards, clock.now() - self._began, digest)


def prepare_logging() -> None:
    """Makes log lines short; messages of libraries go to their own logs."""
    logger.remove()
    # Looked up for each line, since during a moving picture stderr is replaced by what writes above it.
    # Without diagnose, which shows the values of variables.
    logger.add(lambda line: sys.stderr.write(redact(line)), level="INFO", format="<level>{message}</level>",
               colorize=sys.stderr.isatty(), diagnose=False)  # fmt: skip
