"""Unrolls a pipeline: the tasks of each step, with the tasks that they depend on.

Knows numbers of tasks, groups and steps, which :func:`dataflow.policy.expand` derives from a scheduling policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dataflow.graph import Input, Lag, Pipeline, Read, Stage, Task, TaskId


class Unroller:
    """Makes the tasks of one step after the other.

    Args:
        pipeline: the stages of one step.
        steps: the steps to run.
        shares: how many shares of a step's groups each stage works on, one after the other; it takes each of them
            ``Stage.epochs`` times.
        chunks: that a streaming stage emits in a step; 1 for none.
        split: parts of a step.
        take: groups in a part; None for all of the step.
        lags: how many steps before its own a stage reads a field, by kind of lag.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        steps: range,
        *,
        shares: Mapping[str, int],
        chunks: int,
        split: int,
        take: int | None,
        lags: Mapping[Lag, int],
    ) -> None:
        self.pipeline = pipeline
        self.steps = steps
        self.shares = shares
        self.tasks = {s.name: shares[s.name] * s.epochs for s in pipeline.stages}
        """Number of tasks of each stage in a step."""
        self.chunks = chunks
        self.split = split
        self.take = take
        self.lags = lags
        self.behind, self.grouped = _behind(pipeline), _grouped(pipeline)
        self.leading = _leading(pipeline)
        self.read = frozenset(field for s in pipeline.stages for field in _values(pipeline, s))
        self._early: dict[str, list[Stage]] = {}
        for s in pipeline.stages:
            if s.ahead_of is not None:
                self._early.setdefault(s.ahead_of, []).append(s)
        self._known: dict[tuple[str, int], list[TaskId]] = {}
        self.readers: dict[str, list[tuple[Stage, int]]] = {f: [] for f in pipeline.states}
        for s in pipeline.stages:
            for read in s.reads:
                if read.field in self.readers:
                    self.readers[read.field].append((s, self.lags[read.lag]))

    def step(self, step: int) -> list[Task]:
        """Returns the tasks of a step, in the order of the pipeline."""
        tasks = []
        for rank, s in enumerate(self.pipeline.order):
            if self._runs(s, step):
                tasks += [self._task(s, step, part, rank) for part in range(self.tasks[s.name])]
        return tasks

    def _runs(self, s: Stage, step: int) -> bool:
        if s.ahead_of is not None:
            other = self.pipeline.by_name[s.ahead_of]
            return step in self.steps and any(self._runs(other, step - lead) for lead in self._leads)
        return step in self.steps and (s.every is None or step % s.every == 0 or step == self.steps[-1])

    @property
    def _leads(self) -> range:
        """How many steps later those steps are that are sampled before a step is synced."""
        return range(1, self.lags["carried"])

    def _ids(self, s: Stage, step: int) -> list[TaskId]:
        found = self._known.get((s.name, step))
        if found is None:
            n = self.tasks[s.name]
            found = [TaskId(step, s.name, part, n) for part in range(n)] if self._runs(s, step) else []
            if len(self._known) > 256:
                self._known.clear()  # of steps long finished
            self._known[s.name, step] = found
        return found

    def _place(self, s: Stage, part: int) -> tuple[int, int]:
        """Returns which share of the step's groups a task works on, and which epoch of this share it is."""
        if s.epochs_over == "step":
            epoch, share = divmod(part, self.shares[s.name])
        else:
            share, epoch = divmod(part, s.epochs)
        return share, epoch

    def _beside(self, source: Stage, reader: Stage, step: int, part: int) -> list[TaskId]:
        """Returns the source's tasks whose groups the reader's part needs: one that has them all, or several.

        Of the epochs of a source these are the tasks of the last one.
        """
        mine, theirs = self.shares[reader.name], self.shares[source.name]
        share, _epoch = self._place(reader, part)
        if source.streams and reader.grain == "chunk":
            return [TaskId(step, source.name, share, mine)]
        ids = [i for i in self._ids(source, step) if self._place(source, i.part)[1] == source.epochs - 1]
        return ids[share * theirs // mine : -(-(share + 1) * theirs // mine)]

    def _gathers(self, s: Stage) -> bool:
        """Whether the stage runs once on the groups of all parts."""
        return s.name in self.behind and s.grain not in ("part", "mini-batch") and self.tasks[s.name] == 1

    def _input(self, s: Stage, step: int, part: int, read: Read) -> Input:
        writer = self.pipeline.writer.get(read.field)
        foreign = self._gathers(s) and read.field not in self.grouped
        if writer is None:
            return Input(read.field, (), whole=foreign)
        if read.field in self.pipeline.states:
            # A state has one value at a time, that of the last task that wrote it.
            return Input(read.field, tuple(self._ids(writer, step - self.lags[read.lag])[-1:]), state=True)
        sources = tuple(self._beside(writer, s, step, part))
        return Input(read.field, sources, whole=foreign and len(sources) == 1)

    def _task(self, s: Stage, step: int, part: int, rank: int) -> Task:
        me = self._ids(s, step)
        inputs = tuple(self._input(s, step, part, read) for read in s.reads)
        deps = [source for item in inputs for source in item.sources]
        collector = self.pipeline.collector
        chosen_by: tuple[TaskId, ...] = ()
        at, epoch = self._place(s, part)
        share = (0, 1)
        if s.grain == "chunk" and self.tasks[s.name] > 1:
            chosen_by = (next(d for d in deps if d.parts > 1 and self.pipeline.by_name[d.stage].streams),)
        elif collector is not None and s.grain in ("part", "mini-batch") and s is not collector:
            chosen_by = (self._beside(collector, s, step, part)[0],)
            each = self.shares[s.name] // self.split
            share = (at % each, each)
            deps += chosen_by
        elif collector is not None and self._gathers(s):
            chosen_by = tuple(self._ids(collector, step))
            deps += chosen_by  # the stage may be downstream through an optional field alone, absent on this step
        for name in s.after:
            deps += self._beside(self.pipeline.by_name[name], s, step, part)
        for early in self._early.get(s.name, ()):
            deps += [i for lead in self._leads for i in self._ids(early, step + lead)]
        writes_state = any(w in self.pipeline.states for w in s.writes)
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
            take=self.take if s.collects else None,
            emits=self.chunks if s.streams else 1,
            aligned=tuple(w for w in s.writes if w in self.grouped and w in self.read),
            keeps=s.name not in self.leading,
            rank=rank,
        )

    def _overwrites(self, s: Stage, step: int) -> list[TaskId]:
        """Returns what a step's first write of a state waits for: the last write, and the readers of that version."""
        deps: list[TaskId] = []
        for name in s.writes:
            for reader, lag in self.readers.get(name, ()):
                if reader.name == s.name and lag == 1:
                    continue  # it waits for its own previous write anyway
                # Readers of the version of step - 1; for the first write, of the initial version.
                since = step - 1 + lag if step > self.steps[0] else step
                for at in range(since, step + lag):
                    deps += self._ids(reader, at)
        return deps + self._ids(s, step - 1)[-1:]


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
