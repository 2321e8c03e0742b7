"""The record of a run: its trace, metrics, evaluations and summary, in files that grow during the run.

A run that resumes from a checkpoint continues the same files: what followed the checkpoint is cut off, and the time in
which it was not running takes no place in the trace, whose ``meta["gaps"]`` says how long it was.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.config.base import BaseConfig
from dataflow.errors import DataflowError, RunError
from dataflow.files import replaced, written
from dataflow.running.reporting.reward_counts import RewardCounts
from dataflow.running.reporting.timings import step_metrics, throughput
from dataflow.running.reporting.tracking import METRICS, Tracker, read_metrics
from dataflow.running.summary import SUMMARY, evaluation_in, read_summary, summarise
from dataflow.system.secrets import redact_values
from dataflow.timeline import perfetto
from dataflow.timeline.perfetto import TraceWriter
from dataflow.timeline.spans import Trace
from dataflow.usercode.numeric import finite

TRACE = "trace.json"
EVALUATIONS = "evaluations.json"
"""File with the trace of evaluations outside of the run's clock: before training, and after a resume."""
_EARLIER = "earlier_s"
"""What a trace's meta calls the seconds of the processes before the last one of a run that was resumed."""
_UNTAUGHT_STEPS = 3
"""Steps in a row that train nothing, after which a warning says so."""


