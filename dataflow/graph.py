"""The graph: the pipeline that stages form, and the tasks it unrolls into.

Pure: no torch, no ray, no clock. Only policy.py defines what a scheduling policy means for the graph.
"""

from __future__ import annotations

import functools
import graphlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dataflow.errors import PipelineError, alike, counted, nearest
from dataflow.stage import Carried, Hosted, Lag, Latest, Piece, Read, Role, Stage, TaskInfo, names_of, stage

if TYPE_CHECKING:
    import networkx as nx

__all__ = [
    "WHEN", "Carried", "Hosted", "Input", "Lag", "Latest", "Piece", "Pipeline", "Read", "Role", "Stage",
    "Task", "TaskGraph", "TaskId", "TaskInfo", "stage",
]  # fmt: skip

WHEN: Mapping[Lag, str] = {"none": "", "latest": "of the step before", "carried": "of 1 + max_staleness steps before"}
"""Which step's value a stage reads, in words; "" for its own step's."""
RESOURCES: Mapping[str, int | None] = {"gpu": 1, "reward": None, "controller": 1, "io": 1}
"""The slots of the resources that every pipeline has; None for no limit."""


def _uncallable() -> None:
    raise PipelineError("this pipeline was read from a trace; it can be planned, not run.")


class Pipeline:
    """The stages of one training step. Edges come from field names; an invalid graph fails here, not in the run.

    Args:
        stages: in any order; the order given breaks ties.
        inputs: fields that come from outside, once a step.
        resources: slots of resources besides gpu, reward, controller and io, or others of these; None for no limit.

    Raises:
        PipelineError: two stages or services of one name, a field without a writer or with two, a cycle, an undeclared
            resource, a missing service or option, a stage that runs on every step but reads from one that does not.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        inputs: str | Sequence[str] = (),
        resources: Mapping[str, int | None] | None = None,
    ) -> None:
        self.stages = tuple(stages)
        if odd := [each for each in self.stages if not isinstance(each, Stage)]:
            raise PipelineError(f"{odd[0]!r} in a pipeline is no stage; write @stage(...) above the function.")
        self.inputs = names_of(inputs)
        # Recipes give all of theirs: another one, which no stage runs on, would be an empty row of the timeline.
        used = {s.on for s in self.stages} if resources else RESOURCES
        usual = {name: slots for name, slots in RESOURCES.items() if name in used and name not in (resources or ())}
        self.resources: dict[str, int | None] = {**usual, **(resources or {})}
        for name, slots in self.resources.items():
            if slots is not None and slots < 1:
                raise PipelineError(f"resource '{name}' has {slots} slots; give 1 or more, or None for no limit.")
        self.by_name: dict[str, Stage] = {}
        self.writer: dict[str, Stage] = {}
        for s in self.stages:
            if s.name in self.by_name:
                raise PipelineError(f"two stages are named '{s.name}'; give one another name with bind(name=...).")
            self.by_name[s.name] = s
            for name in s.writes:
                if name in self.writer:
                    both = f"'{self.writer[name].name}' and '{s.name}'"
                    raise PipelineError(f"field '{name}' is written by {both}; rename one with bind(renamed=...).")
                if name in self.inputs:
                    raise PipelineError(f"field '{name}' is one of inputs=, which '{s.name}' writes; rename one.")
                self.writer[name] = s
        for s in self.stages:
            self._check(s)
        self.hosts()
        self.states = frozenset(r.field for s in self.stages for r in s.reads if r.lag != "none")
        for s in self.stages:
            if s.streams and (held := [w for w in s.writes if w in self.states]):
                raise PipelineError(
                    f"stage '{s.name}' streams, but '{held[0]}' is a state that a later step reads; "
                    "a state changes at the end of a task, so let another stage write it."
                )
        self.order = self._topological()
        self.collectors = self.with_role("collects")
        """The stages that collect scored groups."""
        self.collector = self._first_collector()
        """The one whose groups form the parts of a step; the others collect the same groups."""

    def _check(self, s: Stage) -> None:
        if s.on not in self.resources:
            declared = {**RESOURCES, **self.resources}
            raise PipelineError(
                f"stage '{s.name}' runs on '{s.on}', which is not a resource{nearest(s.on, declared)} (declared: "
                f"{', '.join(declared)}); declare it with Pipeline(resources={{'{s.on}': 1}})."
            )
        for name, lag, optional in s.reads:
            if name in self.inputs:
                continue
            if name not in self.writer and optional:
                # Absent because nobody writes it, not for its spelling.
                if (other := alike(name, sorted(self._unread))) is not None:
                    raise PipelineError(
                        f"stage '{s.name}' reads the optional field '{name}', which no stage writes, and "
                        f"'{self.writer[other].name}' writes '{other}', which no stage reads; give both one name."
                    )
                continue
            if name not in self.writer:
                known = [*self.writer, *self.inputs]
                guess = nearest(name, known)
                by = next((f" (written by '{self.writer[w].name}')" for w in self.writer if f"'{w}'" in guess), "")
                hint = f"; known fields: {', '.join(known) or 'none'}; name it in inputs=, or write it."
                raise PipelineError(
                    f"stage '{s.name}' reads field '{name}', but no stage writes it"
                    + (f"{guess[:-1]}{by}?" if guess else hint)
                )
            source = self.writer[name]
            if source.every is not None and lag != "none":
                raise PipelineError(
                    f"stage '{s.name}' reads '{name}' of an earlier step, but '{source.name}' runs only every "
                    f"{source.every} steps; let it run on every step."
                )
            if source.every is not None and source.every != s.every and not optional:
                raise PipelineError(
                    f"stage '{s.name}' reads '{name}' from '{source.name}', which runs only every "
                    f"{source.every} steps; give both the same every=, or the field a default of None."
                )
        for name in s.after:
            if name not in self.by_name:
                raise PipelineError(
                    f"stage '{s.name}' is after '{name}', which is not a stage{nearest(name, self.by_name) or '.'}"
                )
        s.check()

    def unread(self) -> list[str]:
        """Returns a sentence for each stage whose fields no stage reads, which may be a mistake.

        Stages with a role, and those that do not run on every step, are left out: they do more than write.
        """
        return [
            f"stage '{s.name}' writes {', '.join(map(repr, s.writes))}, which no stage reads; let a stage read it, or "
            "leave out writes= if the stage only logs."
            for s in self.stages
            if s.writes and self._unread.issuperset(s.writes) and s.role is None and s.every is None
        ]

    @functools.cached_property
    def _unread(self) -> frozenset[str]:
        return frozenset(self.writer).difference(r.field for s in self.stages for r in s.reads)

    def _first_collector(self) -> Stage | None:
        """Returns the first collector listed that is not downstream of another one."""
        behind: set[str] = set()
        for s in self.order:
            sources = [source for source, target, _field, lag in self.edges if target is s and lag == "none"]
            if any(source.collects or source.name in behind for source in sources):
                behind.add(s.name)
        return next((s for s in self.collectors if s.name not in behind), None)

    def with_role(self, role: Role) -> tuple[Stage, ...]:
        """Returns the stages with a role, in the order given."""
        return tuple(s for s in self.stages if s.role == role)

    @functools.cached_property
    def edges(self) -> tuple[tuple[Stage, Stage, str, Lag], ...]:
        """(from, to, field, lag) of each data edge, then ("" for the field) each ``after``."""
        found: list[tuple[Stage, Stage, str, Lag]] = []
        for s in self.stages:
            found += [
                (self.writer[read.field], s, read.field, read.lag) for read in s.reads if read.field in self.writer
            ]
            found += [(self.by_name[name], s, "", "none") for name in s.after]
        return tuple(found)

    def _topological(self) -> tuple[Stage, ...]:
        sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter({s.name: [] for s in self.stages})
        for source, target, _field, lag in self.edges:
            if lag == "none":
                sorter.add(target.name, source.name)
        try:
            return tuple(self.by_name[name] for name in sorter.static_order())
        except graphlib.CycleError as error:
            cycle = " -> ".join(reversed(error.args[1]))
            raise PipelineError(
                f"the stages form a cycle: {cycle}; mark the field of an earlier step as Latest, or as Carried."
            ) from error

    def facts(self) -> dict[str, Any]:
        """Returns the graph without its functions and services, JSON-able: all that a plan needs."""
        return {"stages": [s.facts() for s in self.stages], "inputs": list(self.inputs), "resources": self.resources}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Pipeline:
        """Returns the pipeline described by :meth:`facts`; its stages cannot be called.

        Raises:
            PipelineError: the facts are incomplete.
        """
        try:
            stages = []
            for s in facts["stages"]:
                lists = {name: tuple(s[name]) for name in ("writes", "after")}
                stages.append(Stage(**{**s, **lists, "fn": _uncallable, "reads": tuple(Read(*r) for r in s["reads"])}))
            return cls(stages, facts["inputs"], facts["resources"])
        except (KeyError, TypeError) as error:
            raise PipelineError(f"the pipeline's description is not whole: {error}; make the run again.") from error

    def subset(self, names: Iterable[str]) -> Pipeline:
        """Returns a pipeline of these stages alone, on every step; fields that the others write become its inputs."""
        chosen = set(names)
        stages = [
            replace(s, every=None, ahead_of=None, after=tuple(a for a in s.after if a in chosen))
            for s in self.stages
            if s.name in chosen
        ]
        written = {w for s in stages for w in s.writes}
        known = {*self.writer, *self.inputs} - written
        needed = dict.fromkeys(r.field for s in stages for r in s.reads if r.field in known)
        return Pipeline(stages, inputs=tuple(needed), resources=self.resources)

    def hosts(self) -> dict[str, Hosted]:
        """Returns the processes that the stages need, by name; a PipelineError if two have one name."""
        found: dict[str, Hosted] = {}
        for host in filter(None, (s.host for s in self.stages)):
            if (known := found.setdefault(host.name, host)) is not host and known != host:
                raise PipelineError(f"two services are named '{host.name}'; give one of them another name.")
        return found

    @property
    def streaming(self) -> bool:
        """Whether a stage can stream and another one can run on its chunks."""
        return any(map(self.follows_stream, self.stages))

    def follows_stream(self, s: Stage) -> bool:
        """Whether the stage runs once for each chunk that another one emits."""
        return s.per == "chunk" and any(r.field in self.writer and self.writer[r.field].streams for r in s.reads)

    def task_of(self, i: TaskId) -> TaskId:
        """Returns the task's id, given its own or that of a chunk that it emits."""
        if i.parts > 1 and self.by_name[i.stage].streams:
            return TaskId(i.step, i.stage)
        return i

    def explain(self) -> str:
        """Returns a line for each stage and each edge: which stage feeds which, through which field."""
        wide = max((len(s.name) for s in self.stages), default=0)
        lines = []
        for s in self.order:
            facts = [f"on {s.on}"]
            if s.per != "step":
                facts.append(f"once a {s.per}" + (" where the policy streams" if s.per == "chunk" else ""))
            if s.mini_batches is not None:
                facts.append(counted(s.mini_batches, "mini-batch"))
            if s.epochs > 1:
                facts.append(f"{s.epochs} epochs over each {s.epochs_over}")
            if s.streams:
                facts.append("can stream")
            if s.every is not None:
                facts.append("every step" if s.every == 1 else f"every {s.every} steps")
            if s.host is not None:
                facts.append(f"in {s.host.name}" + (f" x{s.host.ranks}" if s.host.ranks > 1 else ""))
            if s.collects and (first := self.collector) is not None and len(self.collectors) > 1:
                facts.append("forms the parts" if s is first else f"the same groups as {first.name}")
            lines.append(f"{s.name:<{wide}}  {', '.join(facts)}")
            for read in dict.fromkeys(s.reads):  # one field may take the place of two
                source = "input" if read.field in self.inputs else "absent, optional"
                if read.field in self.writer:
                    source = f"from {self.writer[read.field].name}"
                when = f" ({WHEN[read.lag]})" if WHEN[read.lag] else ""
                lines.append(f"{'':<{wide}}    reads  {read.field} {source}{when}")
            if s.writes:
                lines.append(f"{'':<{wide}}    writes {', '.join(s.writes)}")
        return "\n".join([*lines, *self.unread()])


