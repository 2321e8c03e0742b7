"""The record of a run: its trace, metrics, evaluations and summary, in files that grow during the run.

A run that resumes from a checkpoint continues the same files: what followed the checkpoint is cut off, and the time in
which it was not running takes no place in the trace, whose ``meta["gaps"]`` says how long it was.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.config.base import BaseConfig
from dataflow.errors import DataflowError, RunError, counted
from dataflow.files import replaced, written
from dataflow.running.reporting.timings import step_metrics, throughput
from dataflow.running.reporting.tracking import METRICS, Tracker, read_metrics
from dataflow.running.saving.checkpoints import CheckpointStore
from dataflow.running.summary import LOGGED, SUMMARY, evaluation_in, read_summary, reward_counts, summarise
from dataflow.system.secrets import redact_values
from dataflow.timeline import perfetto
from dataflow.timeline.perfetto import TraceWriter
from dataflow.timeline.spans import Span, Trace
from dataflow.usercode.numeric import finite

TRACE = "trace.json"
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
        before: trace of this process's evaluations outside of the run's clock, which no file has.
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
        self._logged: Counter[tuple[str, str]] = Counter()
        self._untaught = 0
        self._config = config
        self._tracker: Tracker | None = None
        self._writer: TraceWriter | None = None

    # --- resuming -------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Reads what an earlier process recorded.

        A trace that cannot be read is left out with a warning: the run can continue without its past timeline.
        """
        if (self.directory / TRACE).exists():
            try:
                self.trace = perfetto.read(self.directory / TRACE)
            except DataflowError as error:
                logger.warning(f"the timeline of the run so far is lost: {error}")
        meta = self.trace.meta
        begin = self.trace.gaps[-1].at if self.trace.gaps else 0.0
        traced_s = float(meta.get(_EARLIER, 0.0)) + max(0.0, self.trace.end - begin)
        meta[_EARLIER] = read_summary(self.directory).get("total_s") or traced_s
        self._load_rows(None)

    def _load_rows(self, upto: int | None) -> None:
        self.steps, self.evaluations, self.accurate, self._logged = 0, {}, {}, Counter()
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

        def stays(span: Span) -> bool:
            return span.step <= step or (span.stage in early and span.step <= step + ahead)

        old = self.trace
        spans = [span for span in old.spans if stays(span)]
        end = max((span.end for span in spans if not span.optional), default=0.0)
        marks = [mark for mark in old.marks if mark.args.get("step", 0) <= step]
        self.trace = Trace(spans, marks, [level for level in old.levels if level.at <= end], old.meta)
        self.before.marks = [mark for mark in self.before.marks if mark.args.get("step", 0) <= step]
        self.before.spans = [span for span in self.before.spans if span.step <= step]
        self._load_rows(step)
        self.steps = step  # the process may have ended between the checkpoint and the record of its step
        dropped = max((span.end for span in old.spans if not stays(span)), default=0.0)
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

        ``meta`` is laid over that of the trace, whose gaps, beginning and checkpoints stay.
        """
        upto = self.steps if "resumed" in self.trace.meta else None
        kept = {k: v for k, v in self.trace.meta.items() if k in ("gaps", "resumed", "started", _EARLIER)}
        self.trace.meta, self.before.meta = {**meta, **kept}, dict(meta)
        if self._config is None:
            self._tracker = Tracker(self.directory, upto=upto)
        else:
            shown, to = redact_values(self._config.model_dump(mode="json")), self._config.tracking
            self._tracker = Tracker(self.directory, to.backends, to.project, self.directory.name, shown, upto)
        path = self.directory / TRACE
        with written("trace", path), replaced(path) as temporary:
            self._writer = TraceWriter(temporary, self.trace.meta)
            self._writer.add(*self.trace.spans, *self.trace.marks, *self.trace.levels)
        self._writer.path = path
        self.trace.sink = self._writer.add
        # A process that is killed later leaves the summary to its supervisor, which keeps one that exists.
        (self.directory / SUMMARY).unlink(missing_ok=True)
        self.summary = {}

    def begin(self, now: float) -> float:
        """Starts the clock of training, or continues it after a gap; returns second 0 of the trace, as unix time.

        After a gap that is later than at first, by the time in which the run was not running.
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
        """Adds facts to the trace's meta."""
        self.trace.meta |= facts
        if self._writer is not None:
            self._writer.describe(self.trace.meta)

    def step(self, step: int, metrics: dict[str, float], window: int) -> dict[str, float] | None:
        """Writes the metrics of a step; returns all of them if its training has just ended, None for late metrics.

        Those that are returned say where the step's time went. All of its spans are among the last ``window`` of the
        trace.
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
            mean = metrics.get("critic/score/mean", 0.0)
            logger.warning(
                f"steps {step - _UNTAUGHT_STEPS + 1} to {step} trained nothing, as their advantages are all 0: the "
                f"samples of each prompt had the same score (mean {mean:g}); look at responses and scores with "
                f"'dataflow samples {self.directory}'."
            )

    def _take(self, step: int, metrics: Mapping[str, float | None]) -> None:
        if (found := evaluation_in(metrics)) is not None:
            self.evaluations[step], self.accurate[step] = found
        for name, value in metrics.items():
            if value and (match := LOGGED.fullmatch(name)):
                self._logged[match["agent"] or "", match["name"]] += int(value)
        if "timing_s/step" in metrics:
            self.steps = max(self.steps, step)

    def end(self, status: str, own_s: float, **facts: Any) -> None:
        """Ends the files, and writes the summary with further facts; ``digest`` is that of the weights.

        ``own_s`` is the number of seconds from the start of this process until now.
        """
        self.trace.meta["status"] = status
        try:
            with contextlib.ExitStack() as closing:  # an error of one leaves none open
                if self._tracker is not None:
                    closing.callback(self._tracker.close, exit_code=0 if status == "finished" else 1)
                if self._writer is not None:
                    closing.callback(self._writer.leave)
                    self._writer.close(self.trace)
        except RunError:
            self.trace.meta["status"] = "failed" if status == "finished" else status
            raise
        finally:
            self._tracker = self._writer = None
            rewards = reward_counts((self.before, self.trace), self._logged)
            accurate, digest = all(self.accurate.values()), facts.pop("digest", None)
            total = self.total_s(own_s)
            self.summary = summarise(self.trace, self.steps, self.evaluations, accurate, rewards, total, digest)
            self.write_summary(**facts)

    def total_s(self, own_s: float) -> float:
        """Returns the seconds of all processes of the run, of which the present one took some."""
        return own_s + float(self.trace.meta.get(_EARLIER, 0.0))

    def write_summary(self, **facts: Any) -> None:
        """Writes summary.json with further facts; the file is replaced atomically."""
        self.summary |= facts
        path = self.directory / SUMMARY
        with written("summary", path), replaced(path) as temporary:
            temporary.write_text(json.dumps(finite(self.summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")


# --- a run that ended early -----------------------------------------------------------------------------------


def finish_killed(directory: Path, status: str, steps: int | None) -> str:
    """Writes the summary of a run whose process was killed, from its files, unless it has one.

    ``status`` is "failed" or "interrupted", ``steps`` the planned number.

    Returns:
        The number of steps made and what can be done, as a phrase that follows "it" or "interrupted: ".
    """
    summary = read_summary(directory)
    if not summary:
        record = Record(directory)
        try:
            record.load()
            record.end(status, 0.0)
        except (OSError, DataflowError) as error:
            return f"stopped, and its summary cannot be written ({getattr(error, 'strerror', None) or error})"
        summary = record.summary
    done = int(summary.get("steps", 0))
    if summary.get("status") == "finished" and (steps is None or done >= steps):  # else it was resumed, to more steps
        return f"finished before that, and its files in {directory} are complete"
    return stopped(directory, done, steps)


def stopped(directory: Path, done: int, steps: int | None) -> str:
    """Returns the number of steps made, how to go on, and how to draw the timeline, in words."""
    after = counted(done, "step") if steps is None else f"{done} of {counted(steps, 'step')}"
    draw = f"'dataflow timeline {directory} -o {directory}.html' draws what it did"
    if saved := CheckpointStore(directory / "checkpoints").whole():
        resume = f"'dataflow resume {directory}' resumes from step {saved[-1]}"
    else:
        resume = f"'dataflow run' with name={directory.name} and resume=auto begins it again"
    return f"stopped after {after}; {resume}" + (f", {draw}" if done else f"; its files are in {directory}")
