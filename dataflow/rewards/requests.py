"""The state of a step in the reward agent: its requests by group, their scoring jobs, and its waiters.

A *request* is one sample that needs a score. A *scoring job* is the work of getting one score; requests with the same
prompt and response may share a job. A *step* holds its requests by group and returns whole groups. The states of
requests and jobs are explicit, and a change that is not allowed raises an error. Nothing here uses an event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any, Literal

from dataflow.rewards.failure import FailureRule
from dataflow.rewards.filter import GroupFilter
from dataflow.usercode.calls import Call

Step = int | str
BESIDE = "beside:"
"""Begins the name of a step whose requests have the priority of a training step: ``beside:3`` goes with step 3."""
Order = Literal["arrival", "index"]

ENDED = ("throttled", "timed_out")
"""Ways in which a call of a request ended without a score that are counted."""
NOTES = ("queued_s", "held_by", *ENDED, "endpoint", "resent", "failed_tries")
"""Keys that a request's notes may have."""
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


class RequestState(Enum):
    """State of a request; ``OPEN`` is the only one that is left, and it is left once."""

    OPEN = "open"
    SCORED = "scored"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobState(Enum):
    """State of a scoring job; :data:`CHANGES` has the allowed changes."""

    allowed: tuple[JobState, ...]
    """The states that it may change to."""

    NEW = "new"
    QUEUED = "queued"
    RUNNING = "running"
    HEDGING = "hedging"
    """A call runs, and a second one is queued."""
    BACKOFF = "backoff"
    """Waits on a timer before its next try is queued."""
    DONE = "done"


CHANGES: Mapping[JobState, frozenset[JobState]] = {
    JobState.NEW: frozenset({JobState.QUEUED, JobState.DONE}),
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.DONE}),
    JobState.RUNNING: frozenset({JobState.HEDGING, JobState.BACKOFF, JobState.DONE}),
    JobState.HEDGING: frozenset({JobState.RUNNING, JobState.QUEUED, JobState.DONE}),
    JobState.BACKOFF: frozenset({JobState.QUEUED, JobState.DONE}),
    JobState.DONE: frozenset(),
}
"""The states that each state of a job may change to."""
for _state, _next in CHANGES.items():
    _state.allowed = tuple(_next)  # looked up by attribute, since the hash of an Enum is slow


@dataclass(eq=False, slots=True)
class Request:
    """One sample to score; ``begin`` and ``end`` are seconds of ``clock.now()``."""

    step: StepRequests
    group: int
    sample: int
    state: RequestState = RequestState.OPEN
    score: float = math.nan
    extras: dict[str, Any] = field(default_factory=dict)
    begin: float = 0.0
    end: float = 0.0
    tries: int = 0
    kept: bool = True  # False for a sample that no loss may use
    arguments: Mapping[str, Any] | None = None  # of its call, if the reward compares the samples of a group
    source: str = ""
    """Where its score came from, if not from a call of its own: ``ledger``, ``shared`` or ``hedged``."""
    notes: Mapping[str, Any] | None = None
    """What delayed it, see :attr:`ScoringJob.notes`."""
    job: ScoringJob | None = None
    """The job that it waits for."""

    def __str__(self) -> str:
        return f"sample {self.sample} of group {self.group} of step {self.step.key}"

    @property
    def open(self) -> bool:
        return self.state is RequestState.OPEN

    @property
    def how(self) -> str:
        """How it ended, if not with a score from a call of its own: ``failed``, ``cancelled`` or its source."""
        return self.state.value if self.state in (RequestState.FAILED, RequestState.CANCELLED) else self.source

    def end_as(self, state: RequestState) -> None:
        """Ends the request."""
        assert self.state is RequestState.OPEN is not state, f"{self}: {self.state.value} -> {state.value}"
        self.state = state