class TaskId(NamedTuple):
    """Stage x step x part. Sorts by step, then stage, then part."""

    step: int
    stage: str
    part: int = 0
    parts: int = 1

    def __str__(self) -> str:
        return f"{self.stage}[{self.step}.{self.part + 1}]" if self.parts > 1 else f"{self.stage}[{self.step}]"


class Input(NamedTuple):
    """The source of a task's field: the tasks that write it, none for an input or an initial state.

    A field is whole if the task receives all of it, whatever groups it works on.
    """

    field: str
    sources: tuple[TaskId, ...]
    state: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Task:
    """The unit that is scheduled.

    Attributes:
        deps: tasks that must finish first, each once; some only free the state that this one overwrites.
        inputs: its fields, in the order of the function's parameters.
        chosen_by: the tasks that determine which groups this one works on; none if it works on all groups.
        mini_batch: (i, n): it works on the i-th of the n mini-batches that these groups make; (0, 1): on all of them.
        epoch: how often its stage worked on these groups before, in this step.
        take: how many groups a collecting task returns; None for all.
        emits: chunks that it emits while it runs; 1: all groups when it ends.
        aligned: the fields it writes that other stages read together with its inputs, row by row within each group.
        keeps: whether these fields hold exactly the groups of its inputs; else it may select some of them.
        rank: place in the pipeline's order; breaks ties.
        max_staleness: of the policy at its step.
    """

    id: TaskId
    stage: Stage
    deps: tuple[TaskId, ...]
    inputs: tuple[Input, ...]
    chosen_by: tuple[TaskId, ...] = ()
    mini_batch: tuple[int, int] = (0, 1)
    epoch: int = 0
    take: int | None = None
    emits: int = 1
    aligned: tuple[str, ...] = ()
    keeps: bool = False
    rank: int = 0
    max_staleness: int = 0

    def __str__(self) -> str:
        return str(self.id)


