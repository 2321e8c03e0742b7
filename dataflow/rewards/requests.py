"""What a step in flight consists of: its requests by group, their jobs, and the waiters for whole groups.

A *request* is one sample that needs a score. It is open, and then ends once: scored, failed or cancelled. A *job* is
the work of getting one score; equal requests may share one. A *group* is unfinished, then arrived, then collected; or
it is lost, and an extra one takes its place. Nothing here calls user code.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import numpy as np

from dataflow.rewards.failure import FailureRule
from dataflow.rewards.results import read_number
from dataflow.rewards.slots import Item
from dataflow.usercode.numeric import as_float32

Step = int | str
BESIDE = "beside:"
"""Begins the name of a step whose requests have the priority of a training step: ``beside:3`` goes with step 3."""
Order = Literal["arrival", "index"]
State = Literal["open", "scored", "failed", "cancelled"]

ENDED = ("throttled", "timed_out")
"""Ways in which a call of a request ended without a score that are counted."""
_NO_WAIT_S = 0.01


@dataclass(frozen=True)
class Ticket:
    """Identifies submitted requests: the step, its group ids and the number of requests."""

    step: Step
    groups: tuple[int, ...]
    requests: int

    @staticmethod
    def concat(tickets: Sequence[Ticket]) -> Ticket:
        """Returns one ticket for a step that was submitted in chunks."""
        groups = tuple(group for ticket in tickets for group in ticket.groups)
        return Ticket(tickets[0].step, groups, sum(ticket.requests for ticket in tickets))


@dataclass(eq=False, slots=True)
class Request:
    """One sample to score; ``begin`` and ``end`` are seconds of ``clock.now()``."""

    step: StepRequests
    group: int
    sample: int
    state: State = "open"
    score: float = math.nan
    extras: dict[str, Any] = field(default_factory=dict)
    begin: float = 0.0
    end: float = 0.0
    tries: int = 0
    kept: bool = True
    """False for a sample that no loss may use."""
    arguments: Mapping[str, Any] | None = None
    """Of its call, if the reward compares the samples of a group."""
    source: str = ""
    """Where its score came from, if not from a call of its own: ``ledger``, ``shared`` or ``hedged``."""
    notes: Mapping[str, Any] | None = None
    """What delayed it, see :attr:`Job.notes <dataflow.reward_agent.Job.notes>`."""
    job: Job | None = None
    """The job that it waits for."""

    def __str__(self) -> str:
        return f"sample {self.sample} of group {self.group} of step {self.step.key}"

    @property
    def open(self) -> bool:
        return self.state == "open"

    @property
    def how(self) -> str:
        """How it ended, if not with a score from a call of its own: ``failed``, ``cancelled`` or its source."""
        return self.state if self.state in ("failed", "cancelled") else self.source


@dataclass(eq=False, kw_only=True)
class Job(Item):
    """The work of getting one score, for one request or for several equal ones (``share_equal``)."""

    arguments: dict[str, Any]
    key: bytes
    """Of its arguments; empty if neither a ledger nor other requests need it."""
    requests: list[Request]
    cancelled: Request | None = None
    """The last of its requests, if that was cancelled."""
    task: asyncio.Task[None] | None = None
    begin: float = 0.0
    """When its first call began, in seconds of ``clock.now()``."""
    first_held_by: str = ""
    """What that waited for."""
    deadline: float = math.inf
    """Seconds of the loop's clock."""
    tries: int = 0
    running: int = 0
    """Its calls in flight."""
    server: str = ""
    """The endpoint of its last call, if that has limits of its own."""
    timed_out: int = 0
    throttled: int = 0
    """How many of its calls the service rejected with a status such as 429."""
    errors: list[str] = field(default_factory=list)
    """Why each failed call did, and the wait from it to a next try: ``HTTP 429, 2.1 s``."""
    last_s: float = 0.0
    """Duration of the last call that failed."""

    @property
    def notes(self) -> Mapping[str, Any] | None:
        """Facts for the trace: what its first call waited for (10 ms or more), its server, what went wrong."""
        queued_s = self.begin - self.queued_at
        waited = {"queued_s": int(queued_s * 1000) / 1000, "held_by": self.first_held_by}
        held: dict[str, Any] = waited if queued_s >= _NO_WAIT_S else {}
        facts: dict[str, Any] = {"throttled": self.throttled, "timed_out": self.timed_out, "endpoint": self.server}
        facts["failed_tries"] = "; ".join(self.errors)
        return held | {name: value for name, value in facts.items() if value} or None


