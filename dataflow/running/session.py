"""A session: one run of a pipeline from its configuration to its summary. It connects the parts of other modules.

All input of the user is checked before the run's directory is made and before anything is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from loguru import logger

from dataflow.config.base import BaseConfig
from dataflow.config.loading import saved
from dataflow.config.run import RunConfig
from dataflow.errors import Interrupted, RunError, ServiceLost, UserError
from dataflow.executors.ray.connection import begin_ray, drop_ray, joined, own_address, running
from dataflow.files import replaced, written
from dataflow.graph import TaskGraph
from dataflow.planning.planner import name_of
from dataflow.running.attempt import Attempt
from dataflow.running.directory import locked, make_directory
from dataflow.running.preparing.check import make_all
from dataflow.running.preparing.preparation import Preparation
from dataflow.running.record import TRACE, Record, stopped
from dataflow.running.replanning import AutoPolicy, facts_of, load_schedule, within
from dataflow.running.reporting.progress import Progress
from dataflow.running.saving.checkpoints import Checkpoint, CheckpointStore
from dataflow.running.summary import SUMMARY
from dataflow.system import clock
from dataflow.system.loopback import ADDRESS, ray_stays_on_loopback
from dataflow.system.secrets import redact
from dataflow.system.stopping import stopping
from dataflow.system.supervisor import report
from dataflow.usercode.failures import causes_of

if TYPE_CHECKING:
    from dataflow.running.services.served_models import ServedModels


class Session:
    """One run.

    Args:
        config: as ``dataflow.config.keys.overrides.parse_overrides`` returns it.
        module: the pipeline file.
        progress: shows what happens.
        directory: of an earlier run to resume; None begins a new one.

    Raises:
        UserError: one sentence; nothing has been written or started.
    """

    def __init__(
        self,
        config: BaseConfig,
        module: ModuleType,
        progress: Progress,
        directory: Path | None = None,
    ) -> None:
        ray_stays_on_loopback()
        self._prepared = Preparation(config, module, progress, directory)
        self._check()
        self.config = self._prepared.config
        self.module = module
        self.progress = progress
        self._resumes = directory is not None
        self.directory = directory or Path()
        self._lost: RunError | None = None
        self._cancel: Callable[[], object] | None = None
        self.record = Record(self.directory)
        self._served: ServedModels | None = None

    def _check(self) -> None:
        """Makes all checks; a Ray of the run's own starts on another core while the data is read."""
        config, checks = self._prepared.config, self._prepared.checks()
        quick = next((at for at, check in enumerate(checks) if check.slow), len(checks))
        make_all(checks[:quick])
        if config.executor == "ray" and config.ray.address is None and not running():
            begin_ray(config.ray.num_cpus or os.cpu_count() or 1)
        try:
            make_all(checks[quick:])
        except BaseException:
            drop_ray()
            raise

    @property
    def graph(self) -> TaskGraph:
        """The run's tasks, from the step on that it has reached."""
        return self._prepared.graph

    def run(self) -> dict[str, Any]:
        """Runs to the end; returns the content of summary.json.

        Raises:
            StageFailed: a task failed; trace and metrics so far are on disk.
            Interrupted: by Ctrl-C or SIGTERM; trace and metrics so far are on disk.
        """
        if not self._resumes:
            self.directory = make_directory(self.config, Path(self.module.__file__ or "run").stem)
        config = self.config
        config.name, config.runs = self.directory.name, str(self.directory.parent)
        record = self.record = Record(self.directory, config)
        report(directory=str(self.directory.absolute()), steps=self.graph.steps)
        with stopping, locked(self.directory):
            try:
                with written("configuration", self.directory / saved.CONFIG):
                    text = saved.dump(config, self.module.__file__ or "", self._prepared.digests)
                    with replaced(self.directory / saved.CONFIG) as temporary:  # a run without it cannot be resumed
                        temporary.write_text(text, encoding="utf-8")
                with stopping.deferred():  # from its end on closing is not interrupted
                    stopping.calls(_interrupt)
                    point = None
                    if self._resumes:
                        record.load()
                        point = self._newest()
                    with self._services():
                        self._train(point)
                # Once more, with the total time, now that everything has ended.
                record.write_summary(total_s=record.total_s(self.progress.elapsed_s))
            except BaseException as error:
                if isinstance(error, UserError) and not self._resumes and not (self.directory / TRACE).exists():
                    shutil.rmtree(self.directory)  # the run could not start (no cluster at that address)
                    raise
                if record.summary.get("status") == "finished" or not (self.directory / SUMMARY).exists():
                    self._end(error)  # something could not be closed, or no attempt began
                if isinstance(error, KeyboardInterrupt):
                    raise Interrupted(stopped(self.directory, record.steps, self.graph.steps)) from None
                error.add_note(stopped(self.directory, record.steps, self.graph.steps))
                raise
        return record.summary

    def _newest(self) -> Checkpoint | None:
        """Returns the checkpoint that the run resumes from, with the record cut there; None to begin."""
        point = CheckpointStore(self.directory / "checkpoints").newest()
        if self.config.policy.auto:
            first = min(point.step + 1, self.config.steps) if point else 1
            schedule = load_schedule(self.directory) or self._prepared.schedule
            self._prepared.schedule = within(schedule, self.config.policy, first)
            self._prepared.expand(first)
        early = frozenset(s.name for s in self.graph.pipeline.stages if any(r.lag == "carried" for r in s.reads))
        self.record.cut(point.step if point else 0, early, self.graph.sampled_ahead(point.step) if point else 0)
        return point

    def _train(self, point: Checkpoint | None) -> None:
        """Trains to the end; resumes from the last checkpoint if a service dies that cannot be rebuilt alone."""
        restarts = 0
        while True:
            try:
                asyncio.run(self._attempt(point))
                return
            except RunError as error:
                lost = next((e for e in causes_of(error) if isinstance(e, ServiceLost)), None)
                if lost is None or restarts >= self.config.recoveries or stopping.received is not None:
                    raise
                restarts += 1
                message = " ".join(str(error).split())
                point = self._newest()
                logger.warning(
                    f"{message}; restart {restarts} of {self.config.recoveries}: the run resumes from "
                    f"{f'its checkpoint of step {point.step}' if point else 'its beginning, as it has no checkpoint'}."
                )

    @contextlib.contextmanager
    def _services(self) -> Iterator[None]:
        """Joins the cluster, starts a stand-in for each judge without an address, and serves the reward models.

        Agents find the addresses in their sections.
        """
        config = self.config
        with contextlib.ExitStack() as stack:
            if config.executor == "ray" and config.ray.address is not None:
                stack.enter_context(joined(config.ray.address))
            for name, judge in self._prepared.stand_ins.items():
                from dataflow.rewards.judge.server import start_judge

                # Its agent is beside it, unless the configuration gives it other nodes.
                address = own_address() if name in config.ray.nodes else ADDRESS
                server = start_judge(judge.latency, judge.time_scale, config.seed, address)
                judge.url = stack.enter_context(server).url
            if isinstance(config, RunConfig) and config.reward.models:
                from dataflow.running.services.served_models import ServedModels

                models = ServedModels(config, self.directory, self._lose, self._prepared.agents)
                self._served = stack.enter_context(models)
            yield

    def _lose(self, error: RunError) -> None:
        """Ends the run with an error; may be called from any thread."""
        self._lost = error
        if self._cancel is not None:
            self._cancel()

    async def _attempt(self, point: Checkpoint | None) -> None:
        main = asyncio.current_task()
        assert main is not None
        loop = asyncio.get_running_loop()
        # Scheduled, since the handler may interrupt any code of the loop.
        self._cancel, self._lost = partial(loop.call_soon_threadsafe, main.cancel), None
        record = self.record
        # Again, as the judge's address is known now. Of a run that has made its steps the last one's graph says enough.
        graph = self._prepared.expand(min(point.step + 1, self.config.steps) if point else 1)
        options = self.config.policy
        auto = None
        if options.auto:
            auto = AutoPolicy(options, graph, self._prepared.schedule, self.config.optimizer_steps, record)
        attempt = Attempt(self.config, graph, self._prepared.inputs, record, self.progress, self._served, auto)
        stopping.calls(partial(loop.call_soon_threadsafe, attempt.interrupt, main))
        try:
            record.open(self._meta())
            facts = await attempt.run(point)
            stopping.calls(None)  # closing is not interrupted
            record.end("finished", self.progress.elapsed_s, **facts)
        except BaseException as error:
            stopping.calls(None)
            reason: BaseException = error
            if isinstance(error, asyncio.CancelledError | RunError):
                if self._lost is not None:
                    reason = self._lost  # without its judge a run fails in many ways
                elif stopping.received is not None or isinstance(error, asyncio.CancelledError):
                    # A signal to all processes of the run may have ended others first.
                    reason = Interrupted(stopped(self.directory, record.steps, graph.steps))
            self._end(reason)
            if reason is error:
                raise
            raise reason from (None if isinstance(reason, Interrupted) else error)
        finally:
            self._cancel = None
            self.progress.stop()
            await attempt.close(sys.exception())

    def _end(self, error: BaseException) -> None:
        """Ends the record of a run that failed; its error comes before that of a file that cannot be written."""
        failed = isinstance(error, Exception) and not isinstance(error, Interrupted)
        status = "failed" if failed else "interrupted"
        try:
            if self.record.summary:
                self.record.write_summary(status=status)
            else:
                self.record.end(status, self.progress.elapsed_s)
        except RunError as second:
            if not isinstance(error.__cause__, OSError):  # else its sentence has named the disk
                logger.warning(str(second))

    def _meta(self) -> dict[str, Any]:
        given, policy = self.config.policy.preset, self._prepared.policy
        return {
            "policy": given if self.config.policy.auto else name_of(policy, self.config.optimizer_steps, given),
            **asdict(policy),
            **(facts_of(self._prepared.schedule) if self.config.policy.auto else {}),
            "steps": self.config.steps,
            "seed": self.config.seed,
            "status": "running",
            "resources": dict(self.graph.pipeline.resources),
            "started": clock.now(),
            # The facts that 'dataflow plan' needs to run it again on the virtual clock.
            "job": {"pipeline": self.graph.pipeline.facts(), **self.config.job()},
        }


def _interrupt() -> None:
    raise KeyboardInterrupt


def prepare_logging() -> None:
    """Makes log lines short; leaves messages of libraries to their own logs."""
    logger.remove()
    # stderr is looked up for each line: a progress bar replaces it by a stream that writes above the bar.
    # Without diagnose, which shows the values of variables.
    logger.add(lambda line: sys.stderr.write(redact(line)), level="INFO", format="<level>{message}</level>",
               colorize=sys.stderr.isatty(), diagnose=False)  # fmt: skip
