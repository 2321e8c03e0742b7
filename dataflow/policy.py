"""Scheduling policies, and `expand`: the only place that knows what a policy means for the graph.

Two integers make all of them: `split`, in how many parts a step's rewards are collected and used, and
`max_staleness`, how many steps old the weights may be that generate a step's samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dataflow.errors import PipelineError, PolicyError, nearest
from dataflow.graph import Grain, Input, Pipeline, Read, Stage, Task, TaskGraph, TaskId

MAX_STALENESS = 4
PRESETS = ("baseline", "mini-batch", "off-policy", "both")
STREAM = "+stream"
# Sets of groups that a streaming rollout hands on in a step: each costs a task, and more hardly start rewards earlier.
EMISSIONS = 16


@dataclass(frozen=True)
class SchedulingPolicy:
    """How a pipeline's steps overlap.

    Attributes:
        split: parts in which a step's rewards are collected and used; 1 waits for all of them.
        max_staleness: steps between the weights that generated a sample and those its update starts from, 0 to 4.
        order: which groups make a part: those whose rewards arrive first, or the next ones by index
            (reproducible bit for bit).
        stream_rollout: groups are sent for their rewards as they finish, not when the whole rollout does.

    >>> SchedulingPolicy(split=4, max_staleness=1)
    SchedulingPolicy(split=4, max_staleness=1, order='arrival', stream_rollout=False)
    """

    split: int = 1
    max_staleness: int = 0
    order: Literal["arrival", "index"] = "arrival"
    stream_rollout: bool = False

    def __post_init__(self) -> None:
        if self.split < 1:
            raise PolicyError(f"split={self.split}; give 1 (wait for all rewards) or more parts.")
        if not 0 <= self.max_staleness <= MAX_STALENESS:
            raise PolicyError(f"max_staleness={self.max_staleness}; give 0 (on-policy) to {MAX_STALENESS}.")
        if self.order not in ("arrival", "index"):
            raise PolicyError(f"order={self.order!r}; use 'arrival' or 'index'.")


def preset(name: str, mini_batches: int) -> SchedulingPolicy:
    """Returns the policy of that name for a run of ``mini_batches`` optimizer steps a step.

    Args:
        name: one of :data:`PRESETS`, with ``+stream`` behind it if the rollout is to stream.
        mini_batches: optimizer steps in a step.

    Raises:
        PolicyError: no preset of that name.

    >>> preset("both", mini_batches=4)
    SchedulingPolicy(split=4, max_staleness=1, order='arrival', stream_rollout=False)
    """
    base = name.removesuffix(STREAM)
    split, staleness = {
        "baseline": (1, 0),
        "mini-batch": (mini_batches, 0),
        "off-policy": (1, 1),
        "both": (mini_batches, 1),
    }.get(base, (0, 0))
    if not split:
        every = [*PRESETS, *(known + STREAM for known in PRESETS)]
        known = f"policies: {', '.join(PRESETS)}, each also with {STREAM}"
        raise PolicyError(f"unknown policy '{name}'{nearest(name, every)} ({known}).")
    return SchedulingPolicy(split, staleness, stream_rollout=base != name)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _or(numbers: Sequence[int]) -> str:
    *head, tail = map(str, numbers)
    return f"{', '.join(head)} or {tail}" if head else tail


def check_batch(prompts: int, mini_batches: int) -> None:
    """Fails unless whole groups fill the mini-batches evenly.

    Raises:
        PolicyError: naming the numbers that would do.
    """
    if mini_batches < 1 or prompts % mini_batches:
        raise PolicyError(
            f"mini_batches={mini_batches} does not divide {prompts} prompt groups; use {_or(divisors(prompts))}."
        )


def check_split(policy: SchedulingPolicy, mini_batches: int) -> None:
    """Fails unless the policy's parts are made of whole mini-batches.

    Raises:
        PolicyError: naming the numbers that would do.
    """
    if mini_batches < 1 or mini_batches % policy.split:
        raise PolicyError(
            f"split={policy.split} does not divide mini_batches={mini_batches}; use {_or(divisors(mini_batches))}."
        )


def expand(
    pipeline: Pipeline,
    policy: SchedulingPolicy,
    steps: int,
    mini_batches: int = 1,
    groups: int | None = None,
    first: int = 1,
) -> TaskGraph:
    """Unrolls a pipeline over ``steps`` steps under a policy, lazily.

    Args:
        pipeline: the stages of one step.
        policy: how steps overlap.
        steps: the last step.
        mini_batches: optimizer steps in a step; ``policy.split`` must divide them.
        groups: prompt groups that a step trains on; needed when the policy splits it. The step may have more: the
            stage that forms the parts takes this many of them, and what reads from it works on those alone.
        first: the first step; states that it reads are then the initial ones.

    A state that an engine holds in place (a field some stage reads as Carried or Latest) gets more than data
    edges: the task that overwrites it waits for every reader of the version before. So each reader sees exactly
    the version that the policy says, whatever the order in which rewards come back.

    Raises:
        PolicyError: ``split`` does not divide ``mini_batches``, or a number is out of range.
        PipelineError: a stage needs all groups at once and the policy splits them, or the unrolled graph has
            a cycle.
    """
    if steps < first:
        raise PolicyError(f"steps={steps}; give {first} or more.")
    check_split(policy, mini_batches)
    if groups is not None:
        check_batch(groups, mini_batches)
    elif policy.split > 1:
        raise PolicyError(f"split={policy.split} needs the number of prompt groups in a step; give groups=.")
    _check_stages(pipeline, policy)
    reach = _reach(pipeline, policy, mini_batches, groups)
    unroller = _Unroller(pipeline, policy, range(first, steps + 1), mini_batches, groups)
    # A writer of carried state waits for readers up to 1 + max_staleness steps on; one more keeps the slots filled.
    return TaskGraph(
        pipeline=pipeline,
        first=first,
        steps=steps,
        ahead=max(reach, policy.max_staleness + 1),
        unroll=unroller.step,
        parts=unroller.parts,
        groups=groups,
        order=policy.order,
        max_staleness=policy.max_staleness,
    )


def _check_stages(pipeline: Pipeline, policy: SchedulingPolicy) -> None:
    split_stages: set[str] = set()
    gathered: dict[str, str] = {}
    for s in pipeline.order:
        sources = [pipeline.writer[r.field].name for r in s.reads if r.lag == "none" and r.field in pipeline.writer]
        if s.grain == "emission":
            continue  # it runs ahead of the parts; whoever reads all of it waits for all of it
        if s.grain != "step" and pipeline.former is None and policy.split > 1:
            raise PipelineError(
                f"stage '{s.name}' runs once a {s.grain}, but no stage forms the parts; "
                "mark the one that collects rewards with forms_parts=True."
            )
        if s.grain != "step" and policy.split > 1:
            for name in sources:
                if name in gathered:
                    raise PipelineError(
                        f"stage '{s.name}' runs once a {s.grain}, but reads from '{name}', which needs all parts of "
                        f"the step; make '{name}' splittable or use a policy with split=1."
                    )
        if s.grain != "step":
            split_stages.add(s.name)
        elif any(name in split_stages or name in gathered for name in sources):
            gathered[s.name] = s.name
        if policy.split > 1 and s.grain == "part" and s.whole_batch and (why := s.whole_batch(s.tools)):
            raise PipelineError(
                f"stage '{s.name}' needs the whole batch ({why}), but the policy splits it in {policy.split} parts; "
                "use baseline, off-policy or another estimator."
            )


def _reach(pipeline: Pipeline, policy: SchedulingPolicy, mini_batches: int, groups: int | None) -> int:
    """Returns how many steps ahead a task may wait for another, so that the window holds both.

    A next write of a state waits for readers in later steps, and those may wait for other writes in turn.
    Optional stages count at every step here, so that what is wrong fails in a short run as in a long one.

    Raises:
        PipelineError: tasks wait for each other, or for ever later steps.
    """
    import graphlib

    stages = [replace(s, every=None) for s in pipeline.stages]
    always = Pipeline(stages, pipeline.inputs, pipeline.resources)
    half = 4 * (policy.max_staleness + 1)
    steps = range(1, 2 * half + 1)
    unroller = _Unroller(always, policy, steps, mini_batches, groups)
    deps = {t.id: [always.task_of(dep) for dep in t.deps] for step in steps for t in unroller.step(step)}
    latest: dict[TaskId, int] = {}
    try:
        for i in graphlib.TopologicalSorter(deps).static_order():
            latest[i] = max([i.step, *(latest[dep] for dep in deps[i])])
    except graphlib.CycleError as error:
        cycle = " -> ".join(str(i) for i in reversed(error.args[1]))
        raise PipelineError(f"the tasks wait for each other: {cycle}; let one stage read another version.") from error
    ahead, task = max((step - i.step, i) for i, step in latest.items() if i.step <= half)
    if ahead > half:
        raise PipelineError(
            f"stage '{task.stage}' waits for stages of ever later steps, through the states they read; "
            "let one stage read another version."
        )
    return ahead


def _emissions(groups: int | None, mini_batches: int) -> int:
    """Returns into how many sets of groups a streaming rollout is cut, so that parts are made of whole sets."""
    fitting = [d for d in divisors(groups or mini_batches) if d % mini_batches == 0]
    return max([d for d in fitting if d <= EMISSIONS], default=mini_batches)


def _behind(pipeline: Pipeline) -> frozenset[str]:
    """Returns the stages that read, themselves or through others of the step, what the parts are formed of."""
    former = pipeline.former
    return frozenset(s.name for s in _downstream(pipeline, former.writes)) if former else frozenset()


def _grouped(pipeline: Pipeline) -> frozenset[str]:
    """Returns the fields whose rows are of the groups that parts are formed of: what leads there, and what it becomes.

    Others hold groups of their own, which only share the numbers (the prompts of a validation).
    """
    found = set(pipeline.former.writes) if pipeline.former else set()
    for s in reversed(pipeline.order):
        if found.intersection(s.writes):
            found.update(_values(pipeline, s))
    return frozenset(found.union(*(s.writes for s in _downstream(pipeline, found))))


def _leading(pipeline: Pipeline) -> frozenset[str]:
    """Returns the stages on the way to the one that forms the parts, itself included: they may choose groups."""
    if pipeline.former is None:
        return frozenset()
    found, stages = set(_values(pipeline, pipeline.former)), {pipeline.former.name}
    for s in reversed(pipeline.order):
        if found.intersection(s.writes):
            found.update(_values(pipeline, s))
            stages.add(s.name)
    return frozenset(stages)


def _downstream(pipeline: Pipeline, fields: Iterable[str]) -> list[Stage]:
    """Returns the stages that read values of these fields, or what others of the same step made of them."""
    found, stages = set(fields), []
    for s in pipeline.order:
        if found.intersection(_values(pipeline, s)):
            found.update(s.writes)
            stages.append(s)
    return stages


def _values(pipeline: Pipeline, s: Stage) -> list[str]:
    """Returns the fields of its own step that a stage reads; a state goes from step to step and is of no groups."""
    return [r.field for r in s.reads if r.field not in pipeline.states]


class _Unroller:
    """Makes the tasks of a step; holds what is the same for all steps."""

    def __init__(
        self,
        pipeline: Pipeline,
        policy: SchedulingPolicy,
        steps: range,
        mini_batches: int,
        groups: int | None,
    ) -> None:
        self.pipeline = pipeline
        self.steps = steps
        self.take = groups // policy.split if groups is not None else None
        emissions = _emissions(groups, mini_batches) if policy.stream_rollout else 1
        self.emissions = emissions
        of: dict[Grain, int] = {"step": 1, "emission": 1, "part": policy.split, "mini-batch": mini_batches}
        self.parts = {s.name: emissions if pipeline.follows_stream(s) else of[s.grain] for s in pipeline.stages}
        self.split = policy.split
        self.behind, self.grouped = _behind(pipeline), _grouped(pipeline)
        self.leading = _leading(pipeline)
        self.read = frozenset(field for s in pipeline.stages for field in _values(pipeline, s))
        self._known: dict[tuple[str, int], list[TaskId]] = {}
        self.lag = {"none": 0, "latest": 1, "carried": 1 + policy.max_staleness}
        self.readers: dict[str, list[tuple[Stage, int]]] = {f: [] for f in pipeline.states}
        for s in pipeline.stages:
            for read in s.reads:
                if read.field in self.readers:
                    self.readers[read.field].append((s, self.lag[read.lag]))

    def step(self, step: int) -> list[Task]:
        tasks = []
        for rank, s in enumerate(self.pipeline.order):
            if self._runs(s, step):
                tasks += [self._task(s, step, part, rank) for part in range(self.parts[s.name])]
        return tasks

    def _runs(self, s: Stage, step: int) -> bool:
        return step in self.steps and (s.every is None or step % s.every == 0 or step == self.steps[-1])

    def _ids(self, s: Stage, step: int) -> list[TaskId]:
        found = self._known.get((s.name, step))
        if found is None:
            n = self.parts[s.name]
            found = [TaskId(step, s.name, part, n) for part in range(n)] if self._runs(s, step) else []
            if len(self._known) > 256:
                self._known.clear()  # steps that are long over
            self._known[s.name, step] = found
        return found

    def _beside(self, source: Stage, reader: Stage, step: int, part: int) -> list[TaskId]:
        """The source's tasks whose groups the reader's part needs: one coarser or equal, or several finer ones."""
        ids = self._ids(source, step)
        mine = self.parts[reader.name]
        if source.streams and reader.grain == "emission":
            return [TaskId(step, source.name, part, mine)]
        if not ids:
            return ids
        if len(ids) <= mine:
            return [ids[part * len(ids) // mine]]
        each = len(ids) // mine
        return ids[part * each : (part + 1) * each]

    def _gathers(self, s: Stage) -> bool:
        """Whether the stage runs once, on the groups of all parts together."""
        return s.name in self.behind and s.grain not in ("part", "mini-batch") and self.parts[s.name] == 1

    def _input(self, s: Stage, step: int, part: int, read: Read) -> Input:
        writer = self.pipeline.writer.get(read.field)
        foreign = self._gathers(s) and read.field not in self.grouped
        if writer is None:
            return Input(read.field, (), whole=foreign)
        if read.field in self.pipeline.states:
            # A state has one holder: what counts is the last task that changed it.
            return Input(read.field, tuple(self._ids(writer, step - self.lag[read.lag])[-1:]), state=True)
        sources = tuple(self._beside(writer, s, step, part))
        return Input(read.field, sources, whole=foreign and len(sources) == 1)

    def _task(self, s: Stage, step: int, part: int, rank: int) -> Task:
        me = self._ids(s, step)
        inputs = tuple(self._input(s, step, part, read) for read in s.reads)
        deps = [source for item in inputs for source in item.sources]
        former = self.pipeline.former
        chosen_by: tuple[TaskId, ...] = ()
        share = (0, 1)
        if s.grain == "emission" and self.parts[s.name] > 1:
            chosen_by = (next(d for d in deps if d.parts > 1 and self.pipeline.by_name[d.stage].streams),)
        elif former is not None and s.grain in ("part", "mini-batch") and not s.forms_parts:
            chosen_by = (self._beside(former, s, step, part)[0],)
            each = self.parts[s.name] // self.split
            share = (part % each, each)
            deps += chosen_by
        elif former is not None and self._gathers(s):
            chosen_by = tuple(self._ids(former, step))
        for name in s.after:
            deps += self._beside(self.pipeline.by_name[name], s, step, part)
        writes_state = any(w in self.pipeline.states for w in s.writes)
        if part and (s.forms_parts or writes_state):
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
            take=self.take if s.forms_parts else None,
            emits=self.emissions if s.streams else 1,
            aligned=tuple(w for w in s.writes if w in self.grouped and w in self.read),
            keeps=s.name not in self.leading,
            rank=rank,
        )

    def _overwrites(self, s: Stage, step: int) -> list[TaskId]:
        """The tasks that must be done before step's first write of a state: its last write, and its readers."""
        deps: list[TaskId] = []
        for name in s.writes:
            for reader, lag in self.readers.get(name, ()):
                if reader.name == s.name and lag == 1:
                    continue  # it waits for its own last write anyway
                # Readers of the version that step - 1 wrote; before the first write, of the initial one.
                since = step - 1 + lag if step > self.steps[0] else step
                for at in range(since, step + lag):
                    deps += self._ids(reader, at)
        return deps + self._ids(s, step - 1)[-1:]