@dataclass(eq=False, slots=True)
class Scored:
    """Outcome of a job; for ``source`` see :attr:`Request.source <dataflow.rewards.steps.Request.source>`."""

    score: float
    extras: dict[str, Any]
    source: str = ""


@dataclass(eq=False, slots=True)
class Failed:
    """Outcome of a job whose last try failed."""

    message: str
    """What happened and how to fix it."""
    error: Exception


@dataclass(frozen=True)
class GroupFilter:
    """Leaves out finished groups whose samples all have the same value, as long as enough others remain.

    Attributes:
        most: groups that may be left out in a step; further ones are collected, and train nothing.
        metric: ``score``, or another column that the reward returns.
    """

    most: int
    metric: str = "score"

    def equal(self, requests: Sequence[Request]) -> bool:
        """Returns whether the samples of a finished group that count all have the same value, as float32 holds it.

        Raises:
            ValueError: the reward returned no such column, or one that holds no finite number or text; with the fix.
        """
        values = [self._value(request) for request in requests if request.kept]
        return all(value == values[0] for value in values)

    def _value(self, request: Request) -> object:
        if self.metric == "score":
            return as_float32(request.score)
        if self.metric not in request.extras:
            known = ", ".join(["score", *request.extras])
            raise ValueError(
                f"{request}: the reward returned no column '{self.metric}' (algorithm.filter_groups.metric); "
                f"it has {known}."
            )
        value = request.extras[self.metric]
        if type(value) is str:
            return value
        try:
            return as_float32(read_number(value))
        except ValueError as error:
            raise ValueError(
                f"{request}: its column '{self.metric}' (algorithm.filter_groups.metric) is {error}; let the reward "
                "return a finite number or a text there."
            ) from error


@dataclass(eq=False)
class Waiter:
    """A pending ``collect``."""

    take: int
    order: Order
    future: asyncio.Future[list[int]]
    groups: frozenset[int] | None = None
    """The groups to return, if they are not the next ones."""


