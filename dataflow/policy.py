"""Scheduling policies: what they are, and the tasks and edges that they make of a pipeline. Pure.

Two integers and a flag make all of them: ``split``, the number of parts in which a step's rewards are collected and
used; ``max_staleness``, how many steps old the weights that a step samples with may be, counted from the weights that
its update starts from; and whether the rollout streams. Only this module turns them into tasks and edges:
:func:`expand` checks them, and :class:`Unroller` makes the tasks of a step, each with all that it waits for. The
scheduler orders these and knows no policy.

Why may the rollout of step 5 start before the rewards of step 4 have arrived, and what stops step 6's? Update 5 starts
from the weights that step 4 makes. Under ``off-policy`` and ``both`` (max_staleness=1) its samples may be drawn with
the weights of step 3, so ``rollout[5]`` waits for ``sync_weights[3]``, and for no reward of step 4. ``rollout[6]``
samples with the weights of step 4, so it waits for ``sync_weights[4]``, which waits for the last update of step 4,
which waits for its last rewards. Under ``both``:

>>> from dataflow.testing import grpo_pipeline
>>> graph = expand(grpo_pipeline(), preset("both", mini_batches=4), steps=8, mini_batches=4, groups=16)
>>> print(*graph.task("rollout[5]").deps)
sync_weights[3]
>>> print(*graph.task("rollout[6]").deps)
sync_weights[4]
>>> for name in ("gather_weights[4]", "actor_update[4.4]", "advantage[4.4]"):
...     print(name, "<-", *graph.task(name).deps)
gather_weights[4] <- actor_update[4.4]
actor_update[4.4] <- rollout[4] old_log_prob[4] advantage[4.4] actor_update[3.4] reward_collect[4.4] actor_update[4.3]
advantage[4.4] <- rollout[4] reward_collect[4.4]

``sync_weights[3]`` waits in its turn for ``rollout[4]``, which still samples with the weights that it overwrites. A
task that waits for nothing more takes a free slot of its resource in the order that :mod:`dataflow.scheduler` keeps.

Where does a new policy go? One that is fixed before the run is a new field of :class:`SchedulingPolicy`, which
:meth:`Unroller.numbers_of` reads, or a new edge of :meth:`Unroller._task`. One that depends on what the run measures
chooses such policies while it goes, as ``policy=auto`` does: ``running/replanning.py:AutoPolicy`` gets the end of each
step from ``running/attempt.py`` and predicts from the trace, ``planning/auto.py:PolicyChooser.decide`` chooses among
the predicted seconds, and ``Runner.switch`` changes the steps that have not begun. A rule on measurements instead of
predictions takes the place of what ``AutoPolicy.ended`` does.
``Scheduler._key`` decides which of two ready tasks gets a slot, from durations that the scheduler learns.
"""

from __future__ import annotations

import functools
import graphlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dataflow.errors import PipelineError, PolicyError, nearest
from dataflow.graph import Input, Lag, Piece, Pipeline, Read, Stage, Task, TaskGraph, TaskId

MAX_STALENESS = 4
PRESETS = ("baseline", "mini-batch", "off-policy", "both")
AUTO = "auto"
"""The policy of a run that plans itself, and changes split, staleness and streaming while it goes."""
STREAM = "+stream"
# Most chunks that a streaming rollout emits in a step: each costs a task, and more hardly start rewards earlier.
MAX_CHUNKS = 16


