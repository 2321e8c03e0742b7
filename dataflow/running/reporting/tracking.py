"""Metrics of a run: metrics.jsonl, the dashboards that show it, and summary.json.

metrics.jsonl is written first and flushed after each step, so that it has all finished steps of a killed run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import IO, Any

from dataflow.files import replaced, written
from dataflow.running.reporting.dashboards import Dashboards, Row
from dataflow.running.reporting.run_ids import FILE as IDS
from dataflow.timeline.agents import causes_of
from dataflow.timeline.causes.attribution import pool_waits
from dataflow.timeline.spans import POOLS, Trace, covered
from dataflow.usercode.numeric import finite

# verl's names for stages with a role; any other stage keeps its own name.
TIMINGS = {"samples": "gen", "trains": "update_actor"}
FIELDS = {"old_log_probs": "old_log_prob", "ref_log_probs": "ref", "advantages": "adv"}
FIELDS |= {"values": "values", "critic": "update_critic"}
"""verl's names for stages, by a field that they write."""
_TAKEN = {*TIMINGS.values(), *FIELDS.values(), "testing", "reward", "step"}
"""What follows ``timing_s/`` in a name that means one thing, whatever the stages are called."""

METRICS = "metrics.jsonl"
CUT = "metrics.cut.jsonl"
"""File with the rows that resumes cut off from ``metrics.jsonl``, each with its number in the order of logging."""


class Tracker:
    """Writes the metrics of a run, a step at a time.

    Args:
        directory: of the run; made if missing. Gets ``metrics.jsonl``, and ``tensorboard/`` if that is a backend.
        backends: any of verl's Tracking ("tensorboard", "console", "wandb", ...); metrics.jsonl is always written.
        project, name: of the run in the backends.
        config: of the run, for backends that show it.
        upto: the last step to keep of what the run wrote before; None for a new run.

    Raises:
        ConfigError: verl does not have a backend, or its package is not installed.
        RunError: the files cannot be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        backends: Sequence[str] = (),
        project: str = "dataflow",
        name: str = "run",
        config: Mapping[str, Any] | None = None,
        upto: int | None = None,
    ) -> None:
        self.directory = Path(directory)
        with self._written():
            self.directory.mkdir(parents=True, exist_ok=True)
            kept, cut = ([], []) if upto is None else self._cut(upto)
            self._dashboards = Dashboards(
                self.directory, backends, project, name, config or {}, None if upto is None else (kept, cut)
            )
            # Append, so that a resumed run continues the file.
            self._file: IO[str] | None = (self.directory / METRICS).open("a", encoding="utf-8")
            self._number = len(kept) + len(cut)

    def _cut(self, upto: int) -> tuple[list[Row], list[Row]]:
        """Moves the rows of later steps into a file of their own; returns the rows that stay, and all in that file."""
        cut = [Row(row.pop("number"), row.pop("step"), row) for row in read_metrics(self.directory / CUT)]
        lines = list(read_metrics(self.directory / METRICS))
        moving = [line for line in lines if line["step"] > upto]
        if moving and [row.line for row in cut[-len(moving) :]] == moving:
            del cut[-len(moving) :]  # by a process that was killed before it replaced metrics.jsonl
        taken = {row.number for row in cut}
        numbers = (number for number in count() if number not in taken)
        rows = [Row(next(numbers), row.pop("step"), row) for row in lines]
        kept, late = [row for row in rows if row.step <= upto], [row for row in rows if row.step > upto]
        if (self.directory / IDS).exists():  # a service has them
            with replaced(self.directory / CUT) as temporary:
                moved = (json.dumps({"number": row.number, **row.line}) + "\n" for row in [*cut, *late])
                temporary.write_text("".join(moved), encoding="utf-8")
        with replaced(self.directory / METRICS) as temporary:
            temporary.write_text("".join(json.dumps(row.line) + "\n" for row in kept), encoding="utf-8")
        return kept, [*cut, *late]

    def _written(self) -> AbstractContextManager[None]:
        return written("metrics of the run", self.directory)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a step's metrics.

        Args:
            step: counts from 1; 0 for metrics from before training.
            metrics: numbers by name; numpy and torch scalars become numbers, NaN and infinities null.

        Raises:
            RunError: they cannot be written.
        """
        if self._file is None:
            raise ValueError(f"metrics of step {step}: the tracker is closed.")
        numbers = finite(metrics)
        with self._written():
            row, self._number = Row(self._number, step, numbers), self._number + 1
            self._file.write(json.dumps(row.line, allow_nan=False) + "\n")
            self._file.flush()
            self._dashboards.show(row)

    def close(self, exit_code: int = 0) -> None:
        """Flushes and closes everything; a second call does nothing.

        Args:
            exit_code: of the run, for backends that record it (wandb).

        Raises:
            RunError: buffered data cannot be written.
        """
        file, self._file = self._file, None
        if file is None:
            return
        with self._written():
            try:
                file.close()
            finally:
                self._dashboards.close(self._number, exit_code)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(exit_code=0 if kind is None else 1)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file, except for those that are damaged, such as an incomplete last one."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row


