"""Checks the parts of a step: disjoint, known, complete and of the right size, whatever stage forms them.

Downstream stages pick their rows by the groups that a part names, so a stage that names wrong ones would train on wrong
data without an error. The runner checks every part and every streamed chunk, on every executor, before a task that
works on it can start. Pure: groups in, a DataflowError out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from dataflow.errors import DataflowError
from dataflow.graph import Pipeline, Stage, Task, TaskGraph

_LISTED = 8


def listed(groups: Iterable[int]) -> str:
    """Returns groups in words, a few of them by number.

    >>> listed([3]), listed(range(40))
    ('group 3', '40 groups (0, 1, 2, 3, 4, 5, 6, 7, ...)')
    """
    ids = sorted(groups)
    if len(ids) == 1:
        return f"group {ids[0]}"
    first = ", ".join(map(str, ids[:_LISTED])) + (", ..." if len(ids) > _LISTED else "")
    return f"{len(ids)} groups ({first})" if len(ids) > _LISTED else f"groups {first}" if ids else "no groups"


class Parts:
    """The groups of the unfinished steps: those that exist, and those named in parts so far.

    Args:
        graph: whose tasks form parts and emit chunks.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self._pipeline: Pipeline = graph.pipeline
        self._in_order = graph.order == "index"
        training = [s for s in self._pipeline.stages if s.per == "mini-batch"]
        self._mini_batches = math.lcm(*(graph.parts[s.name] // s.epochs for s in training))
        self._written: dict[int, dict[str, set[int]]] = {}
        self._formed: dict[int, dict[int, Sequence[int]]] = {}
        self._chunks: dict[int, dict[str, dict[int, Sequence[int]]]] = {}

    def written(self, step: int, field: str, groups: Iterable[int]) -> None:
        """Records the groups that a field of a step holds."""
        self._written.setdefault(step, {}).setdefault(field, set()).update(groups)

    def release(self, step: int) -> None:
        """Forgets a finished step."""
        for steps in (self._written, self._formed, self._chunks):
            steps.pop(step, None)

    def emitted(self, task: Task, number: int, groups: Sequence[int] | None) -> None:
        """Checks and records the groups of a chunk that a running task emitted.

        Raises:
            DataflowError: the chunk is empty, came before, or holds groups of another chunk or of no input.
        """
        step, name = task.id.step, task.stage.name
        chunks = self._chunks.setdefault(step, {}).setdefault(name, {})
        if number in chunks:
            raise DataflowError(f"stage '{name}' emitted chunk {number} twice; call task.emit once for each number.")
        if groups is not None:
            if not groups:
                raise DataflowError(
                    f"stage '{name}' emitted chunk {number} without groups; spread the step's groups over all "
                    f"{task.emits} chunks (task.emits)."
                )
            self._check_distinct(name, f"in chunk {number}", groups)
            for other, before in chunks.items():
                if twice := set(before).intersection(groups):
                    raise DataflowError(
                        f"stage '{name}' emitted {listed(twice)} in chunk {number}, which chunk {other} holds already; "
                        "emit each group of the step in exactly one chunk."
                    )
            self._check_known(task.stage, step, f"in chunk {number}", groups)
            for field in task.stage.writes:
                self.written(step, field, groups)
        chunks[number] = groups or ()

    def finished(
        self, task: Task, groups: Sequence[int] | None, written: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Checks and records the groups of a task that ended.

        Args:
            task: the task.
            groups: that it named, if it forms parts.
            written: the groups of each field it wrote, where that is a Batch.

        Raises:
            DataflowError: it forms parts, and they are not disjoint, known, complete and of the right size; or it
                streamed, and its chunks are not what it returned.
        """
        written = written or {}
        if task.emits > 1:
            self._check_chunks(task, written)
        if task.stage is self._pipeline.collector:
            self._form(task, groups)
        elif task.stage.collects:
            self._check_same(task, groups)
        for field, ids in written.items():
            self.written(task.id.step, field, ids)

    # --- checks -------------------------------------------------------------------------------------------

    def _check_chunks(self, task: Task, written: Mapping[str, Sequence[int]]) -> None:
        name, chunks = task.stage.name, self._chunks.get(task.id.step, {}).get(task.stage.name, {})
        if missing := [number for number in range(task.emits) if number not in chunks]:
            raise DataflowError(
                f"stage '{name}' ended after {len(chunks)} of {task.emits} chunks; call task.emit for chunk "
                f"{', '.join(map(str, missing[:_LISTED]))}{', ...' if len(missing) > _LISTED else ''} as well."
            )
        if not all(chunks.values()):
            return  # of a virtual run, which has no groups
        emitted = {group for groups in chunks.values() for group in groups}
        for field, ids in written.items():
            if lost := emitted.symmetric_difference(ids):
                where = "emitted but did not return" if lost & emitted else "returned but did not emit"
                some = lost & emitted or lost
                raise DataflowError(
                    f"stage '{name}' {where} {listed(some)} of field '{field}'; return the chunks that it emitted, "
                    "concatenated."
                )

    def _form(self, task: Task, groups: Sequence[int] | None) -> None:
        name, step = task.stage.name, task.id.step
        if groups is None:
            raise DataflowError(f"stage '{name}' forms the parts of a step but named no groups; return a Batch.")
        self._check_distinct(name, "", groups)
        if task.take is not None and len(groups) != task.take:
            raise DataflowError(
                f"stage '{name}' was to deliver {task.take} groups (task.take), not {len(groups)}: {listed(groups)}; "
                "return exactly task.take whole groups; the run's groups= is to be the number that a step has."
            )
        formed = self._formed.setdefault(step, {})
        for part, before in formed.items():
            if twice := set(before).intersection(groups):
                raise DataflowError(
                    f"stage '{name}' named {listed(twice)}, which part {part + 1} of the step holds already, so that "
                    "they would train twice and others never; return groups that no earlier part of the step named."
                )
        known = self._check_known(task.stage, step, "", groups)
        if task.take is None and known is not None and (missing := known.difference(groups)):
            raise DataflowError(
                f"stage '{name}' left out {listed(missing)} of the step; return all of its groups (task.take is None)."
            )
        if len(groups) % (shares := max(1, self._mini_batches // task.id.parts)):
            raise DataflowError(
                f"stage '{name}' named {len(groups)} groups, which do not make {shares} equal mini-batches; give "
                "the number of groups to expand(groups=...), and return task.take of them."
            )
        last = max((group for before in formed.values() for group in before), default=None)
        if self._in_order and (list(groups) != sorted(groups) or (last is not None and min(groups) < last)):
            raise DataflowError(
                f"stage '{name}' named {listed(groups)} out of order under order='index' (task.order), so that the run "
                "could not be repeated; return the next groups by id, sorted."
            )
        formed[task.id.part] = tuple(groups)

    def _check_same(self, task: Task, groups: Sequence[int] | None) -> None:
        """Checks that another collector returned the groups of the part that the first one formed."""
        name, (chosen_by,) = task.stage.name, task.chosen_by
        part = self._formed[task.id.step][chosen_by.part]
        if odd := set(part).symmetric_difference(groups or ()):
            raise DataflowError(
                f"stage '{name}' was to collect {listed(part)}, which form the part of '{chosen_by.stage}', but "
                f"differs in {listed(odd)}; return the groups of task.groups."
            )

    def _check_distinct(self, name: str, where: str, groups: Sequence[int]) -> None:
        if len(set(groups)) != len(groups):
            twice = {group for group in groups if list(groups).count(group) > 1}
            raise DataflowError(
                f"stage '{name}' named {listed(twice)} more than once{where and ' '}{where}; return each group once."
            )

    def _check_known(self, stage: Stage, step: int, where: str, groups: Sequence[int]) -> set[int] | None:
        """Returns the groups that the stage's inputs hold; None where no input is a Batch."""
        known = self._inputs_of(stage, step)
        if known is not None and (strange := set(groups) - known):
            raise DataflowError(
                f"stage '{stage.name}' named {listed(strange)}{where and ' '}{where}, which the step does not have: it "
                f"has {listed(known)}; return groups of its input."
            )
        return known

    def _inputs_of(self, stage: Stage, step: int) -> set[int] | None:
        """Returns the groups of the nearest Batches on the way to a stage: its inputs, or what these were made of."""
        found: set[int] | None = None
        for read in stage.reads:
            if read.lag != "none" or read.field in self._pipeline.states:
                continue
            groups = self._written.get(step, {}).get(read.field)
            writer = self._pipeline.writer.get(read.field)
            # A stage that writes an optional field need not run on this step.
            if groups is None and writer is not None and not read.optional:
                groups = self._inputs_of(writer, step)
            if groups is not None:
                found = groups if found is None else found | groups
        return found
