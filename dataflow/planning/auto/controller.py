"""Decides when a run plans, and whether it changes its policy. Pure: steps and seconds in, a decision out.

The run begins with the baseline, strictly on-policy. It changes to another policy if the present one is predicted to
take more than ``gain`` longer, or somewhat longer by several plans in a row, whose gains add up to that. Policies of
nearly the same speed are told apart by their staleness: the least one is taken. A policy that was left a short time ago
has to be better by twice as much, so that the run does not swing. What was measured before and after a change counts
more than a prediction: if the steps became much longer instead of shorter, the run goes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from dataflow.planning.auto.window import MOST
from dataflow.policy import SchedulingPolicy

MEASURED = 3
"""Steps before the first plan; the first of them includes the warm-up."""
NEAR = 0.005
"""Policies whose times differ by less count as equally fast, so that the least stale of them is taken."""
EQUAL = 0.002
"""The same for policies that are equally stale: of them the one with most parts is taken, which gains if a step has a
reward that takes longer than any so far."""
OFF = 0.15
"""A step that takes longer or shorter than predicted by more has the run planned at once, and no number of requests
in flight is suggested from such a prediction. A change after which all steps take longer by more was a loss."""
WRONG = 0.3
"""A policy whose steps take longer than predicted by more is taken for as slow as they are."""
LEAST_LEFT = 4
"""A run with fewer steps left plans no more."""
COUNTED = 3
"""Steps that show a new policy after which it is reported what came of it; fewer at the end of the run."""


@dataclass
class Switch:
    """A change of policy.

    Attributes:
        step: the first under the new policy.
        before, after: the policies.
        before_s, after_s: predicted seconds a step.
        measured_s: seconds a step afterwards, once they are known.
    """

    step: int
    before: SchedulingPolicy
    after: SchedulingPolicy
    before_s: float
    after_s: float
    measured_s: float | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Switch:
        """Returns a change that an earlier process of the run wrote as JSON."""
        policies = {name: SchedulingPolicy(**facts[name]) for name in ("before", "after")}
        return cls(**{**facts, **policies})

    @property
    def gain(self) -> float:
        """The share by which the policy before would take longer, as predicted."""
        return self.before_s / self.after_s - 1


class Loss(NamedTuple):
    """A change after which the steps took longer.

    Attributes:
        better, worse: the policies before and after it.
        ratio: of the seconds of the shortest step after it to those of the longest before.
        since: the first of the steps that show this; a change of the workload after it makes this unknown again.
    """

    better: SchedulingPolicy
    worse: SchedulingPolicy
    ratio: float
    since: int


@dataclass
class Controller:
    """The state of a run that plans itself.

    Attributes:
        policies: that it may take, the least stale first, then by their parts.
        current: the policy in force.
        replan: steps from one plan to the next.
        gain: see the module.
        switches: so far.
        known: seconds a step under each policy that the last decision was made from.
    """

    policies: Sequence[SchedulingPolicy]
    current: SchedulingPolicy
    replan: int
    gain: float
    switches: list[Switch] = field(default_factory=list)
    known: dict[SchedulingPolicy, float] = field(default_factory=dict)
    since: int = 1
    """The first step under the present policy that this state knows."""
    _planned: int = 0
    _expected_s: float | None = None
    _ends: dict[int, float] = field(default_factory=dict)
    _left: dict[SchedulingPolicy, int] = field(default_factory=dict)
    _gained: dict[SchedulingPolicy, float] = field(default_factory=dict)
    _first: int = 0
    _before: tuple[int, float] | None = None
    """The steps before the last change: their first; seconds of the longest, or those predicted if they are more."""
    _losses: list[Loss] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first = self.since

    def ended(self, step: int, at: float) -> bool:
        """Records the end of a step, in seconds; returns whether to plan now."""
        self._ends[step] = at
        self._ends.pop(step - 2 * COUNTED - self.replan, None)
        if step < self._first + MEASURED - 1:
            return False
        # The first plans know few steps, so they are made sooner after one another.
        wait = min(self.replan, self._planned - self._first + 1)
        if not self._planned or step >= self._planned + wait:
            return True
        return step >= self._planned + 2 and step > self._settled and self._is_off(step)

    @property
    def begun(self) -> bool:
        """Whether it has planned, so that a change within a step can be told from the run's beginning."""
        return self._planned > 0

    @property
    def _settled(self) -> int:
        """The first step whose time shows the present policy: the next step's rollout is drawn beside it."""
        # The last change of a run that resumed may hold from a later step on.
        since = max(self.since, self.switches[-1].step) if self.switches else self.since
        return since + self.current.max_staleness + 1

    def _is_off(self, step: int) -> bool:
        took = self._step_s(step - 1, step)
        return took is not None and self._expected_s is not None and _far(took, self._expected_s)

    def confirms(self, step: int, predicted: Mapping[SchedulingPolicy, float], since: int = 1) -> bool:
        """Whether the present policy's steps took about as long as predicted; False if that is not known yet.

        Args:
            step, predicted, since: see :meth:`decide`.
        """
        took, present = self._step_s(max(self._settled, since), step), predicted.get(self.current)
        return took is not None and present is not None and not _far(took, present)

    def _step_s(self, first: int, last: int) -> float | None:
        """Returns the mean seconds a step after ``first`` until ``last``."""
        if last <= first or first not in self._ends or last not in self._ends:
            return None
        return (self._ends[last] - self._ends[first]) / (last - first)

    def _each_s(self, first: int, last: int) -> list[float]:
        """Returns the seconds of each step after ``first`` until ``last``."""
        ends = [self._ends[step] for step in range(first, last + 1) if step in self._ends]
        return [end - begin for begin, end in pairwise(ends)]

    def decide(self, step: int, predicted: Mapping[SchedulingPolicy, float], since: int = 1) -> SchedulingPolicy | None:
        """Returns the policy to change to; None to keep the present one.

        Args:
            step: the last step that ended.
            predicted: seconds a step under each policy, as far as they are known.
            since: the first step that the prediction is made from.
        """
        self._planned = step
        if (present := predicted.get(self.current)) is None:
            return None
        # If the same steps took much longer than the prediction says of them, it is wrong about this policy.
        begun = max(self._settled, since)
        took = self._step_s(begun, step) if step >= begun + 2 * COUNTED else None
        if took is not None and took / present - 1 > WRONG:
            present = took
        self._expected_s = present
        # A prediction from fewer steps than there could be is made from those since the workload changed.
        changed = since if since > self._first + 1 and step + 1 - since < MOST else 0
        if step + 1 - since >= COUNTED:
            self._losses = [loss for loss in self._losses if loss.since >= changed]
        self.known = self._corrected({**predicted, self.current: present}, changed)
        best = self._best(self.known)
        gain = present / self.known[best] - 1 if best != self.current else 0.0
        self._gained = {best: self._gained.get(best, 0.0) + gain} if gain > NEAR else {}
        wanted = self.gain
        if best in self._left and step < self._left[best] + 2 * self.replan:
            wanted *= 2
        return best if self._gained.get(best, 0.0) > wanted else None

    def _corrected(self, predicted: dict[SchedulingPolicy, float], changed: int) -> dict[SchedulingPolicy, float]:
        """Returns predictions that agree with what was measured before and after changes that were a loss.

        Args:
            predicted: seconds a step under each policy.
            changed: the step in which the workload may have changed; 0 if it has not.
        """
        found = dict(predicted)
        for loss in self._losses:
            if loss.worse == self.current:
                if loss.since >= changed:
                    found[loss.better] = found[self.current] / loss.ratio
            elif loss.worse in found and loss.better in found:
                found[loss.worse] = max(found[loss.worse], found[loss.better] * loss.ratio)
        return found

    def _best(self, predicted: Mapping[SchedulingPolicy, float]) -> SchedulingPolicy:
        """Returns the fastest of the least stale policies that are about as fast as the fastest of all."""
        near = min(predicted.values()) * (1 + NEAR)
        least = min(policy.max_staleness for policy, seconds in predicted.items() if seconds <= near)
        alike = {p: s for p, s in predicted.items() if p.max_staleness == least}
        equal = min(alike.values()) * (1 + EQUAL)
        return next(policy for policy in reversed(self.policies) if alike.get(policy, equal + 1) <= equal)

    def switched(self, step: int, policy: SchedulingPolicy, predicted: Mapping[SchedulingPolicy, float]) -> Switch:
        """Records a change of policy from a step on; returns it."""
        found = Switch(step, self.current, policy, predicted[self.current], predicted[policy])
        last = max(self._ends, default=0)
        first = max(self._settled, last - COUNTED)
        took = self._each_s(first, last)
        self._before = (first, max(*took, found.before_s)) if took else None
        self.switches.append(found)
        self._left[self.current] = step
        self.current, self.since = policy, step
        self._expected_s = predicted[policy]
        self._gained = {}
        return found

    def outcome(self, step: int, least: int = COUNTED) -> Switch | None:
        """Returns the last change if it has just become known what came of it.

        Args:
            step: the last step that ended.
            least: steps that it is known from.
        """
        if not self.switches or self.switches[-1].measured_s is not None or step < self._settled + least:
            return None
        last = self.switches[-1]
        took = self._step_s(self._settled, step)
        if took is None:
            return None
        last.measured_s = took
        each = self._each_s(self._settled, step)
        if self._before is not None and min(each) > self._before[1] * (1 + OFF):
            self._losses.append(Loss(last.before, last.after, min(each) / self._before[1], self._before[0]))
        return last


def _far(took: float, predicted: float) -> bool:
    return abs(took / predicted - 1) > OFF