class Record:
    """The files that record a run, and what they hold.

    Args:
        directory: of the run.
        config: of the run, with the backends of its metrics; None for ``metrics.jsonl`` alone.

    Attributes:
        trace: of training.
        before: trace of evaluations outside of the run's clock.
        evaluations: mean score by step; 0 is before training.
        accurate: by step, whether that is an accuracy.
        steps: the last step whose training has ended.
        summary: what summary.json holds, once it is written.
    """

    def __init__(self, directory: Path, config: BaseConfig | None = None) -> None:
        self.directory = directory
        self.trace, self.before = Trace(), Trace()
        self.evaluations: dict[int, float] = {}
        self.accurate: dict[int, bool] = {}
        self.steps = 0
        self.summary: dict[str, Any] = {}
        self._rewards = RewardCounts()
        self._untaught = 0
        self._config = config
        self._tracker: Tracker | None = None
        self._writers: dict[str, TraceWriter] = {}

    # --- resuming -------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Reads what an earlier process recorded.

        A trace that cannot be read is left out with a warning: the run can continue without its past timeline.
        """
        self.trace = self._read(TRACE, "the timeline of the run so far is lost")
        self.before = self._read(EVALUATIONS, "the summary will not count the requests of earlier evaluations")
        self.trace.meta[_EARLIER] = read_summary(self.directory).get("total_s") or self._traced_s()
        self._load_rows(None)

    def _read(self, name: str, otherwise: str) -> Trace:
        if not (self.directory / name).exists():
            return Trace()
        try:
            return perfetto.read(self.directory / name)
        except DataflowError as error:
            logger.warning(f"{otherwise}: {error}")
            return Trace()

    def _traced_s(self) -> float:
        """Returns the seconds of the run's processes, as far as its trace shows the last one."""
        begin = self.trace.gaps[-1].at if self.trace.gaps else 0.0
        return float(self.trace.meta.get(_EARLIER, 0.0)) + max(0.0, self.trace.end - begin)

    def _load_rows(self, upto: int | None) -> None:
        self.steps, self.evaluations, self.accurate, self._rewards = 0, {}, {}, RewardCounts()
        for row in read_metrics(self.directory / METRICS):
            if upto is None or row["step"] <= upto:
                self._take(row.pop("step"), row)

    def cut(self, step: int, early: frozenset[str], ahead: int) -> None:
        """Drops what follows a checkpoint; :meth:`open` does so in the files.

        Args:
            step: of the checkpoint.
            early: stages whose results of later steps the checkpoint holds.
            ahead: how many later steps that are.
        """

        def stays(stage: str, of: int) -> bool:
            return of <= step or (stage in early and of <= step + ahead)

        def cut(trace: Trace) -> Trace:
            marks = (m for m in trace.marks if m.args.get("step", 0) <= step)
            return Trace([s for s in trace.spans if stays(s.stage, s.step)], list(marks), meta=trace.meta)

        old, recorded = self.trace, self.steps
        self.trace, self.before = cut(old), cut(self.before)
        end = max((s.end for s in self.trace.spans if not s.optional), default=0.0)
        self.trace.add(*(level for level in old.levels if level.at <= end))
        self._load_rows(step)
        if recorded < step:  # the process ended between the checkpoint and the record of its step
            logger.warning(
                f"{self.directory / METRICS} ends in step {recorded}, but the checkpoint is of step {step}: what is "
                "missing is left out of timeline, metrics and summary."
            )
            self.steps = step
        often = {each["every"] for each in old.declared if each["role"] == "validates" and each.get("every")}
        if unscored := sorted({at for every in often for at in range(every, step, every)} - self.evaluations.keys()):
            logger.warning(
                f"no evaluation of step {', '.join(map(str, unscored))}: not all of its responses were scored when the "
                f"run ended, and the weights are those of step {step} now."
            )
        dropped = max((s.end for s in old.spans if not stays(s.stage, s.step)), default=0.0)
        lost = f", and {dropped - end:.1f} s of work after it were lost" if dropped > end else ""
        meta = self.trace.meta
        # An earlier gap may be in what is dropped now; how long this one is, is known when training begins again.
        earlier = [[min(at, end), seconds, why] for at, seconds, why in meta.get("gaps", ())]
        meta["gaps"] = [*earlier, [end, 0.0, f"resumed from step {step}{lost}"]]
        meta["resumed"] = [*meta.get("resumed", ()), step]
        for name in ("cut", "status"):
            meta.pop(name, None)

    # --- writing --------------------------------------------------------------------------------------------

    def open(self, meta: Mapping[str, Any]) -> None:
        """Opens the files; those of a run that was cut replace the old ones when they are whole.

        Args:
            meta: of the trace; its gaps, its beginning and its checkpoints stay.

        Raises:
            ConfigError: a backend of the metrics cannot be opened.
            RunError: a file cannot be written.
        """
        resumes = "resumed" in self.trace.meta
        kept = {k: v for k, v in self.trace.meta.items() if k in ("gaps", "resumed", "started", _EARLIER)}
        self.trace.meta, self.before.meta = {**meta, **kept}, dict(meta)
        upto = self.steps if resumes else None
        if self._config is None:
            self._tracker = Tracker(self.directory, upto=upto)
        else:
            shown, to = redact_values(self._config.model_dump(mode="json")), self._config.tracking
            self._tracker = Tracker(self.directory, to.backends, to.project, self.directory.name, shown, upto)
        self._write(TRACE, self.trace)
        if self.before.spans:
            self._write(EVALUATIONS, self.before)
        else:  # it is made with the first of them
            self.before.sink = lambda *_items: self._write(EVALUATIONS, self.before)
        # A process that is killed later leaves the summary to its supervisor, which keeps one that exists.
        (self.directory / SUMMARY).unlink(missing_ok=True)
        self.summary = {}

    def _write(self, name: str, trace: Trace) -> None:
        """Writes a trace into a file, and from now on what is added to it."""
        path = self.directory / name
        with written("trace", path), replaced(path) as temporary:
            writer = self._writers[name] = TraceWriter(temporary, trace.meta)
            writer.add(*trace.spans, *trace.marks, *trace.levels)
        writer.path = path
        trace.sink = writer.add

    def begin(self, now: float) -> float:
        """Starts the clock of training, or continues it after a gap.

        Returns:
            Second 0 of the trace, as unix time: later than the first one by the time in which the run was not running.
        """
        meta = self.trace.meta
        if "resumed" not in meta:
            meta["started"] = now
            self.describe()
            return now
        *earlier, last = meta["gaps"]
        last[1] = max(0.0, now - meta["started"] - last[0] - sum(seconds for _at, seconds, _why in earlier))
        self.describe()
        return float(now - last[0])

    def describe(self, **facts: Any) -> None:
        """Adds facts to the trace's meta.

        Raises:
            RunError: the file cannot be written.
        """
        self.trace.meta |= facts
        if TRACE in self._writers:
            self._writers[TRACE].describe(self.trace.meta)

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
            metrics = {**metrics, **throughput(metrics, 1 if self._config is None else self._config.gpus)}
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

    def _take(self, step: int, metrics: Mapping[str, float | None]) -> None:
        if (found := evaluation_in(metrics)) is not None:
            self.evaluations[step], self.accurate[step] = found
        self._rewards.add(metrics)
        if "timing_s/step" in metrics:
            self.steps = max(self.steps, step)

    def end(self, status: str, own_s: float, **facts: Any) -> None:
        """Ends the files, and writes the summary.

        Args:
            status: of the run.
            own_s: seconds from the start of this process until now.
            facts: further ones of the summary; ``digest`` is that of the weights.

        Raises:
            RunError: a file cannot be written.
        """
        self.trace.meta["status"] = self.before.meta["status"] = status
        writers, self._writers = self._writers, {}
        tracker, self._tracker = self._tracker, None
        try:
            with contextlib.ExitStack() as closing:  # an error of one leaves none open
                if tracker is not None:
                    closing.callback(tracker.close, exit_code=0 if status == "finished" else 1)
                for name, writer in writers.items():
                    closing.callback(writer.leave)
                    writer.close(self.trace if name == TRACE else self.before)
        except RunError:
            self.trace.meta["status"] = "failed" if status == "finished" else status
            raise
        finally:
            rewards = self._rewards.counts((self.before, self.trace))
            accurate, digest = all(self.accurate.values()), facts.pop("digest", None)
            total = self.total_s(own_s)
            self.summary = summarise(self.trace, self.steps, self.evaluations, accurate, rewards, total, digest)
            self.write_summary(**facts)

    def total_s(self, own_s: float) -> float:
        """Returns the seconds of all processes of the run, of which the present one took some."""
        return own_s + float(self.trace.meta.get(_EARLIER, 0.0))

    def write_summary(self, **facts: Any) -> None:
        """Writes summary.json with further facts; the file is replaced atomically.

        Raises:
            RunError: it cannot be written.
        """
        self.summary |= facts
        path = self.directory / SUMMARY
        with written("summary", path), replaced(path) as temporary:
            temporary.write_text(json.dumps(finite(self.summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")