def evaluation_in(metrics: Mapping[str, float | None]) -> tuple[float, bool] | None:
    """Returns the mean score of an evaluation, and whether it is an accuracy; None of a row without an evaluation.

    Args:
        metrics: of a row. Stages of a user's own may log ``val-core/*`` alone, each of which counts alike then.
    """
    scores = [value for name, value in metrics.items() if name.startswith("val-core/") and value is not None]
    if not scores:
        return None
    from dataflow.stages.validate import ACCURACY, SCORE

    mean = metrics.get(SCORE)
    return sum(scores) / len(scores) if mean is None else mean, metrics.get(ACCURACY) is not None


def write_summary(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Writes a summary as JSON; the file is replaced atomically.

    Raises:
        RunError: it cannot be written.
    """
    with written("summary", path), replaced(path) as temporary:
        temporary.write_text(json.dumps(finite(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def step_metrics(trace: Trace, step: int) -> dict[str, float]:
    """Returns the times of a step under verl's names, in seconds.

    A step's time window runs from the end of the previous step (its last training task) to its own end. The windows
    cover the run without overlap, so ``timing_s/step`` and the waits add up over the steps. Time in
    which the run was not running, between a kill and the resume, counts in neither.

    Args:
        trace: of the run so far; the step's training tasks must be in it.
        step: number of the step.

    Returns:
        ``timing_s/<stage>``: time in which the tasks of this step ran that the stage, or the stages of one verl name,
        have, even outside the window;
        ``timing_s/reward``: how long the GPUs waited for rewards in the window, of several agents also for each,
        ``timing_s/reward/<agent>``; ``timing_s/step``: its length;
        ``overlap/exposed_wait_s``, ``overlap/gpu_busy_frac``: all waits and the busy share in the window.
        Empty if no training task of the step is in the trace.
    """
    own = [s for s in trace.spans if s.step == step]
    training = [s for s in own if not s.optional]
    if not training:
        return {}
    start = trace.window[0]
    begin = max((s.end for s in trace.spans if s.step < step and not s.optional), default=start)
    end = max(begin, max(s.end for s in training))
    names = timing_names(trace)
    ran: dict[str, list[tuple[float, float]]] = {}
    for span in own:
        ran.setdefault(names.get(span.stage, span.stage), []).append((span.begin, span.end))
    metrics = {f"timing_s/{name}": covered(spans, -math.inf, math.inf) for name, spans in ran.items()}
    waits = pool_waits(trace, (begin, end))
    waited = sum(waits.values())
    by_agent = {agent: waits.get(cause, 0.0) for cause, agent in causes_of(trace).items()}
    metrics["timing_s/reward"] = sum(by_agent.values())
    if len(by_agent) > 1:
        metrics |= {f"timing_s/reward/{agent}": seconds for agent, seconds in by_agent.items()}
    metrics["timing_s/step"] = took = trace.running_s(begin, end)
    metrics["overlap/exposed_wait_s"] = waited
    metrics["overlap/gpu_busy_frac"] = 1 - waited / took if took > 0 else 0.0
    return metrics


def timing_names(trace: Trace) -> dict[str, str]:
    """Returns verl's name for each stage that verl times as well; for a validation, the stage that samples.

    A stage that has such a name, or that of a sum, and does something else is ``stage/NAME``.
    """
    placed = trace.placed
    names = {stage: f"stage/{stage}" for stage in placed if stage in _TAKEN or stage.startswith("reward/")}
    names |= {stage: TIMINGS[role] for stage, role in trace.roles.items() if role in TIMINGS}
    names |= {stage: "testing" for stage in trace.with_role("validates") if placed.get(stage) in POOLS}
    return names | {s["name"]: FIELDS[field] for s in trace.declared for field in s["writes"] if field in FIELDS}