@dataclass(eq=False, slots=True)
class ScoringJob:
    """The work behind one or several requests. It is queued anew for each try, and for a hedge."""

    arguments: dict[str, Any]
    key: bytes | None
    priority: tuple[int, int, int]
    """Its position among all queued jobs; the smallest starts first."""
    requests: list[Request]
    endpoint: str = ""
    tokens: int = 0
    """Estimate of the tokens that a call uses."""
    prefers: str = ""  # see Queued
    avoids: tuple[str, ...] = ()
    doubted: tuple[str, ...] = ()
    """Servers that answered it badly, see :meth:`Router.may_differ`."""
    server: str = ""
    """The endpoint of the call that answered, or of the last one; "" if it has no limits of its own."""
    resent: int = 0
    """Calls that went to another server since one failed; they are no tries."""
    state: JobState = JobState.NEW
    begin: float = 0.0
    """When its first call began, in seconds of ``clock.now()``."""
    deadline: float = math.inf
    """Seconds of the loop's clock."""
    tries: int = 0
    again: bool = False
    """Whether its next call is a try after the first, and no call to another server."""
    queued_at: float = 0.0
    """When it was submitted, in seconds of ``clock.now()``."""
    held_by: str = ""
    """What its first call waited for: a free ``slot``, the ``rate`` limit, the end of a ``pause``; "" if unknown."""
    timed_out: int = 0
    """How many of its calls took too long."""
    throttled: int = 0
    """How many of its calls the service rejected with a status such as 429."""
    errors: list[str] = field(default_factory=list)
    """Why each failed call did, and the wait from it to a next try: ``HTTP 429, 2.1 s``."""
    error: BaseException | None = None  # of the last call that failed
    last_s: float = 0.0  # its duration
    live: dict[Call, bool] = field(default_factory=dict)
    """Running calls; the value is True for a hedge."""
    timer: asyncio.TimerHandle | None = None
    """Ends its backoff, starts its hedge, or ends a queued try at the deadline."""

    def to(self, state: JobState) -> None:
        """Changes the state."""
        assert state in self.state.allowed, f"scoring job: {self.state.value} -> {state.value}"
        self.state = state

    @property
    def wanted(self) -> bool:
        """Whether a call of it is queued."""
        return self.state is JobState.QUEUED or self.state is JobState.HEDGING

    @property
    def second(self) -> bool:
        return self.state is JobState.HEDGING

    @property
    def notes(self) -> Mapping[str, Any] | None:
        """Facts for the trace, by :data:`NOTES`: what it waited for (10 ms or more), its server, what went wrong."""
        queued_s = self.begin - self.queued_at
        held = {"queued_s": int(queued_s * 1000) / 1000, "held_by": self.held_by} if queued_s >= _NO_WAIT_S else {}
        facts = self.throttled, self.timed_out, self.server, self.resent, "; ".join(self.errors)
        return held | {name: value for name, value in zip(NOTES[2:], facts, strict=True) if value} or None


@dataclass(eq=False, slots=True)
class Scored:
    """Outcome of a job that got its score; for ``source`` see :attr:`Request.source`."""

    score: float
    extras: dict[str, Any]
    source: str = ""


@dataclass(eq=False, slots=True)
class Failed:
    """Outcome of a job whose last try failed."""

    message: str
    """What happened and how to fix it."""
    error: BaseException


Outcome = Scored | Failed


@dataclass(eq=False, slots=True)
class GroupJob:
    """A group whose samples all have their scores, queued for ``post_process_scores``."""

    step: StepRequests
    group: int
    priority: tuple[int, int, int]
    endpoint: str = ""
    tokens: int = 0
    prefers: str = ""
    avoids: tuple[str, ...] = ()
    second: bool = False

    @property
    def wanted(self) -> bool:
        return self.group in self.step.unfinished


@dataclass(eq=False)
class Waiter:
    """A pending ``collect``."""

    take: int
    order: Order
    future: asyncio.Future[list[int]]
    groups: frozenset[int] | None = None
    """The groups to return, if they are not the next ones."""


@dataclass(eq=False)
class Rows:
    """Samples submitted together; jobs exist for the first ``admitted`` of them."""

    arguments: Callable[[int, int], list[dict[str, Any]]]
    """Returns the keyword arguments of the calls of the rows from begin to end."""
    requests: list[Request]
    begin: float  # when they were submitted, in seconds of ``clock.now()``
    admitted: int = 0


@dataclass(eq=False)
class StepRequests:
    """A submitted step. Each group is unfinished, then arrived, then collected; or it is lost."""

    key: Step
    rule: FailureRule
    priority: tuple[int, int]
    extra_groups: int = 0
    """Groups beyond those that will be collected, which replace lost ones; below 0, too many were lost."""
    more: bool = False
    """Whether further chunks may be submitted."""
    seen: set[int] = field(default_factory=set)
    """All groups that were submitted."""
    rows: int = 0
    """Number of samples that were submitted."""
    unadmitted: deque[Rows] = field(default_factory=deque)
    """Samples that have no job yet."""
    admitting: bool = False
    """Whether the admission of the next ones is scheduled."""
    queued_jobs: int = 0
    """Jobs whose first call has not started."""
    groups: dict[int, list[Request]] = field(default_factory=dict)
    unfinished: dict[int, int] = field(default_factory=dict)
    """Number of open samples by group."""
    arrived: list[int] = field(default_factory=list)
    waiters: deque[Waiter] = field(default_factory=deque)
    open: int = 0
    """Requests that have not ended."""
    ended: list[Request] = field(default_factory=list)
    """Collected requests, from which the step's metrics are computed."""
    lost: int = 0
    """Groups that failed and were replaced."""
    group_filter: GroupFilter | None = None
    """Which groups are left out while others may take their place."""
    left_out: int = 0
    """Groups that the filter left out."""
    equal: int = 0
    """Groups that the filter would have left out, and that are collected for want of others."""
    replaced: list[Request] = field(default_factory=list)
    """Requests of these groups that no collect has reported yet."""
    failed: int = 0
    """Requests whose failure the rule handled."""
    last_failure: str = ""
    """Message of the last failure that the rule handled."""
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
        return sum(r.open and not (r.job and r.job.live) for rows in self.groups.values() for r in rows)

    def end(self, request: Request, state: RequestState) -> None:
        """Ends a request of this step."""
        request.end_as(state)
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