@dataclass(frozen=True)
class TaskGraph:
    """The DAG of tasks, unrolled one step at a time: it stores no tasks.

    Attributes:
        pipeline: the pipeline to unroll.
        first, steps: the first and the last step; steps count from 1, 0 stands for the state before training.
        ahead: how many steps past the oldest unfinished one must be unrolled for tasks to become ready.
        unroll: returns the tasks of a step, in the pipeline's order.
        parts: tasks of each stage in one step; if steps differ, the most.
        groups: prompt groups in a step, where known.
        order: of the policy, passed to stage functions.
        max_staleness: of the policy; if steps differ, the largest.
        staleness: returns that of a step.
        sampled_ahead: returns how many later steps are sampled before a step's weights are synced.
        switched: returns the graph with another policy from a step on.

    A task may depend on a chunk that another task emits before its end. The chunk's id is the id of that task, with
    the chunk's number as the part and the number of chunks as the number of parts.
    """

    pipeline: Pipeline
    first: int
    steps: int
    ahead: int
    unroll: Callable[[int], Sequence[Task]]
    parts: Mapping[str, int]
    groups: int | None = None
    order: Literal["arrival", "index"] = "arrival"
    max_staleness: int = 0
    staleness: Callable[[int], int] = lambda step: 0
    sampled_ahead: Callable[[int], int] = lambda step: 0
    switched: Callable[[int, Any], TaskGraph] | None = None

    def window(self, first: int | None = None, last: int | None = None) -> nx.DiGraph:
        """Returns the tasks of steps ``first..last`` as a directed graph, to draw and to analyse."""
        import networkx as nx

        graph: nx.DiGraph = nx.DiGraph()
        tasks = [t for step in self._range(first, last) for t in self.unroll(step)]
        for t in tasks:
            graph.add_node(t.id, stage=t.stage.name, resource=t.stage.on, step=t.id.step)
        for t in tasks:
            deps = map(self.pipeline.task_of, t.deps)
            graph.add_edges_from((dep, t.id) for dep in deps if dep in graph)
        return graph

    def _range(self, first: int | None, last: int | None) -> range:
        first = self.first if first is None else max(first, self.first)
        return range(first, min(self.steps if last is None else last, self.steps) + 1)

    def explain(self, first: int | None = None, last: int | None = None) -> str:
        """Returns a line for each task of the window, with the tasks and chunks that it waits for."""
        tasks = [t for step in self._range(first, last) for t in self.unroll(step)]
        wide = max((len(str(t)) for t in tasks), default=0)
        waits = (f"after {', '.join(map(str, t.deps))}" if t.deps else "at once" for t in tasks)
        return "\n".join(f"{t!s:<{wide}}  {t.stage.on:<10}  {words}" for t, words in zip(tasks, waits, strict=True))

    def task(self, name: str) -> Task:
        """Returns the task of a name, such as ``actor_update[3.2]``; a KeyError if there is none."""
        step = name.partition("[")[2].rstrip("]").partition(".")[0]
        found = {str(t): t for t in self.unroll(int(step))} if step.isdecimal() else {}
        return found[name]
