"""Checks the parts of a step: disjoint, known, complete and of the right size, whatever stage forms them.

Downstream stages pick their rows by the groups that a part names, so a stage that names wrong ones would train on wrong
data without an error. The runner checks every part and every streamed chunk, on every executor, before a task that
works on it can start. Pure: groups in, a DataflowError out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dataflow.errors import DataflowError
from dataflow.graph import Stage, Task, TaskGraph

_LISTED = 8


def listed(groups: Iterable[int]) -> str:
    """Returns groups in words, a few of them by number.

    >>> listed([3]), listed(range(40))
    ('group 3', '40 groups (0, 1, 2, 3, 4, 5, 6, 7, ...)')
    """
    ids = sorted(groups)
    first = ", ".join(map(str, ids[:_LISTED]))
    if len(ids) > _LISTED:
        return f"{len(ids)} groups ({first}, ...)"
    return f"groups {first}" if len(ids) > 1 else f"group {first}" if ids else "no groups"


@dataclass
class _Step:
    """The groups of a step: of each field, of each part, and of each chunk of a stage."""

    written: dict[str, set[int]] = field(default_factory=dict)
    formed: dict[int, Sequence[int]] = field(default_factory=dict)
    chunks: dict[str, dict[int, Sequence[int]]] = field(default_factory=lambda: defaultdict(dict))


class Parts:
    """The groups of the unfinished steps: those that exist, and those named in parts so far."""

    def __init__(self, graph: TaskGraph) -> None:
        self._pipeline = graph.pipeline
        self._in_order = graph.order == "index"
        training = [s for s in self._pipeline.stages if s.per == "mini-batch"]
        self._mini_batches = math.lcm(*(graph.parts[s.name] // s.epochs for s in training))
        self._steps: dict[int, _Step] = defaultdict(_Step)

    def written(self, step: int, field: str, groups: Iterable[int]) -> None:
        """Records the groups that a field of a step holds."""
        self._steps[step].written.setdefault(field, set()).update(groups)

    def release(self, step: int) -> None:
        """Forgets a finished step."""
        self._steps.pop(step, None)

    def emitted(self, task: Task, number: int, groups: Sequence[int] | None) -> None:
        """Checks and records the groups of a chunk that a running task emitted."""
        step, name = task.id.step, task.stage.name
        chunks = self._steps[step].chunks[name]
        if number in chunks:
            raise DataflowError(f"stage '{name}' emitted chunk {number} twice; call task.emit once for each number.")
        if groups is not None:  # as those of a virtual run
            if not groups:
                raise DataflowError(
                    f"stage '{name}' emitted chunk {number} without groups; spread the step's groups over all "
                    f"{task.emits} chunks (task.emits)."
                )
            for other, before in chunks.items():
                if twice := set(before).intersection(groups):
                    raise DataflowError(
                        f"stage '{name}' emitted {listed(twice)} in chunk {number}, which chunk {other} holds already; "
                        "emit each group of the step in exactly one chunk."
                    )
            self._check_known(task.stage, step, groups)
            for written in task.stage.writes:
                self.written(step, written, groups)
        chunks[number] = groups or ()

    def finished(
        self, task: Task, groups: Sequence[int] | None, written: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Checks and records the groups of a task that ended.

        ``groups`` are those that it named, if it forms parts; ``written`` those of each field it wrote, where that is a
        Batch.
        """
        written = written or {}
        if task.emits > 1:
            self._check_chunks(task, written)
        if task.stage is self._pipeline.collector:
            self._form(task, groups)
        for name, ids in written.items():
            self.written(task.id.step, name, ids)

    def _check_chunks(self, task: Task, written: Mapping[str, Sequence[int]]) -> None:
        name, chunks = task.stage.name, self._steps[task.id.step].chunks[task.stage.name]
        if missing := [str(number) for number in range(task.emits) if number not in chunks]:
            raise DataflowError(
                f"stage '{name}' ended after {len(chunks)} of {task.emits} chunks; call task.emit for chunk "
                f"{', '.join(missing[:_LISTED])}{', ...' if len(missing) > _LISTED else ''} as well."
            )
        emitted = {group for groups in chunks.values() for group in groups}
        for field_name, ids in written.items():
            if odd := emitted.symmetric_difference(ids):
                raise DataflowError(
                    f"stage '{name}' emitted other groups than it returned in field '{field_name}' ({listed(odd)}); "
                    "return the chunks that it emitted, concatenated."
                )

    def _form(self, task: Task, groups: Sequence[int] | None) -> None:
        name, step = task.stage.name, task.id.step
        formed = self._steps[step].formed
        if groups is None:
            raise DataflowError(f"stage '{name}' forms the parts of a step but named no groups; return a Batch.")
        if task.take is not None and len(groups) != task.take:
            raise DataflowError(
                f"stage '{name}' was to deliver {task.take} groups (task.take), not {len(groups)}: {listed(groups)}; "
                "return exactly task.take whole groups; the run's groups= is to be the number that a step has."
            )
        for part, before in formed.items():
            if twice := set(before).intersection(groups):
                raise DataflowError(
                    f"stage '{name}' named {listed(twice)}, which part {part + 1} of the step holds already, so that "
                    "they would train twice and others never; return groups that no earlier part of the step named."
                )
        known = self._check_known(task.stage, step, groups)
        if task.take is None and known is not None and (missing := known.difference(groups)):
            raise DataflowError(
                f"stage '{name}' left out {listed(missing)} of the step; return all of its groups (task.take is None)."
            )
        if len(groups) % (shares := max(1, self._mini_batches // task.id.parts)):
            raise DataflowError(
                f"stage '{name}' named {len(groups)} groups, which do not make {shares} equal mini-batches; give "
                "the number of groups to expand(groups=...), and return task.take of them."
            )
        last = max((group for before in formed.values() for group in before), default=-1)
        if self._in_order and (list(groups) != sorted(groups) or min(groups, default=last) < last):
            raise DataflowError(
                f"stage '{name}' named {listed(groups)} out of order under order='index' (task.order), so that the run "
                "could not be repeated; return the next groups by id, sorted."
            )
        formed[task.id.part] = tuple(groups)

    def _check_known(self, stage: Stage, step: int, groups: Sequence[int]) -> set[int] | None:
        """Returns the groups that the stage's inputs hold; None where no input is a Batch."""
        known = self._inputs_of(stage, step)
        if known is not None and (strange := set(groups) - known):
            raise DataflowError(
                f"stage '{stage.name}' named {listed(strange)}, which the step does not have: it has {listed(known)}; "
                "return groups of its input."
            )
        return known

    def _inputs_of(self, stage: Stage, step: int) -> set[int] | None:
        """Returns the groups of the nearest Batches on the way to a stage: its inputs, or what these were made of."""
        found: set[int] | None = None
        for read in stage.reads:
            if read.lag != "none" or read.field in self._pipeline.states:
                continue
            groups = self._steps[step].written.get(read.field)
            writer = self._pipeline.writer.get(read.field)
            # A stage that writes an optional field need not run on this step.
            if groups is None and writer is not None and not read.optional:
                groups = self._inputs_of(writer, step)
            if groups is not None:
                found = groups if found is None else found | groups
        return found
