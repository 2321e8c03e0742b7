"""Unrolls a pipeline: the tasks of each step, with the tasks that they depend on.

Knows numbers of tasks, groups and steps, which :func:`dataflow.policy.expand` derives from a scheduling policy. They
may differ from step to step: a step's own decide its tasks, and which version of a state they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dataflow.graph import Input, Lag, Pipeline, Read, Stage, Task, TaskId


@dataclass(frozen=True)
class Shape:
    """The numbers of one step.

    Attributes:
        shares: how many shares of the step's groups each stage works on, one after the other; it takes each of them
            ``Stage.epochs`` times.
        tasks: number of tasks of each stage.
        chunks: that a streaming stage emits; 1 for none.
        split: parts of the step.
        take: groups in a part; None for all of the step.
        staleness: how many steps older than the step before its own the version is that a carried field has.
    """

    shares: Mapping[str, int]
    tasks: Mapping[str, int]
    chunks: int
    split: int
    take: int | None
    staleness: int

    def lag(self, kind: Lag) -> int:
        """Returns how many steps before its own a stage reads a field."""
        return 1 + self.staleness if kind == "carried" else int(kind == "latest")


class Unroller:
    """Makes the tasks of one step after the other.

    Args:
        pipeline: the stages of one step.
        steps: the steps to run.
        shape: of each step. The version that carried fields have must never decrease from one step to the next.
        most: the largest staleness of any step.
    """

    def __init__(self, pipeline: Pipeline, steps: range, shape: Callable[[int], Shape], most: int) -> None:
        self.pipeline = pipeline
        self.steps = steps
        self.shape = shape
        self.most = most
        self.behind, self.grouped = _behind(pipeline), _grouped(pipeline)
        self.leading = _leading(pipeline)
        self.read = frozenset(field for s in pipeline.stages for field in _values(pipeline, s))
        aligned = self.grouped & self.read
        self._aligned = {s.name: tuple(w for w in s.writes if w in aligned) for s in pipeline.stages}
        self._writing = {s.name for s in pipeline.stages if not pipeline.states.isdisjoint(s.writes)}
        self._early: dict[str, list[Stage]] = {}
        for s in pipeline.stages:
            if s.ahead_of is not None:
                self._early.setdefault(s.ahead_of, []).append(s)
        self._known: dict[tuple[str, int], list[TaskId]] = {}
        self.readers: dict[str, list[tuple[Stage, Lag]]] = {f: [] for f in pipeline.states}
        for s in pipeline.stages:
            for read in s.reads:
                if read.field in self.readers:
                    self.readers[read.field].append((s, read.lag))

    def step(self, step: int) -> list[Task]:
        """Returns the tasks of a step, in the order of the pipeline."""
        tasks, number = [], self.shape(step).tasks
        for rank, s in enumerate(self.pipeline.order):
            if self._runs(s, step):
                tasks += [self._task(s, step, part, rank) for part in range(number[s.name])]
        return tasks

    def _runs(self, s: Stage, step: int) -> bool:
        if s.ahead_of is not None:
            other = self.pipeline.by_name[s.ahead_of]
            leads = range(1, 1 + self.shape(step).staleness) if step in self.steps else ()
            return any(self._runs(other, step - lead) for lead in leads)
        return step in self.steps and (s.every is None or step % s.every == 0 or step == self.steps[-1])

    def ahead(self, step: int) -> list[int]:
        """Returns the later steps that are sampled before a step is synced, since they read an older version."""
        return [at for at in range(step + 1, step + self.most + 1) if at - step <= self.shape(at).staleness]

    def _ids(self, s: Stage, step: int) -> list[TaskId]:
        found = self._known.get((s.name, step))
        if found is None:
            n = self.shape(step).tasks[s.name]
            found = [TaskId(step, s.name, part, n) for part in range(n)] if self._runs(s, step) else []
            if len(self._known) > 256:
                self._known.clear()  # of steps long finished
            self._known[s.name, step] = found
        return found

    def _place(self, s: Stage, step: int, part: int) -> tuple[int, int]:
        """Returns which share of the step's groups a task works on, and which epoch of this share it is."""
        if s.epochs == 1:
            return part, 0
        if s.epochs_over == "step":
            epoch, share = divmod(part, self.shape(step).shares[s.name])
        else:
            share, epoch = divmod(part, s.epochs)
        return share, epoch

    def _beside(self, source: Stage, reader: Stage, step: int, part: int) -> list[TaskId]:
        """Returns the source's tasks whose groups the reader's part needs: one that has them all, or several.

        Of the epochs of a source these are the tasks of the last one.
        """
        shares = self.shape(step).shares
        mine, theirs = shares[reader.name], shares[source.name]
        share, _epoch = self._place(reader, step, part)
        if source.streams and reader.per == "chunk":
            return [TaskId(step, source.name, share, mine)]
        ids = self._ids(source, step)
        if source.epochs > 1:
            ids = [i for i in ids if self._place(source, step, i.part)[1] == source.epochs - 1]
        return ids[share * theirs // mine : -(-(share + 1) * theirs // mine)]

    def _gathers(self, s: Stage, step: int) -> bool:
        """Whether the stage runs once on the groups of all parts."""
        once = s.name in self.behind and s.per not in ("part", "mini-batch")
        return once and self.shape(step).tasks[s.name] == 1

    def _input(self, s: Stage, step: int, part: int, read: Read) -> Input:
        writer = self.pipeline.writer.get(read.field)
        foreign = self._gathers(s, step) and read.field not in self.grouped
        if writer is None:
            return Input(read.field, (), whole=foreign)
        if read.field in self.pipeline.states:
            # A state has one value at a time, that of the last task that wrote it.
            return Input(read.field, tuple(self._ids(writer, step - self.shape(step).lag(read.lag))[-1:]), state=True)
        sources = tuple(self._beside(writer, s, step, part))
        return Input(read.field, sources, whole=foreign and len(sources) == 1)

    def _task(self, s: Stage, step: int, part: int, rank: int) -> Task:
        me, shape = self._ids(s, step), self.shape(step)
        inputs = tuple(self._input(s, step, part, read) for read in s.reads)
        deps = [source for item in inputs for source in item.sources]
        collector = self.pipeline.collector
        chosen_by: tuple[TaskId, ...] = ()
        at, epoch = self._place(s, step, part)
        share = (0, 1)
        if s.per == "chunk" and shape.tasks[s.name] > 1:
            chosen_by = (next(d for d in deps if d.parts > 1 and self.pipeline.by_name[d.stage].streams),)
        elif collector is not None and s.per in ("part", "mini-batch") and s is not collector:
            chosen_by = (self._beside(collector, s, step, part)[0],)
            each = shape.shares[s.name] // shape.split
            share = (at % each, each)
            deps += chosen_by
        elif collector is not None and self._gathers(s, step):
            chosen_by = tuple(self._ids(collector, step))
            deps += chosen_by  # the stage may be downstream through an optional field alone, absent on this step
        for name in s.after:
            deps += self._beside(self.pipeline.by_name[name], s, step, part)
        ahead = self.ahead(step) if s.name in self._early else ()
        for early in self._early.get(s.name, ()):
            deps += [i for later in ahead for i in self._ids(early, later)]
        writes_state = s.name in self._writing
        if part and (s.collects or writes_state or s.epochs > 1):
            deps.append(me[part - 1])
        elif writes_state:
            deps += self._overwrites(s, step)
        return Task(
            id=me[part],
            stage=s,
            deps=tuple(dict.fromkeys(d for d in deps if d != me[part])),
            inputs=inputs,
            chosen_by=chosen_by,
            share=share,
            epoch=epoch,
            take=shape.take if s.collects else None,
            emits=shape.chunks if s.streams else 1,
            aligned=self._aligned[s.name],
            keeps=s.name not in self.leading,
            rank=rank,
            max_staleness=len(ahead) if s.name in self._early else shape.staleness,
        )

    def _overwrites(self, s: Stage, step: int) -> list[TaskId]:
        """Returns what a step's first write of a state waits for: the last write, and the readers of that version."""
        deps: list[TaskId] = []
        for name in s.writes:
            for reader, kind in self.readers.get(name, ()):
                for at in self._readers_of(step - 1, kind):
                    if reader.name != s.name or at != step:  # it waits for its own previous write anyway
                        deps += self._ids(reader, at)
        return deps + self._ids(s, step - 1)[-1:]

    def _readers_of(self, version: int, kind: Lag) -> Iterable[int]:
        """Returns the steps whose stages read a version of a state; of the initial version, those after it alone."""
        initial = version < self.steps[0]
        if kind != "carried":
            lag = int(kind == "latest")
            return range(version + 1 if initial else version + lag, version + 1 + lag)
        lags = ((at, at - self.shape(at).staleness) for at in range(version + 1, version + self.most + 2))
        return [at for at, read in lags if read == version + 1 or (initial and read <= version)]


def _collected(pipeline: Pipeline) -> set[str]:
    """Returns the fields that collectors write."""
    return {name for s in pipeline.collectors for name in s.writes}


def _behind(pipeline: Pipeline) -> frozenset[str]:
    """Returns the stages downstream of a collector within the step."""
    return frozenset(s.name for s in _downstream(pipeline, _collected(pipeline)))


def _grouped(pipeline: Pipeline) -> frozenset[str]:
    """Returns the fields with rows of the groups that parts are formed of, upstream and downstream of the collectors.

    Other fields hold other groups that only share the ids, such as the prompts of a validation.
    """
    found = _collected(pipeline)
    for s in reversed(pipeline.order):
        if found.intersection(s.writes):
            found.update(_values(pipeline, s))
    return frozenset(found.union(*(s.writes for s in _downstream(pipeline, found))))


def _leading(pipeline: Pipeline) -> frozenset[str]:
    """Returns the collector that forms the parts and the stages upstream of it, which may choose groups."""
    if pipeline.collector is None:
        return frozenset()
    found, stages = set(_values(pipeline, pipeline.collector)), {pipeline.collector.name}
    for s in reversed(pipeline.order):
        if found.intersection(s.writes):
            found.update(_values(pipeline, s))
            stages.add(s.name)
    return frozenset(stages)


def _downstream(pipeline: Pipeline, fields: Iterable[str]) -> list[Stage]:
    """Returns the stages that read these fields, directly or through other stages of the step."""
    found, stages = set(fields), []
    for s in pipeline.order:
        if found.intersection(_values(pipeline, s)):
            found.update(s.writes)
            stages.append(s)
    return stages


def _values(pipeline: Pipeline, s: Stage) -> list[str]:
    """Returns the fields that a stage reads from its own step; states have no groups."""
    return [r.field for r in s.reads if r.field not in pipeline.states]
