"""The task that a stage function runs as: what it is to do, and what it reports beside its values.

Pure: no torch, no ray, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dataflow.errors import DataflowError
from dataflow.signature.parts import Part
from dataflow.usercode.numeric import real_number

RUNS_OWN = ("step", "timing_s/step")
"""Columns of a row of metrics that no stage may log: the step's number and its time."""


@dataclass
class TaskInfo:
    """The task that a stage function runs as, passed to it as the keyword parameter ``task``."""

    step: int
    stage: str = ""
    part: int = 0
    parts: int = 1
    epoch: int = 0
    """How often the stage worked on these groups before, in this step."""
    epochs: int = 1
    groups: tuple[int, ...] | None = None
    """The groups it works on; None for all groups of the step."""
    take: int | None = None
    """How many groups a collecting stage must return; None for all groups of the step."""
    order: Literal["arrival", "index"] = "arrival"
    max_staleness: int = 0
    emits: int = 1
    """Chunks that a streaming stage must emit while it runs; 1 for none before its end."""
    emitted: Mapping[int, Any] = field(default_factory=dict)
    """Chunks that it emitted before its process died and it was restarted, by number."""
    on_emit: Callable[[int, tuple[Any, ...]], None] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> bool:
        return self.part == 0

    @property
    def last(self) -> bool:
        """Whether this is the stage's last task of the step."""
        return self.part == self.parts - 1

    def emit(self, number: int, *values: Any) -> None:
        """Emits one of ``emits`` chunks, each once in any order: a Batch of whole groups for each field it writes."""
        if self.on_emit is not None:
            self.on_emit(number, values)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the step.

        The tasks of a step may log the same ones, each of them the same way. A :class:`dataflow.Mean` is weighted by
        what it is over, and a :class:`dataflow.Sum` added up; other numbers are reduced by max or min if their
        name ends so, and averaged otherwise.

        Raises:
            DataflowError: a value is not a number (arrays and tensors of one element are), or the name is the run's.
        """
        for name, value in metrics.items():
            if name in RUNS_OWN:
                raise DataflowError(f"stage '{self.stage}' logs '{name}', which the run itself logs; rename it.")
            try:
                self.metrics[name] = value if isinstance(value, Part) or type(value) is float else real_number(value)
            except ValueError as error:
                raise DataflowError(f"stage '{self.stage}' logs {error} as metric '{name}'; log a number.") from error

    def note(self, **facts: Any) -> None:
        """Adds facts to the task's own span in the trace, JSON-able (``requests``, how many it sent)."""
        self.facts.update(facts)

    def mark(self, name: str, begin: float, end: float, **facts: Any) -> None:
        """Adds a span inside this task (a reward request) to the trace, by :func:`dataflow.system.clock.now`."""
        self.marks.append({"name": name, "begin": begin, "end": end, **facts})

    def level(self, name: str, at: float, value: float) -> None:
        """Adds to the trace the value that a level (a limit) has from ``at`` on, in seconds as for :meth:`mark`."""
        self.marks.append({"name": name, "at": at, "value": value})
