"""The record of a run: its trace, metrics and evaluations, in files that grow during the run.

A run that resumes from a checkpoint appends to the same files: what followed the checkpoint is cut off, and the time
in between is a downtime of the trace (``meta["gaps"]``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.errors import DataflowError, RunError, UserError
from dataflow.files import replaced, written
from dataflow.running.remains import EARLIER, EVALUATIONS, UNLOGGED, summarise, total_so_far, written_by
from dataflow.running.reporting.agent_totals import AgentTotals, Stats
from dataflow.running.reporting.throughput import throughput
from dataflow.running.reporting.tracking import (
    METRICS,
    Tracker,
    evaluation_in,
    read_metrics,
    step_metrics,
    write_summary,
)
from dataflow.timeline import perfetto
from dataflow.timeline.spans import Level, Mark, Span, Trace
from dataflow.timeline.writer import TraceWriter

SUMMARY = "summary.json"
_UNTAUGHT_STEPS = 3
"""Steps in a row that train nothing, after which a warning says so."""


@dataclass(frozen=True)
class Backends:
    """Where metrics go besides ``metrics.jsonl``: arguments of a Tracker."""

    names: list[str]
    project: str = "dataflow"
    config: Mapping[str, Any] = field(default_factory=dict)


class Record:
    """The files that record a run, and what they hold.

    Args:
        directory: of the run.
        backends: of its metrics.
        gpus: of the run, by which its throughput is divided.

    Attributes:
        trace: of training.
        before: trace of evaluations outside of the run's clock, which has a file of its own.
        evaluations: mean score by step; 0 is before training.
        accurate: by step, whether that is an accuracy.
        steps: the last step whose training has ended.
        summary: what summary.json holds, once it is known.
        digests: of the weights of further models than the actor, by service.
    """

    def __init__(self, directory: Path, backends: Backends, gpus: int = 1) -> None:
        self.directory = directory
        self.trace = Trace()
        self.before = Trace()
        self.evaluations: dict[int, float] = {}
        self.accurate: dict[int, bool] = {}
        self.totals = AgentTotals()
        self.steps = 0
        self.summary: dict[str, Any] = {}
        self.digests: dict[str, str] = {}
        self._untaught = 0
        self._backends = backends
        self._gpus = gpus
        self._tracker: Tracker | None = None
        self._writer: TraceWriter | None = None
        self._evaluations: TraceWriter | None = None

    # --- resuming -------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Reads what an earlier process recorded.

        A trace that cannot be read is left out with a warning: the run can continue without its past timeline.
        """
        try:
            self.trace = perfetto.read(self.directory / "trace.json")
        except DataflowError as error:
            logger.warning(f"the timeline of the run so far is lost: {error}")
        self.trace.meta[EARLIER] = total_so_far(self.directory, self.trace)
        if (self.directory / EVALUATIONS).exists():
            try:
                self.before = perfetto.read(self.directory / EVALUATIONS)
            except DataflowError as error:
                logger.warning(f"the summary will not count the requests of earlier evaluations: {error}")
        for row in read_metrics(self.directory / METRICS):
            self._take(row.pop("step"), {name: value for name, value in row.items() if value is not None})
        self.totals.resumed(written_by(self.directory).get("rewards") or {}, self.trace.meta.get(UNLOGGED, {}))

    def cut(self, step: int, early: frozenset[str], ahead: int) -> None:
        """Drops what follows a checkpoint.

        Args:
            step: of the checkpoint.
            early: stages whose results of later steps the checkpoint holds.
            ahead: how many later steps that are.
        """
        self.before = Trace(
            [s for s in self.before.spans if s.step <= step],
            [m for m in self.before.marks if m.args.get("step", 0) <= step],
            meta=self.before.meta,
        )
        old, self.trace = self.trace, Trace(meta=self.trace.meta)
        last = max((s.end for s in old.spans), default=0.0)
        dropped = 0.0  # end of the work that is lost
        for span in old.spans:
            if span.step <= step or (span.stage in early and span.step <= step + ahead):
                self.trace.add(span)
            else:
                dropped = max(dropped, span.end)
        end = max((s.end for s in self.trace.spans if not s.optional), default=0.0)
        self.trace.add(*(m for m in old.marks if m.args.get("step", 0) <= step))
        self.trace.add(*(level for level in old.levels if level.at <= end))
        self.evaluations = {at: value for at, value in self.evaluations.items() if at <= step}
        self.accurate = {at: value for at, value in self.accurate.items() if at <= step}
        recorded, self.steps, self.summary = self.steps, step, {}
        self.totals.restarted((self.before, self.trace))
        meta = self.trace.meta
        meta[UNLOGGED] = self.totals.beyond(r for r in read_metrics(self.directory / METRICS) if r["step"] <= step)
        for name in ("cut", "status"):
            meta.pop(name, None)
        last_steps = {METRICS: recorded}
        if self.trace.spans:
            last_steps["trace.json"] = max(s.step for s in self.trace.spans)
        for name, known in last_steps.items():
            if known < step:  # the process ended between the checkpoint and the record of its step
                logger.warning(
                    f"{self.directory / name} ends in step {known}, but the checkpoint is of step {step}: what is "
                    "missing is left out of timeline, metrics and summary."
                )
        if unscored := self._unscored(step):
            logger.warning(
                f"no evaluation of step {', '.join(map(str, unscored))}: not all of its responses were scored when the "
                f"run ended, and the weights are those of step {step} now."
            )
        lost = f", and {dropped - end:.1f} s of work after it were lost" if dropped > end else ""
        meta["gaps"] = [*meta.get("gaps", ()), [end, last, f"resumed from step {step}{lost}"]]
        meta["resumed"] = [*meta.get("resumed", ()), step]
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None
        for writer in (self._writer, self._evaluations):
            if writer is not None:
                writer.leave()  # open() writes a new file
        self._writer = self._evaluations = None

    def _unscored(self, step: int) -> list[int]:
        """Returns the steps before a checkpoint whose evaluations were due, and have no result."""
        often = {each["every"] for each in self.trace.declared if each["role"] == "validates" and each.get("every")}
        return sorted({at for every in often for at in range(every, step, every)} - self.evaluations.keys())

    # --- writing --------------------------------------------------------------------------------------------

    def open(self, meta: Mapping[str, Any]) -> None:
        """Opens the files; a trace that was cut goes into a new one, which replaces the old when it is whole.

        Args:
            meta: of the trace; its downtimes, its beginning and its checkpoints stay.

        Raises:
            ConfigError: a backend of the metrics cannot be opened.
            RunError: a file cannot be written.
        """
        names = ("gaps", "resumed", "started", EARLIER, UNLOGGED)
        kept: dict[str, Any] = {name: self.trace.meta[name] for name in names if name in self.trace.meta}
        self.trace.meta = {**meta, **kept}
        if self._tracker is None:
            to, upto = self._backends, self.steps if "resumed" in kept else None
            self._tracker = Tracker(self.directory, to.names, to.project, self.directory.name, to.config, upto=upto)
        path = self.directory / "trace.json"
        if "resumed" in kept:
            with written("trace", path), replaced(path) as temporary:
                self._writer = TraceWriter(temporary, self.trace.meta)
                self._writer.add(*self.trace.spans, *self.trace.marks, *self.trace.levels)
            self._writer.path = path
            # What it alone has is in the trace now. A process that is killed later leaves the summary to its
            # supervisor, which keeps one that exists.
            (self.directory / SUMMARY).unlink(missing_ok=True)
        else:
            self._writer = TraceWriter(path, self.trace.meta)
        self.trace.sink = self._writer.add
        self.before.meta, self.before.sink = dict(meta), self._evaluated

    def _evaluated(self, *items: Span | Mark | Level) -> None:
        """Writes what was added to the trace of evaluations; its file is made with the first of an attempt."""
        if self._evaluations is not None:
            self._evaluations.add(*items)
            return
        path = self.directory / EVALUATIONS
        with written("trace", path), replaced(path) as temporary:
            self._evaluations = TraceWriter(temporary, self.before.meta)
            self._evaluations.add(*self.before.spans, *self.before.marks, *self.before.levels)
        self._evaluations.path = path

    def begin(self, now: float) -> float:
        """Starts the clock of training, or continues it; returns second 0 of the trace, as unix time."""
        meta = self.trace.meta
        if "resumed" in meta:
            meta["gaps"][-1][1] = max(meta["gaps"][-1][0], now - meta["started"])
        else:
            meta["started"] = now
        assert self._writer is not None
        self._writer.describe(meta)
        return float(meta["started"])

    def describe(self, **facts: Any) -> None:
        """Adds facts to the trace's meta.

        Raises:
            RunError: the file cannot be written.
        """
        self.trace.meta |= facts
        if self._writer is not None:
            self._writer.describe(self.trace.meta)

    def step(self, step: int, metrics: dict[str, float], window: int) -> dict[str, float] | None:
        """Writes the metrics of a step.

        Args:
            step: its number.
            metrics: logged by its stages.
            window: the last spans of the trace that hold all of the step's.

        Returns:
            All metrics of the step, with where its time went, if its training has just ended; None for late metrics.
        """
        ended = step > self.steps
        if ended:
            # A long run is not read again from its beginning.
            metrics = {**metrics, **step_metrics(Trace(self.trace.spans[-window:], meta=self.trace.meta), step)}
            metrics = {**metrics, **throughput(metrics, self._gpus)}
            self._look_for_advantages(step, metrics)
        self._take(step, metrics)
        assert self._tracker is not None
        self._tracker.log(step, metrics)
        return metrics if ended else None

    def _look_for_advantages(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warns, once, after several steps in a row whose advantages are all 0, as when a reward is always the same."""
        most, least = metrics.get("critic/advantages/max"), metrics.get("critic/advantages/min")
        self._untaught = self._untaught + 1 if most == least == 0 else 0
        if self._untaught == _UNTAUGHT_STEPS:
            logger.warning(
                "steps {} to {} trained nothing, as their advantages are all 0: the samples of each prompt had the "
                "same score (mean {:g}); look at responses and scores with 'dataflow samples {}'.",
                step - _UNTAUGHT_STEPS + 1,
                step,
                metrics.get("critic/score/mean", 0.0),
                self.directory,
            )

    def _take(self, step: int, metrics: Mapping[str, float]) -> None:
        if (found := evaluation_in(metrics)) is not None:
            self.evaluations[step], self.accurate[step] = found
        self.totals.step(metrics)
        if "timing_s/step" in metrics:
            self.steps = max(self.steps, step)

    def summarise(self, total_s: float, digest: str | None = None, stats: Stats | None = None) -> None:
        """Makes the summary.

        Args:
            total_s: seconds from the start of this process until now.
            digest: of the weights.
            stats: of the reward agents, where they can still be asked.
        """
        rewards = self.totals.counts((self.before, self.trace), stats)
        accurate = all(self.accurate.values())
        total = self.total_s(total_s)
        self.summary = summarise(self.trace, self.steps, self.evaluations, accurate, rewards, total, digest)
        self.summary |= {f"{name}_weights_sha256": found for name, found in self.digests.items()}

    def total_s(self, own_s: float) -> float:
        """Returns the seconds of all processes of the run, of which the present one took some."""
        return own_s + float(self.trace.meta.get(EARLIER, 0.0))

    def write_summary(self, **facts: Any) -> None:
        """Writes summary.json with further facts.

        Raises:
            RunError: it cannot be written.
        """
        self.summary |= facts
        write_summary(self.directory / SUMMARY, self.summary)

    def leave(self, total_s: float, stats: Stats | None = None) -> None:
        """Ends the trace and writes the summary, each even if the other fails; an error that ended the run comes first.

        Args:
            total_s: seconds from the start of this process until now.
            stats: of the reward agents, where they can still be asked.

        Raises:
            RunError: one of them cannot be written, and the run went well so far.
        """
        under_way = sys.exception()
        problem: RunError | None = None
        writer, self._writer = self._writer, None
        evaluations, self._evaluations = self._evaluations, None
        try:
            if writer is not None:
                writer.close(self.trace)
                if writer.left_out:
                    logger.warning(f"{writer.path} leaves out {writer.left_out} items whose times are not finite")
            if evaluations is not None:
                self.before.meta["status"] = self.trace.meta["status"]
                evaluations.close(self.before)
        except RunError as error:
            problem = error
            if under_way is None:
                self.trace.meta["status"] = "failed"
        if not self.summary or problem is not None:
            known = self.summary
            self.summarise(total_s, stats=stats)
            self.summary |= {**known, "status": self.trace.meta["status"]}
        try:
            self.write_summary()
        except RunError as error:
            problem = problem or error
        if problem is None:
            return
        if under_way is None:
            raise problem
        # Not if its sentence has named the disk, or nothing of the run is kept.
        if not isinstance(under_way.__cause__, OSError) and not isinstance(under_way, UserError):
            logger.warning(str(problem))

    def close(self, exit_code: int = 0) -> None:
        """Closes the metrics.

        Raises:
            RunError: what they still held cannot be written.
        """
        if self._tracker is not None:
            self._tracker.close(exit_code=exit_code)
