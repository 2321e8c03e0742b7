"""Scheduling policies, and `expand`, which turns one into numbers of tasks, groups and steps; `Unroller` makes edges.

Two integers make all of them: `split`, the number of parts in which a step's rewards are collected and used, and
`max_staleness`, how many steps old the weights that generate a step's samples may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal

from dataflow.errors import PipelineError, PolicyError, nearest
from dataflow.graph import Piece, Pipeline, Stage, TaskGraph
from dataflow.tasks.reach import reach, reaches_of
from dataflow.tasks.unroll import Shape, Unroller

MAX_STALENESS = 4
PRESETS = ("baseline", "mini-batch", "off-policy", "both")
AUTO = "auto"
"""The policy of a run that plans itself and changes between others."""
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
        found = self.changes[0][1]
        for since, policy in self.changes:
            if since > step:
                break
            found = policy
        return found

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
        at, before = step, self.at(step - 1).max_staleness
        while before + 1 < policy.max_staleness:
            before += 1
            kept += ((at, replace(policy, max_staleness=before)),)
            at += 1
        return PolicySchedule((*kept, (at, policy)))

    @property
    def policies(self) -> tuple[SchedulingPolicy, ...]:
        """The policies, each once."""
        return tuple(dict.fromkeys(policy for _step, policy in self.changes))


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
            f"policy '{name}' changes between others while a run goes; leave it out, or give one of "
            f"{', '.join(PRESETS)}."
        )
    check_whole("mini_batches", mini_batches)
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


def check_whole(name: str, value: int, least: int = 1) -> None:
    """Checks that a number of things is an integer of at least ``least``.

    Raises:
        PolicyError: it is not; the message gives the name.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise PolicyError(f"{name}={value!r}; give a whole number.")
    if value < least:
        raise PolicyError(f"{name}={value}; give {least} or more.")