@dataclass(frozen=True)
class SchedulingPolicy:
    """How the steps of a pipeline overlap.

    Attributes:
        split: number of parts in which a step's rewards are collected and used; 1 waits for all of them.
        max_staleness: steps between the weights that generated a sample and those its update starts from, 0 to 4.
        order: which groups form a part: ``arrival``, those whose rewards arrive first, or ``index``, the next ones by
            id (reproducible bit for bit).
        stream_rollout: whether rewards of a group are requested as soon as it is sampled, not after the whole rollout.

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


@dataclass(frozen=True)
class PolicySchedule:
    """The policy of each step of a run that changes it.

    The weights that a step samples with are never older than those of the step before it, so the staleness rises by at
    most one from step to step.

    Attributes:
        changes: (step, policy): the policy from that step on, in order; the first also holds for all steps before.

    >>> schedule = PolicySchedule(((1, SchedulingPolicy()),)).switched(5, SchedulingPolicy(split=4, max_staleness=2))
    >>> [(step, policy.split, policy.max_staleness) for step, policy in schedule.changes]
    [(1, 1, 0), (5, 4, 1), (6, 4, 2)]
    """

    changes: tuple[tuple[int, SchedulingPolicy], ...]

    def at(self, step: int) -> SchedulingPolicy:
        """Returns the policy of a step."""
        return next((policy for since, policy in reversed(self.changes) if since <= step), self.changes[0][1])

    def switched(self, step: int, policy: SchedulingPolicy) -> PolicySchedule:
        """Returns the schedule with another policy from a step on.

        Raises:
            PolicyError: the policy has another order, which holds for the whole run.
        """
        if policy.order != self.changes[0][1].order:
            raise PolicyError(f"order={policy.order!r} cannot follow order={self.changes[0][1].order!r} in one run.")
        kept = tuple(change for change in self.changes if change[0] < step)
        if not kept:
            return PolicySchedule(((step, policy),))
        staleness = range(self.at(step - 1).max_staleness + 1, policy.max_staleness)
        rising = ((step + n, replace(policy, max_staleness=each)) for n, each in enumerate(staleness))
        return PolicySchedule((*kept, *rising, (step + len(staleness), policy)))

    @property
    def policies(self) -> tuple[SchedulingPolicy, ...]:
        """The policies, each once."""
        return tuple(dict.fromkeys(policy for _step, policy in self.changes))

    @property
    def most(self) -> int:
        """The largest staleness of a step."""
        return max(policy.max_staleness for policy in self.policies)


def preset(name: str, mini_batches: int) -> SchedulingPolicy:
    """Returns the policy of that name.

    Args:
        name: one of :data:`PRESETS`, followed by ``+stream`` for a rollout that streams.
        mini_batches: optimizer steps in a step.

    Raises:
        PolicyError: there is no preset of that name, or no mini-batch.

    >>> preset("both", mini_batches=4)
    SchedulingPolicy(split=4, max_staleness=1, order='arrival', stream_rollout=False)
    """
    base = name.removesuffix(STREAM)
    if base == AUTO:
        raise PolicyError(
            f"policy '{name}' changes while a run goes; leave it out, or give one of {', '.join(PRESETS)}."
        )
    _check_whole("mini_batches", mini_batches)
    split, staleness = {
        "baseline": (1, 0),
        "mini-batch": (mini_batches, 0),
        "off-policy": (1, 1),
        "both": (mini_batches, 1),
    }.get(base, (0, 0))
    if not split:
        every = [*PRESETS, *(known + STREAM for known in PRESETS), AUTO]
        known = f"policies: {', '.join(PRESETS)}, each also with {STREAM}; a run also takes {AUTO}"
        raise PolicyError(f"unknown policy '{name}'{nearest(name, every)} ({known}).")
    return SchedulingPolicy(split, staleness, stream_rollout=base != name)


# --- from a policy to a graph ---------------------------------------------------------------------------------


def expand(
    pipeline: Pipeline,
    policy: SchedulingPolicy | PolicySchedule,
    steps: int,
    mini_batches: int = 1,
    groups: int | None = None,
    first: int = 1,
) -> TaskGraph:
    """Unrolls a pipeline over steps under a policy, lazily.

    A task that overwrites a state (a field that is read as Carried or Latest) also waits for every reader of the
    version before. So each reader sees the version that the policy says, in whatever order rewards arrive.

    Args:
        pipeline: the stages of one step.
        policy: how steps overlap, or the policy of each step.
        steps: the last step.
        mini_batches: optimizer steps in a step, of the stages without a number of their own; ``policy.split`` must
            divide them.
        groups: prompt groups that a step trains on; required if the policy splits the step. If the rollout samples
            more, the collector takes this number, and the stages behind it work on those alone.
        first: the first step; it reads the initial states.

    Raises:
        PolicyError: ``split`` does not divide ``mini_batches``, a number is out of range, or a stage needs all groups
            at once and the policy splits them.
        PipelineError: the pipeline has no stage, or the unrolled graph has a cycle.
    """
    if not pipeline.stages:
        raise PipelineError("a pipeline without stages has nothing to run; give it a stage.")
    _check_whole("steps", steps, first)
    _check_whole("mini_batches", mini_batches)
    if groups is not None:
        _check_whole("groups", groups)
    schedule = policy if isinstance(policy, PolicySchedule) else PolicySchedule(((first, policy),))
    for each in schedule.policies:
        _check(pipeline, each, mini_batches, groups)
    # Each policy alone, and the steps around each change.
    changes = [step for step, _policy in schedule.changes if first < step <= steps]
    spans = [*(PolicySchedule(((1, each),)) for each in schedule.policies), *(_around(schedule, at) for at in changes)]
    reaches = [_reach(pipeline, tuple((at, each.max_staleness) for at, each in span.changes)) for span in spans]
    unroller = Unroller(pipeline, schedule, range(first, steps + 1), mini_batches, groups)
    numbers = [unroller.numbers_of(each) for each in schedule.policies]

    def switched(step: int, other: SchedulingPolicy) -> TaskGraph:
        return expand(pipeline, schedule.switched(step, other), steps, mini_batches, groups, first)

    # A writer of carried state waits for readers up to 1 + max_staleness steps on; one more keeps the slots filled.
    return TaskGraph(
        pipeline=pipeline,
        first=first,
        steps=steps,
        ahead=max(schedule.most + 1, *reaches),
        unroll=unroller.step,
        parts={s.name: max(each.tasks[s.name] for each in numbers) for s in pipeline.stages},
        groups=groups,
        order=schedule.changes[0][1].order,
        max_staleness=schedule.most,
        staleness=lambda step: schedule.at(step).max_staleness,
        sampled_ahead=lambda step: len(unroller.sampled_ahead(step)),
        switched=switched,
    )


@dataclass(frozen=True)
class _Numbers:
    """What a policy makes of one step."""

    pieces: Mapping[str, int]
    """In how many pieces each stage works on the step, one after the other: chunks, parts or mini-batches."""
    tasks: Mapping[str, int]
    """Of each stage, one for each piece and epoch."""
    chunks: int
    split: int
    in_a_part: int | None
    staleness: int

    def lag(self, kind: Lag) -> int:
        """Returns how many steps before its own a stage reads a field."""
        return 1 + self.staleness if kind == "carried" else int(kind == "latest")


class Unroller:
    """Makes the tasks of one step after the other; for its arguments see :func:`expand`."""

    def __init__(
        self, pipeline: Pipeline, schedule: PolicySchedule, steps: range, mini_batches: int, groups: int | None
    ) -> None:
        self.pipeline = pipeline
        self._schedule = schedule
        self._steps = steps
        self._mini_batches = mini_batches
        self._groups = groups
        known = {policy: self.numbers_of(policy) for policy in schedule.policies}
        # Bounded: a run of a million steps keeps those of its last ones.
        self._at = functools.lru_cache(maxsize=64)(lambda step: known[schedule.at(step)])
        self._known_ids = functools.lru_cache(maxsize=256)(self._new_ids)
        collected = {name for s in pipeline.collectors for name in s.writes}
        before = _upstream(pipeline, collected)
        grouped = collected.union(*(_values(pipeline, s) for s in before))
        self._behind = frozenset(s.name for s in _downstream(pipeline, collected))
        # Fields with rows of the groups that parts are formed of. Others, such as the prompts of a validation, hold
        # other groups that only share the ids.
        self._grouped = grouped.union(*(s.writes for s in _downstream(pipeline, grouped)))
        read = {name for s in pipeline.stages for name in _values(pipeline, s)}
        self._aligned = {s.name: tuple(w for w in s.writes if w in self._grouped & read) for s in pipeline.stages}
        first = pipeline.collector
        self._chooses = {s.name for s in (first, *_upstream(pipeline, first.writes))} if first is not None else set()
        self._writing = {s.name for s in pipeline.stages if not pipeline.states.isdisjoint(s.writes)}
        self._readers: dict[str, list[tuple[Stage, Lag]]] = {name: [] for name in pipeline.states}
        self._early: dict[str, list[Stage]] = {}
        for s in pipeline.stages:
            for r in s.reads:
                if r.field in pipeline.states:
                    self._readers[r.field].append((s, r.lag))
            if s.ahead_of is not None:
                self._early.setdefault(s.ahead_of, []).append(s)

    def numbers_of(self, policy: SchedulingPolicy) -> _Numbers:
        """Returns what a policy makes of a step."""
        stages, groups = self.pipeline.stages, self._groups
        # Parts are made of whole chunks.
        fitting = [d for d in divisors(groups or self._mini_batches) if d % self._mini_batches == 0 and d <= MAX_CHUNKS]
        chunks = max(fitting, default=self._mini_batches) if policy.stream_rollout else 1
        of: dict[Piece, int] = {"step": 1, "chunk": 1, "part": policy.split, "mini-batch": self._mini_batches}
        pieces = {s.name: s.mini_batches or (chunks if self.pipeline.follows_stream(s) else of[s.per]) for s in stages}
        return _Numbers(
            pieces=pieces,
            tasks={s.name: pieces[s.name] * s.epochs for s in stages},
            chunks=chunks,
            split=policy.split,
            in_a_part=groups // policy.split if groups is not None else None,
            staleness=policy.max_staleness,
        )

    def step(self, step: int) -> list[Task]:
        """Returns the tasks of a step, in the order of the pipeline."""
        return [
            self._task(s, step, part, rank)
            for rank, s in enumerate(self.pipeline.order)
            for part in range(len(self._ids(s, step)))
        ]

    def sampled_ahead(self, step: int) -> list[int]:
        """Returns the later steps that are sampled before a step is synced, since they read an older version."""
        later = range(step + 1, step + self._schedule.most + 1)
        return [at for at in later if at - step <= self._at(at).staleness]

    def _task(self, s: Stage, step: int, part: int, rank: int) -> Task:
        """Returns a task with all that it waits for.

        Under ``both`` with four mini-batches, the second update of step 3 waits for these:

        >>> from dataflow.testing import grpo_pipeline
        >>> graph = expand(grpo_pipeline(), preset("both", mini_batches=4), steps=8, mini_batches=4, groups=16)
        >>> print(*graph.task("actor_update[3.2]").deps, sep=chr(10))
        rollout[3]
        old_log_prob[3]
        advantage[3.2]
        actor_update[2.4]
        reward_collect[3.2]
        actor_update[3.1]

        - ``rollout[3]``, ``old_log_prob[3]`` and ``advantage[3.2]`` write the fields that it reads: the first two once
          a step, the advantages once a part, and its groups are those of part 2.
        - ``actor_update[2.4]`` wrote the actor that the step starts from (``Latest``).
        - ``reward_collect[3.2]`` chose the groups of part 2, which are its groups.
        - ``actor_update[3.1]`` wrote the actor that it goes on from: updates of a step run one after the other.

        It does not wait for the rewards of parts 3 and 4. The first update of the step overwrites the actor of step 2,
        so it waits for all readers of that version instead of an update before it:

        >>> print(*graph.task("actor_update[3.1]").deps)
        rollout[3] old_log_prob[3] advantage[3.1] actor_update[2.4] reward_collect[3.1] gather_weights[2]

        ``gather_weights[2]`` reads the actor that step 2 wrote, and ``old_log_prob[3]`` reads it as ``Latest``.
        """
        me, numbers = self._ids(s, step), self._at(step)
        # The writers of the fields that it reads.
        inputs = tuple(self._input(s, step, part, read) for read in s.reads)
        deps = [source for item in inputs for source in item.sources]
        # The tasks that chose its groups. A field that is absent on this step is no edge to them.
        piece, epoch = self._place(s, step, part)
        chosen_by, mini_batch = self._chosen_by(s, step, part, piece, deps)
        deps += chosen_by
        # What was declared to come first: after= of this stage, and ahead_of= of others.
        for name in s.after:
            deps += self._beside(self.pipeline.by_name[name], s, step, part)
        for early in self._early.get(s.name, ()):
            deps += [i for later in self.sampled_ahead(step) for i in self._ids(early, later)]
        # The tasks of its own stage before it, and the readers of the state that it overwrites.
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
            mini_batch=mini_batch,
            epoch=epoch,
            take=numbers.in_a_part if s.collects else None,
            emits=numbers.chunks if s.streams else 1,
            aligned=self._aligned[s.name],
            keeps=s.name not in self._chooses,
            rank=rank,
            max_staleness=numbers.staleness,
        )

    def _input(self, s: Stage, step: int, part: int, read: Read) -> Input:
        """Returns the tasks that write a field for a task.

        A field of the own step comes from the tasks whose groups the reader works on; a state comes from the last task
        that wrote it in the step that the reader's lag says. With max_staleness=1 a rollout samples with the weights of
        1 + 1 steps before (``Carried``), and log-probs read the actor of the step before (``Latest``):

        >>> from dataflow.testing import grpo_pipeline
        >>> graph = expand(grpo_pipeline(), preset("both", mini_batches=4), steps=8, mini_batches=4, groups=16)
        >>> def reads(name):
        ...     for item in graph.task(name).inputs:
        ...         print(item.field, "from", *item.sources or ["outside"])
        >>> reads("rollout[5]")
        prompts from outside
        weights_version from sync_weights[3]
        >>> reads("old_log_prob[5]")
        responses from rollout[5]
        actor from actor_update[4.4]
        >>> reads("advantage[5.2]")
        responses from rollout[5]
        rewards from reward_collect[5.2]
        """
        writer = self.pipeline.writer.get(read.field)
        foreign = self._joins_parts(s, step) and read.field not in self._grouped
        if writer is None:
            return Input(read.field, (), whole=foreign)
        if read.field in self.pipeline.states:
            # A state has one value at a time, that of the last task that wrote it.
            return Input(read.field, self._ids(writer, step - self._at(step).lag(read.lag))[-1:], state=True)
        sources = self._beside(writer, s, step, part)
        return Input(read.field, sources, whole=foreign and len(sources) == 1)

    def _chosen_by(
        self, s: Stage, step: int, part: int, piece: int, sources: Sequence[TaskId]
    ) -> tuple[tuple[TaskId, ...], tuple[int, int]]:
        """Returns the tasks that chose a task's groups, none if it works on all; and (i, n), its mini-batch of them."""
        collector, numbers = self.pipeline.collector, self._at(step)
        if s.per == "chunk" and numbers.tasks[s.name] > 1:
            return (next(i for i in sources if i.parts > 1 and self.pipeline.by_name[i.stage].streams),), (0, 1)
        if collector is None or s is collector:
            return (), (0, 1)
        if s.per in ("part", "mini-batch"):
            in_a_part = numbers.pieces[s.name] // numbers.split
            return self._beside(collector, s, step, part)[:1], (piece % in_a_part, in_a_part)
        return (self._ids(collector, step) if self._joins_parts(s, step) else ()), (0, 1)

    def _overwrites(self, s: Stage, step: int) -> list[TaskId]:
        """Returns what a step's first write of a state waits for: the readers of the version before, and its write.

        >>> from dataflow.testing import grpo_pipeline
        >>> graph = expand(grpo_pipeline(), preset("both", mini_batches=4), steps=8, mini_batches=4, groups=16)
        >>> print(*graph.task("sync_weights[3]").deps)
        gather_weights[3] rollout[4] sync_weights[2]

        ``rollout[4]`` samples with the weights of step 2, which this sync overwrites.
        """
        deps: list[TaskId] = []
        for name in s.writes:
            for reader, kind in self._readers.get(name, ()):
                for at in self._readers_of(step - 1, kind):
                    if reader.name != s.name or at != step:  # it waits for its own previous write anyway
                        deps += self._ids(reader, at)
        return [*deps, *self._ids(s, step - 1)[-1:]]

    def _readers_of(self, version: int, kind: Lag) -> Iterable[int]:
        """Returns the steps whose stages read a version of a state; of the initial version, those after it alone."""
        initial = version < self._steps[0]
        if kind != "carried":
            lag = int(kind == "latest")
            return range(version + 1 if initial else version + lag, version + 1 + lag)
        lags = ((at, at - self._at(at).staleness) for at in range(version + 1, version + self._schedule.most + 2))
        return [at for at, read in lags if read == version + 1 or (initial and read <= version)]

    def _runs(self, s: Stage, step: int) -> bool:
        if s.ahead_of is not None:
            other = self.pipeline.by_name[s.ahead_of]
            leads = range(1, 1 + self._at(step).staleness) if step in self._steps else ()
            return any(self._runs(other, step - lead) for lead in leads)
        return step in self._steps and (s.every is None or step % s.every == 0 or step == self._steps[-1])

    def _ids(self, s: Stage, step: int) -> tuple[TaskId, ...]:
        """Returns the ids of a stage's tasks of a step, none if it does not run on it."""
        return self._known_ids(s.name, step)

    def _new_ids(self, name: str, step: int) -> tuple[TaskId, ...]:
        n = self._at(step).tasks[name]
        return (
            tuple(TaskId(step, name, part, n) for part in range(n))
            if self._runs(self.pipeline.by_name[name], step)
            else ()
        )

    def _place(self, s: Stage, step: int, part: int) -> tuple[int, int]:
        """Returns which piece of the step a task works on, and which epoch of it this is."""
        if s.epochs_over == "step":
            epoch, piece = divmod(part, self._at(step).pieces[s.name])
        else:
            piece, epoch = divmod(part, s.epochs)
        return piece, epoch

    def _beside(self, source: Stage, reader: Stage, step: int, part: int) -> tuple[TaskId, ...]:
        """Returns the source's tasks whose groups the reader's part needs: one that has them all, or several.

        Of the epochs of a source these are the tasks of the last one.
        """
        pieces = self._at(step).pieces
        mine, theirs = pieces[reader.name], pieces[source.name]
        piece, _epoch = self._place(reader, step, part)
        if source.streams and reader.per == "chunk":
            return (TaskId(step, source.name, piece, mine),)
        ids = self._ids(source, step)
        if source.epochs > 1:
            ids = tuple(i for i in ids if self._place(source, step, i.part)[1] == source.epochs - 1)
        return ids[piece * theirs // mine : -(-(piece + 1) * theirs // mine)]

    def _joins_parts(self, s: Stage, step: int) -> bool:
        """Whether the stage runs once on the groups of all parts."""
        once = s.name in self._behind and s.per not in ("part", "mini-batch")
        return once and self._at(step).tasks[s.name] == 1


def _values(pipeline: Pipeline, s: Stage) -> list[str]:
    """Returns the fields that a stage reads from its own step; states have no groups."""
    return [r.field for r in s.reads if r.field not in pipeline.states]


def _upstream(pipeline: Pipeline, fields: Iterable[str]) -> list[Stage]:
    """Returns the stages of the step that make these fields, directly or through other stages."""
    found, stages = set(fields), []
    for s in reversed(pipeline.order):
        if found.intersection(s.writes):
            found.update(_values(pipeline, s))
            stages.append(s)
    return stages


def _downstream(pipeline: Pipeline, fields: Iterable[str]) -> list[Stage]:
    """Returns the stages that read these fields, directly or through other stages of the step."""
    found, stages = set(fields), []
    for s in pipeline.order:
        if found.intersection(_values(pipeline, s)):
            found.update(s.writes)
            stages.append(s)
    return stages


# --- checks ---------------------------------------------------------------------------------------------------


def divisors(n: int) -> list[int]:
    """Returns the whole numbers that divide a number, the smallest first."""
    return sorted({each for d in range(1, math.isqrt(n) + 1) if n % d == 0 for each in (d, n // d)})


def check_batch(prompts: int, mini_batches: int, key: str = "mini_batches") -> None:
    """Checks that whole groups fill the mini-batches evenly; ``key`` says which number the user gave."""
    if mini_batches < 1 or prompts % mini_batches:
        raise PolicyError(
            f"{key}={mini_batches} does not divide {prompts} prompt groups; use {_or(divisors(prompts))}."
        )


def check_split(policy: SchedulingPolicy, mini_batches: int, key: str = "mini_batches") -> None:
    """Checks that the policy's parts are made of whole mini-batches; ``key`` says which number the user gave."""
    if mini_batches < 1 or mini_batches % policy.split:
        raise PolicyError(
            f"policy.split={policy.split} does not divide {key}={mini_batches}; "
            f"use policy.split={_or(divisors(mini_batches))}."
        )


def _or(numbers: Sequence[int]) -> str:
    *head, tail = map(str, numbers)
    return f"{', '.join(head)} or {tail}" if head else tail


def _check_whole(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, int) or value < least:
        raise PolicyError(f"{name}={value!r}; give a whole number of {least} or more.")


def _check(pipeline: Pipeline, policy: SchedulingPolicy, mini_batches: int, groups: int | None) -> None:
    """Checks that a pipeline can run under a policy."""
    check_split(policy, mini_batches)
    if groups is not None:
        check_batch(groups, mini_batches)
    elif policy.split > 1:
        raise PolicyError(f"split={policy.split} needs the number of prompt groups in a step; give groups=.")
    for s in pipeline.stages:
        if s.mini_batches is not None:
            try:
                check_split(policy, s.mini_batches)
                check_batch(groups or s.mini_batches, s.mini_batches)
            except PolicyError as error:
                raise PolicyError(f"stage '{s.name}': {error}") from None
        if s.epochs > 1 and s.epochs_over == "step" and policy.split > 1:
            raise PolicyError(
                f"stage '{s.name}' passes over the whole step {s.epochs} times (epochs_over='step'), but split="
                f"{policy.split} trains on a part before the others are there; use baseline, off-policy or "
                "epochs_over='mini-batch'."
            )
    if policy.split > 1:
        _check_parts(pipeline, policy.split)


def _check_parts(pipeline: Pipeline, split: int) -> None:
    """Checks that no stage that runs once a part reads from one that needs all parts."""
    for_a_part: set[str] = set()
    for_all: set[str] = set()
    for s in pipeline.order:
        sources = [pipeline.writer[r.field].name for r in s.reads if r.lag == "none" and r.field in pipeline.writer]
        waits = next((name for name in sources if name in for_all), None)
        if s.per not in ("part", "mini-batch"):
            if waits is not None or not for_a_part.isdisjoint(sources):
                for_all.add(s.name)
            continue
        if pipeline.collector is None:
            raise PipelineError(
                f"stage '{s.name}' runs once a {s.per}, but no stage forms the parts; "
                "give the one that collects rewards role='collects'."
            )
        if waits is not None:
            raise PipelineError(
                f"stage '{s.name}' runs once a {s.per}, but reads from '{waits}', which needs all parts of "
                f"the step; make '{waits}' splittable or use a policy with split=1."
            )
        for_a_part.add(s.name)
        if s.per == "part" and s.whole_batch and (why := s.whole_batch(s.services)):
            raise PolicyError(
                f"stage '{s.name}' needs the whole batch ({why}), but the policy splits it in {split} parts; "
                "use baseline, off-policy or another estimator."
            )


# --- the window -----------------------------------------------------------------------------------------------


def _around(schedule: PolicySchedule, step: int) -> PolicySchedule:
    """Returns the policies from shortly before a change until shortly after it, as those of steps from 1 on."""
    margin = 2 * (1 + schedule.most)
    least = max(1, step - margin)
    near = [(at - least + 1, policy) for at, policy in schedule.changes if least < at <= step + margin]
    return PolicySchedule(((1, schedule.at(least)), *near))


@functools.lru_cache(maxsize=64)
def _reach(pipeline: Pipeline, staleness: tuple[tuple[int, int], ...]) -> int:
    """Returns how many steps ahead a task may depend on another, so that the window holds both.

    The next write of a state waits for readers in later steps, which may wait for other writes in turn. Parts, epochs
    and chunks change nothing of this, so each stage has one task here; and optional stages run at every step, so that a
    wrong pipeline fails in a short run as in a long one. ``staleness`` is (step, k): the max_staleness from that step
    on, the first one from step 1 on.
    """
    longest, last = 1 + max(k for _step, k in staleness), staleness[-1][0]
    # A change adds no dependency that is longer than those under each policy, but it may close a circle. The tasks of
    # steps 1..known count; none of a valid pipeline depends more than half steps ahead.
    known, half = (4 * longest, 4 * longest) if last == 1 else (last + longest, 2 * longest)
    single = [replace(s, every=s.every and 1, mini_batches=None, epochs=1) for s in pipeline.stages]
    schedule = PolicySchedule(tuple((step, SchedulingPolicy(max_staleness=k)) for step, k in staleness))
    steps = range(1, known + half + 1)
    unroll = Unroller(Pipeline(single, pipeline.inputs, pipeline.resources), schedule, steps, 1, None).step
    deps = {t.id: t.deps for step in steps for t in unroll(step)}
    latest: dict[TaskId, int] = {}
    try:
        for i in graphlib.TopologicalSorter(deps).static_order():
            latest[i] = max([i.step, *(latest[dep] for dep in deps[i])])
    except graphlib.CycleError as error:
        cycle = " -> ".join(str(i) for i in reversed(error.args[1]))
        raise PipelineError(f"the tasks wait for each other: {cycle}; let one stage read another version.") from error
    ahead, task = max((step - i.step, i) for i, step in latest.items() if i.step <= known)
    if ahead > half:
        raise PipelineError(
            f"stage '{task.stage}' waits for stages of ever later steps, through the states they read; "
            "let one stage read another version."
        )
    return ahead