@dataclass(eq=False)
class StepRequests:
    """A submitted step."""

    key: Step
    rule: FailureRule
    priority: tuple[int, int]
    extra_groups: int = 0
    """Groups beyond those that will be collected, which replace lost ones; below 0, too many were lost."""
    more: bool = False
    """Whether further chunks may be submitted."""
    group_filter: GroupFilter | None = None
    """Which groups are left out while others may take their place."""
    seen: set[int] = field(default_factory=set)
    """All groups that were submitted."""
    rows: int = 0
    """Number of samples that were submitted."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no group is unfinished."""
    post_processing: list[asyncio.Task[None]] = field(default_factory=list)
    """Calls of the user's methods on whole groups."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the chunk whose jobs are made."""
    groups: dict[int, list[Request]] = field(default_factory=dict)
    unfinished: dict[int, int] = field(default_factory=dict)
    """Number of open samples by group."""
    arrived: list[int] = field(default_factory=list)
    waiters: deque[Waiter] = field(default_factory=deque)
    open: int = 0
    """Requests that have not ended."""
    ended: list[Request] = field(default_factory=list)
    """Collected and withdrawn requests, from which the step's metrics are computed."""
    lost: int = 0
    """Groups that failed and were replaced."""
    left_out: int = 0
    """Groups that the filter left out."""
    equal: int = 0
    """Groups that the filter would have left out, and that are collected for want of others."""
    replaced: list[Request] = field(default_factory=list)
    """Requests of lost groups that no collect has reported yet."""
    failed: int = 0
    """Requests whose failure the rule handled."""
    last_failure: str = ""
    """Message of the last of them."""
    over: bool = False

    def add(self, groups: Sequence[int]) -> list[Request]:
        """Adds one request for each of these group ids, which are new; returns them in that order."""
        rows: list[Request] = []
        for group, same in groupby(groups):
            requests = [Request(self, group, sample) for sample, _group in enumerate(same)]
            rows += requests
            self.groups[group], self.unfinished[group] = requests, len(requests)
            self.seen.add(group)
        self.rows += len(rows)
        self.open += len(rows)
        return rows

    @property
    def left(self) -> int:
        """Number of submitted groups that are neither collected nor claimed by a waiter, without extra groups."""
        there = len(self.unfinished) + len(self.arrived)
        return there - self.extra_groups - sum(waiter.take for waiter in self.waiters if not waiter.future.done())

    def waiting(self) -> int:
        """Returns the number of open requests for which no call runs."""
        return sum(r.open and not (r.job and r.job.running) for rows in self.groups.values() for r in rows)

    def end(self, request: Request, state: State) -> None:
        """Ends a request of this step."""
        assert request.open, f"{request}: {request.state} -> {state}"
        request.state = state
        self.open -= 1

    def pick(self, take: int, order: Order, named: frozenset[int] | None = None) -> list[int] | None:
        """Removes the next groups, or the named ones; returns them in order of their ids, None while one is missing.

        Raises:
            ValueError: the filter cannot judge a group, or a named group will never be there.
        """
        if named is not None:
            return self._pick_named(named)
        if len(self.arrived) < take:
            return None  # this is asked at each arrival, so groups are looked at only where they may be enough
        chosen: list[int] = []
        for group in sorted([*self.unfinished, *self.arrived]) if order == "index" else list(self.arrived):
            if len(chosen) == take or group in self.unfinished:
                break
            if not self._leave_out(group):
                chosen.append(group)
        if len(chosen) < take:
            return None
        taken = set(chosen)
        self.arrived = [group for group in self.arrived if group not in taken]
        if self.group_filter is not None:
            self.equal += sum(self.group_filter.equal(self.groups[group]) for group in chosen)
        return sorted(chosen)

    def _pick_named(self, named: frozenset[int]) -> list[int] | None:
        gone = sorted(named.intersection(self.seen).difference(self.unfinished, self.arrived))
        if never := sorted(named - self.seen) if not self.more else []:
            raise ValueError(
                f"step {self.key}: group {never[0]} is to be collected, but was not submitted; submit the same groups "
                "to all agents whose rewards are used together."
            )
        if gone:
            raise ValueError(
                f"step {self.key}: group {gone[0]} is to be collected, but was collected before, replaced after a "
                "failure or left out by a filter; where another agent chooses the groups, use a failure rule that "
                "keeps them (drop_group, drop_sample or a score) and no filter."
            )
        if not named.issubset(self.arrived):
            return None
        self.arrived = [group for group in self.arrived if group not in named]
        return sorted(named)

    def _leave_out(self, group: int) -> bool:
        """Leaves an arrived group out if the filter says so and another can take its place; returns whether it did.

        Groups are judged in the order in which they would be picked, so that order by index is reproducible.
        """
        if self.group_filter is None or self.left_out >= self.group_filter.most or self.extra_groups < 1:
            return False
        if not self.group_filter.equal(self.groups[group]):
            return False
        self.arrived.remove(group)
        self.withdraw(group)
        self.left_out += 1
        return True

    def withdraw(self, group: int) -> None:
        """Removes a group that will not be collected; one of the extra groups takes its place."""
        self.unfinished.pop(group, None)
        requests = self.groups.pop(group)
        self.ended += requests
        self.replaced += requests
        self.extra_groups -= 1


def record(request: Request) -> dict[str, Any]:
    """Returns the trace's record of a request: its place, times, and anything unusual."""
    facts: dict[str, Any] = {
        "group": request.group,
        "sample": request.sample,
        "begin": request.begin,
        "end": request.end,
    }
    if request.tries > 1:
        facts["tries"] = request.tries
    if request.how:
        facts["how"] = request.how
    if request.notes:
        facts |= request.notes
    return facts


def latency_summary(latency_s: Collection[float]) -> dict[str, float]:
    """Returns p50, p95, p99, max and mean of durations, in seconds; nothing if there are none."""
    if not len(latency_s):
        return {}
    values = np.fromiter(latency_s, dtype=np.float64)
    p50, p95, p99 = np.percentile(values, [50, 95, 99]).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": float(values.max()), "mean": float(values.mean())}