def divisors(n: int) -> list[int]:
    return sorted({each for d in range(1, math.isqrt(n) + 1) if n % d == 0 for each in (d, n // d)})


def _or(numbers: Sequence[int]) -> str:
    *head, tail = map(str, numbers)
    return f"{', '.join(head)} or {tail}" if head else tail


def check_batch(prompts: int, mini_batches: int, key: str = "mini_batches") -> None:
    """Checks that whole groups fill the mini-batches evenly.

    Args:
        prompts: groups in a step.
        mini_batches: optimizer steps in a step.
        key: by which they were given, for the message.

    Raises:
        PolicyError: the message lists the valid numbers.
    """
    if mini_batches < 1 or prompts % mini_batches:
        raise PolicyError(
            f"{key}={mini_batches} does not divide {prompts} prompt groups; use {_or(divisors(prompts))}."
        )


def check_split(policy: SchedulingPolicy, mini_batches: int, key: str = "mini_batches") -> None:
    """Checks that the policy's parts are made of whole mini-batches.

    Args:
        policy: whose ``split`` is the number of parts.
        mini_batches: optimizer steps in a step.
        key: by which they were given, for the message.

    Raises:
        PolicyError: the message lists the valid numbers.
    """
    if mini_batches < 1 or mini_batches % policy.split:
        raise PolicyError(
            f"policy.split={policy.split} does not divide {key}={mini_batches}; "
            f"use policy.split={_or(divisors(mini_batches))}."
        )


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
    check_whole("steps", steps, first)
    check_whole("mini_batches", mini_batches)
    if groups is not None:
        check_whole("groups", groups)
    schedule = policy if isinstance(policy, PolicySchedule) else PolicySchedule(((first, policy),))
    sizes = _Sizes(mini_batches, groups)
    return _expand(pipeline, schedule, range(first, steps + 1), sizes, reaches_of(pipeline, sizes))


def _expand(
    pipeline: Pipeline, schedule: PolicySchedule, steps: range, sizes: _Sizes, reaches: dict[PolicySchedule, int]
) -> TaskGraph:
    """Does what :func:`expand` does; ``reaches`` has how far tasks depend ahead under schedules that were checked."""
    for each in schedule.policies:
        _check(pipeline, each, sizes.mini_batches, sizes.groups)
    # Each policy alone, and the steps around each change.
    spans = [PolicySchedule(((1, each),)) for each in schedule.policies]
    spans += [_around(schedule, step) for step, _policy in schedule.changes if steps[0] < step <= steps[-1]]
    reaches |= {part: _reach(pipeline, part, sizes) for part in spans if part not in reaches}
    most = max(each.max_staleness for each in schedule.policies)
    unroller = _unroller(pipeline, schedule, steps, sizes)
    shapes = [sizes.shape(pipeline, each) for each in schedule.policies]

    def switched(step: int, other: SchedulingPolicy) -> TaskGraph:
        return _expand(pipeline, schedule.switched(step, other), steps, sizes, reaches)

    # A writer of carried state waits for readers up to 1 + max_staleness steps on; one more keeps the slots filled.
    return TaskGraph(
        pipeline=pipeline,
        first=steps[0],
        steps=steps[-1],
        ahead=max(most + 1, *(reaches[part] for part in spans)),
        unroll=unroller.step,
        parts={s.name: max(shape.tasks[s.name] for shape in shapes) for s in pipeline.stages},
        groups=sizes.groups,
        order=schedule.changes[0][1].order,
        max_staleness=most,
        staleness=lambda step: schedule.at(step).max_staleness,
        sampled_ahead=lambda step: len(unroller.ahead(step)),
        switched=switched,
    )


def _check(pipeline: Pipeline, policy: SchedulingPolicy, mini_batches: int, groups: int | None) -> None:
    check_split(policy, mini_batches)
    if groups is not None:
        check_batch(groups, mini_batches)
    elif policy.split > 1:
        raise PolicyError(f"split={policy.split} needs the number of prompt groups in a step; give groups=.")
    for s in pipeline.stages:
        _check_mini_batches(s, policy, groups)
    _check_stages(pipeline, policy)


def _check_mini_batches(s: Stage, policy: SchedulingPolicy, groups: int | None) -> None:
    """Checks that the policy's parts are made of whole mini-batches of a stage with its own number of them.

    Raises:
        PolicyError: the message lists the valid numbers.
    """
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


def _check_stages(pipeline: Pipeline, policy: SchedulingPolicy) -> None:
    split_stages: set[str] = set()
    gathered: dict[str, str] = {}
    for s in pipeline.order:
        sources = [pipeline.writer[r.field].name for r in s.reads if r.lag == "none" and r.field in pipeline.writer]
        if s.per == "chunk":
            # It runs before the parts are formed; a stage that reads all chunks waits for all.
            if any(name in split_stages or name in gathered for name in sources):
                gathered[s.name] = s.name
            continue
        if s.per != "step" and pipeline.collector is None and policy.split > 1:
            raise PipelineError(
                f"stage '{s.name}' runs once a {s.per}, but no stage forms the parts; "
                "give the one that collects rewards role='collects'."
            )
        if s.per != "step" and policy.split > 1:
            for name in sources:
                if name in gathered:
                    raise PipelineError(
                        f"stage '{s.name}' runs once a {s.per}, but reads from '{name}', which needs all parts of "
                        f"the step; make '{name}' splittable or use a policy with split=1."
                    )
        if s.per != "step":
            split_stages.add(s.name)
        elif any(name in split_stages or name in gathered for name in sources):
            gathered[s.name] = s.name
        if policy.split > 1 and s.per == "part" and s.whole_batch and (why := s.whole_batch(s.services)):
            raise PolicyError(
                f"stage '{s.name}' needs the whole batch ({why}), but the policy splits it in {policy.split} parts; "
                "use baseline, off-policy or another estimator."
            )


def _around(schedule: PolicySchedule, step: int) -> PolicySchedule:
    """Returns the policies from shortly before a change until shortly after it, as those of steps from 1 on."""
    margin = 2 * _longest(schedule)
    least = max(1, step - margin)
    near = [(at - least + 1, policy) for at, policy in schedule.changes if least < at <= step + margin]
    return PolicySchedule(((1, schedule.at(least)), *near))


def _longest(schedule: PolicySchedule) -> int:
    """Returns how many steps before its own the version may be that a stage reads."""
    return 1 + max(policy.max_staleness for policy in schedule.policies)


def _reach(pipeline: Pipeline, schedule: PolicySchedule, sizes: _Sizes) -> int:
    longest, last = _longest(schedule), schedule.changes[-1][0]
    # A change adds no dependency that is longer than those under each policy, but it may close a circle.
    half, known = (4 * longest, 4 * longest) if last == 1 else (2 * longest, last + longest)
    return reach(pipeline, lambda always, steps: _unroller(always, schedule, steps, sizes), known, half)


@dataclass(frozen=True)
class _Sizes:
    """The numbers that a policy divides: optimizer steps in a step, and prompt groups."""

    mini_batches: int
    groups: int | None

    def shape(self, pipeline: Pipeline, policy: SchedulingPolicy) -> Shape:
        """Returns a policy as numbers of tasks, of groups and of steps."""
        chunks = _chunks(self.groups, self.mini_batches) if policy.stream_rollout else 1
        of: dict[Piece, int] = {"step": 1, "chunk": 1, "part": policy.split, "mini-batch": self.mini_batches}
        shares = {
            s.name: s.mini_batches or (chunks if pipeline.follows_stream(s) else of[s.per]) for s in pipeline.stages
        }
        return Shape(
            shares=shares,
            tasks={s.name: shares[s.name] * s.epochs for s in pipeline.stages},
            chunks=chunks,
            split=policy.split,
            take=self.groups // policy.split if self.groups is not None else None,
            staleness=policy.max_staleness,
        )


def _unroller(pipeline: Pipeline, schedule: PolicySchedule, steps: range, sizes: _Sizes) -> Unroller:
    """Returns what makes the tasks of a step."""
    shapes = [(step, sizes.shape(pipeline, policy)) for step, policy in schedule.changes]
    initial, most = shapes[0][1], max(shape.staleness for _step, shape in shapes)

    def shape(step: int) -> Shape:
        found = initial
        for since, each in shapes:
            if since > step:
                break
            found = each
        return found

    return Unroller(pipeline, steps, shape if len(shapes) > 1 else lambda step: initial, most)


def _chunks(groups: int | None, mini_batches: int) -> int:
    """Returns the number of chunks of a streaming rollout, such that parts are made of whole chunks."""
    fitting = [d for d in divisors(groups or mini_batches) if d % mini_batches == 0]
    return max([d for d in fitting if d <= MAX_CHUNKS], default=mini_batches)
