"""What a run resumes from, as its runner sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dataflow.batch import Batch
from dataflow.executors.base import Chunk, Done, Report
from dataflow.graph import Task


@dataclass(frozen=True)
class Restored:
    """What a run resumes from: the graph's states, and fields of steps whose tasks ran before the checkpoint.

    Attributes:
        states: value of each state (a field that is read as Carried or Latest).
        fields: values of later steps, by field and step; a task that would write them is not run again.
    """

    states: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[tuple[str, int], Any] = field(default_factory=dict)

    def holds(self, task: Task) -> bool:
        """Whether all that a task writes is restored."""
        writes = task.stage.writes
        return bool(writes) and all((name, task.id.step) in self.fields for name in writes)

    def events(self, task: Task, now: float, put: Callable[[Any], Any]) -> Iterator[Done | Chunk]:
        """Yields the events of a held task as if it ran: its chunks, in the order of the groups, and its end."""
        values = {name: self.fields[name, task.id.step] for name in task.stage.writes}
        written = {name: value.ids for name, value in values.items() if isinstance(value, Batch)}
        ids = next(iter(written.values()), ())
        for number in range(task.emits if task.emits > 1 else 0):
            mine = ids[len(ids) * number // task.emits : len(ids) * (number + 1) // task.emits]
            chunk = tuple(put(value.select(mine)) for value in values.values())
            yield Chunk(task.id._replace(part=number, parts=task.emits), now, mine, chunk)
        report = Report(now, now, ids if task.stage.collects else None, written=written)
        yield Done(task.id, report, tuple(put(value) for value in values.values()))
