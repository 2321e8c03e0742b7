"""The steps in flight: submit, the failure rule, and the waiters that collect whole groups. Calls no user code.

A *request* is one sample that needs a score. It is open, and then ends once: scored, failed or cancelled. A *job* is
the work of getting one score; equal requests may share one. A *group* is unfinished, then arrived, then collected; or
it is lost, and an extra one takes its place.
"""

from __future__ import annotations

import asyncio
import math
import numbers
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import numpy as np
from loguru import logger

from dataflow.batch import Batch
from dataflow.errors import DataflowError, RewardFailed, counted
from dataflow.rewards.failure import FailedShare, FailureRule
from dataflow.rewards.naming import MAIN, prefixed
from dataflow.rewards.results import read_number
from dataflow.rewards.slots import Item
from dataflow.system import clock
from dataflow.usercode.load import describe

Step = int | str
BESIDE = "beside:"
"""Begins the name of a step whose requests have the priority of a training step: ``beside:3`` goes with step 3."""
Order = Literal["arrival", "index"]
State = Literal["open", "scored", "failed", "cancelled"]
ENDED = ("throttled", "timed_out")
"""Ways in which a call of a request ended without a score that are counted."""
_NO_WAIT_S = 0.01
_REMEMBERED = 4096  # ended steps that keep their message for later collects


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
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What delayed it, see :attr:`Job.notes`."""
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

    def record(self) -> dict[str, Any]:
        """Returns its record in the trace: its place, times, and anything unusual."""
        place = {"group": self.group, "sample": self.sample, "begin": self.begin, "end": self.end}
        tries = {"tries": self.tries} if self.tries > 1 else {}
        return place | tries | ({"how": self.how} if self.how else {}) | dict(self.notes)


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
    source: str = ""
    """``hedged`` if its score came from a second call."""
    ended: Counter[str] = field(default_factory=Counter)
    """How many of its calls ended in each way of :data:`ENDED`."""
    errors: list[str] = field(default_factory=list)
    """Why each failed call did, and the wait from it to a next try: ``HTTP 429, 2.1 s``."""
    last_s: float = 0.0
    """Duration of the last call that failed."""

    @property
    def notes(self) -> dict[str, Any]:
        """Facts for the trace: what its first call waited for (10 ms or more), and what went wrong."""
        queued_s = self.begin - self.queued_at
        waited = {"queued_s": int(queued_s * 1000) / 1000, "held_by": self.first_held_by}
        facts = {**(waited if queued_s >= _NO_WAIT_S else {}), **self.ended, "failed_tries": "; ".join(self.errors)}
        return {name: value for name, value in facts.items() if value}


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
        """Returns whether the samples of a finished group that count all have the same value, compared in float32.

        Raises:
            ValueError: the reward returned no such column, or one that holds no finite number or text; with the fix.
        """
        values = [self._value(request) for request in requests if request.kept]
        return all(value == values[0] for value in values)

    def _value(self, request: Request) -> object:
        columns = {"score": request.score, **request.extras}
        column = f"column '{self.metric}' (algorithm.filter_groups.metric)"
        if self.metric not in columns:
            raise ValueError(f"{request}: the reward returned no {column}; it has {', '.join(columns)}.")
        value = columns[self.metric]
        try:
            return value if type(value) is str else np.float32(read_number(value))
        except ValueError as error:
            fix = "let the reward return a finite number or a text there"
            raise ValueError(f"{request}: its {column} is {error}; {fix}.") from error


@dataclass(eq=False)
class Waiter:
    """A pending ``collect``: for the next ``take`` groups, or for those of ``groups``."""

    take: int
    order: Order
    future: asyncio.Future[list[int]]
    groups: frozenset[int] | None = None


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
    last_failure: str = ""
    """Message of the last request whose failure the rule handled."""
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

    def end(self, request: Request, state: State) -> None:
        """Ends a request of this step."""
        assert request.open, f"{request}: {request.state} -> {state}"
        request.state = state
        self.open -= 1

    def pick(self, waiter: Waiter) -> list[int] | None:
        """Removes the groups of a waiter; returns them in order of their ids, None while one is missing.

        Raises:
            ValueError: the filter cannot judge a group, or a named group will never be there.
        """
        chosen = self._next(waiter.take, waiter.order) if waiter.groups is None else self._named(waiter.groups)
        if chosen is not None:
            taken = set(chosen)
            self.arrived = [group for group in self.arrived if group not in taken]
            if self.group_filter is not None and waiter.groups is None:
                self.equal += sum(self.group_filter.equal(self.groups[group]) for group in chosen)
        return chosen

    def _next(self, take: int, order: Order) -> list[int] | None:
        if len(self.arrived) < take:
            return None  # this is asked at each arrival, so groups are looked at only where they may be enough
        chosen: list[int] = []
        # Groups are judged in the order in which they are picked, so that order by index is reproducible.
        for group in sorted([*self.unfinished, *self.arrived]) if order == "index" else list(self.arrived):
            if len(chosen) == take or group in self.unfinished:
                break
            if not self._leave_out(group):
                chosen.append(group)
        return sorted(chosen) if len(chosen) == take else None

    def _named(self, named: frozenset[int]) -> list[int] | None:
        if not self.more and (never := sorted(named - self.seen)):
            raise ValueError(
                f"step {self.key}: group {never[0]} is to be collected, but was not submitted; submit the same groups "
                "to all agents whose rewards are used together."
            )
        if gone := sorted(named.intersection(self.seen).difference(self.unfinished, self.arrived)):
            raise ValueError(
                f"step {self.key}: group {gone[0]} is to be collected, but was collected before, replaced after a "
                "failure or left out by a filter; where another agent chooses the groups, use a failure rule that "
                "keeps them (drop_group, drop_sample or a score) and no filter."
            )
        return sorted(named) if named.issubset(self.arrived) else None

    def _leave_out(self, group: int) -> bool:
        """Leaves an arrived group out if the filter says so and another can take its place; returns whether it did."""
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


class Steps:
    """Steps in flight; ``on_cancel`` is called with each request that is cancelled, after it has ended."""

    def __init__(
        self, rule: FailureRule, max_failed_share: float, on_cancel: Callable[[Request], None], agent: str = MAIN
    ) -> None:
        self._rule, self._agent, self._on_cancel = rule, agent, on_cancel
        self._failures = FailedShare(max_failed_share)
        self.counts: Counter[str] = Counter()
        self.live: dict[Step, StepRequests] = {}
        self.closed = False
        self._halted: tuple[str, BaseException | None] | None = None
        self._ended: dict[Step, tuple[type[DataflowError], str, BaseException | None]] = {}

    def add(
        self, step: Step, samples: Batch, extra_groups: int, more: bool, group_filter: GroupFilter | None
    ) -> tuple[StepRequests, list[Request], Ticket]:
        """Adds samples; returns their step, a request for each row, and their ticket.

        Raises what :meth:`RewardAgent.submit <dataflow.reward_agent.RewardAgent.submit>` raises.
        """
        if self.closed:
            raise DataflowError(f"reward agent: step {step} was submitted after close().")
        if self._halted is not None:
            raise RewardFailed(prefixed(self._halted[0], self._agent)) from self._halted[1]
        state = self.live.get(step)
        if more and step in self._ended:
            raise self._gone(step)
        if step in self._ended or (state is not None and not (more and state.more)):
            raise DataflowError(f"reward agent: step {step} was submitted before; submit each step once.")
        if not len(samples):
            raise DataflowError(f"reward agent: step {step} has no samples to score.")
        if state is not None and (twice := state.seen.intersection(samples.ids)):
            raise DataflowError(f"reward agent: step {step} holds group {min(twice)} twice; submit each group once.")
        if state is None:
            training = isinstance(step, numbers.Integral)
            number = str(step).removeprefix(BESIDE)
            priority = (0, int(number)) if training or number != step else (1, 0)
            rule = self._rule if training else self._rule.for_validation()
            state = self.live[step] = StepRequests(step, rule, priority, extra_groups, more, group_filter)
        requests = state.add(samples.groups.tolist())
        self.counts["requested"] += len(samples)
        self._failures.submitted(len(samples), state.rows)
        return state, requests, Ticket(step, samples.ids, len(samples))

    # --- requests and groups ------------------------------------------------------------------------------------

    def scored(self, request: Request, score: float, extras: dict[str, Any]) -> bool:
        """Ends a request with its score; returns whether that finishes its group."""
        self.counts["scored"] += 1
        self._failures.ended()
        request.score, request.extras = score, extras
        return self._finish(request, "scored")

    def failed(self, request: Request, message: str, error: BaseException) -> bool:
        """Ends a request without a score and applies the rule of its step; returns whether that finishes its group."""
        state = request.step
        message = f"{request}: {message}"
        self.counts["failed"] += 1
        self._failures.ended(message)
        fatal = getattr(error, "fatal", None) is True
        if fatal or state.rule.kind == "fail":
            state.end(request, "failed")
            if fatal:
                self.halt(message, error)
            else:
                self.fail(state, message, error)
            return False
        if not state.last_failure:
            # Only the first one of a step; the step's metrics have their number.
            logger.warning("{}", prefixed(f"{message.rstrip('.')} (reward.on_failure={state.rule})", self._agent))
        state.last_failure = message
        match state.rule.kind:
            case "score":
                request.score = state.rule.score
            case "drop_sample":
                request.kept = False
            case "drop_group" | "replace_group":
                state.end(request, "failed")
                self._drop_group(request, error)
                return False
        return self._finish(request, "failed")

    def check_failed_share(self, state: StepRequests, error: BaseException | None) -> None:
        """Ends every step if too many requests have failed."""
        if state.rule.kind != "fail" and (passed := self._failures.passed(state.more)):
            self.halt(passed, error)

    def _finish(self, request: Request, how: State) -> bool:
        state, group = request.step, request.group
        state.end(request, how)
        state.unfinished[group] -= 1
        return not state.unfinished[group]

    def _drop_group(self, failed: Request, error: BaseException) -> None:
        """Drops the group of a failed request; under ``replace_group`` an extra one takes its place."""
        state, group, now = failed.step, failed.group, clock.now()
        for request in state.groups[group]:
            if request.open:
                began = request.job.begin if request.job is not None else 0.0
                request.begin, request.end = began or now, now
                self._cancel(request)
            request.kept, request.score = False, float("nan")
        if state.rule.kind == "drop_group":
            self.arrive(state, group)
            return
        state.withdraw(group)
        state.lost += 1
        if state.extra_groups >= 0:
            self._serve(state)
            return
        lost, can = f"{counted(state.lost, 'group')} failed", "reward.extra_groups can replace; raise it"
        if state.left_out:
            lost += f" and {state.left_out} were left out"
            can = "data.gen_batch_size and reward.extra_groups can replace; raise one"
        last = f"The last failure: {state.last_failure}"
        self.fail(state, f"step {state.key}: {lost}, one more than {can}. {last}", error)

    def _cancel(self, request: Request) -> None:
        self.counts["cancelled"] += 1
        request.step.end(request, "cancelled")
        self._on_cancel(request)

    def arrive(self, state: StepRequests, group: int) -> None:
        """Makes a finished group available to collect."""
        state.unfinished.pop(group, None)
        state.arrived.append(group)
        self._serve(state)

    def _serve(self, state: StepRequests) -> None:
        """Wakes the waiters whose groups are there, first come, first served."""
        if not state.unfinished:
            state.settled.set()
        while state.waiters:
            waiter = state.waiters[0]
            if not waiter.future.done():
                try:
                    chosen = state.pick(waiter)
                except ValueError as error:
                    self.fail(state, str(error), None)
                    return
                if chosen is None:
                    return
                waiter.future.set_result(chosen)
            state.waiters.popleft()

    # --- collect ------------------------------------------------------------------------------------------------

    async def collect(
        self, step: Step, k: int | None, order: Order, last: bool, groups: Iterable[int] | None = None
    ) -> Batch:
        """See :meth:`RewardAgent.collect <dataflow.reward_agent.RewardAgent.collect>`."""
        if order not in ("arrival", "index"):
            raise DataflowError(f"reward agent: order '{order}' is unknown; give 'arrival' or 'index'.")
        state = self.live.get(step)
        if state is None:
            raise self._gone(step)
        named = None if groups is None else frozenset(groups)
        take = len(named) if named is not None else state.left if k is None else k
        if k is None and named is None and not take:
            raise DataflowError(f"reward agent: all groups of step {step} are being collected already.")
        if take < 1 or (named is None and take > state.left and not (state.more and k is not None)):
            raise DataflowError(f"reward agent: step {step} has {state.left} groups left to collect, not {take}.")
        chosen = await self._wait(state, Waiter(take, order, asyncio.get_running_loop().create_future(), named))
        final = last if state.more or named is not None else len(state.groups) <= state.extra_groups + len(chosen)
        if final and state.more and not state.over and (passed := self._failures.passed()):
            self.halt(passed, None)  # the share is known only now that the step is complete
            raise self._gone(step)
        batch = rewards_of(state, chosen)
        if final and not state.over:
            batch.meta["step"] = step_summary(state)
            state.ended.clear()  # breaks the circle of requests and their step, for the garbage collector
            self._end(state, DataflowError, f"reward agent: step {step} has been collected in full.", None)
        return batch

    async def _wait(self, state: StepRequests, waiter: Waiter) -> list[int]:
        """Waits until the groups of a waiter have arrived and returns their ids."""
        state.waiters.append(waiter)
        self._serve(state)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            # A cancelled waiter leaves its groups to the next one.
            if waiter in state.waiters:
                state.waiters.remove(waiter)
            elif not waiter.future.cancelled() and not waiter.future.exception():
                state.arrived = waiter.future.result() + state.arrived
            self._serve(state)
            raise

    async def settled(self, step: Step) -> None:
        """Waits until no group of a step is unfinished: each has arrived or is lost."""
        state = self.live.get(step)
        if state is not None and state.unfinished:
            state.settled.clear()
            await state.settled.wait()

    # --- ends of steps ------------------------------------------------------------------------------------------

    def cancel(self, step: Step) -> int:
        """Cancels the rest of a step; returns the number of requests that had not ended."""
        state = self.live.get(step)
        if state is None:
            return 0
        count = state.open
        self.fail(state, f"step {step}: its reward requests were cancelled.", None)
        return count

    def fail(self, state: StepRequests, message: str, error: BaseException | None) -> None:
        """Ends a step: present and future waiters get RewardFailed, and its open requests are cancelled."""
        if not state.over:
            self._end(state, RewardFailed, message, error)

    def halt(self, message: str, error: BaseException | None) -> None:
        """Ends every step, now and later, for a fault that is not that of one step."""
        if self._halted is None:
            self._halted = message, error
        for state in list(self.live.values()):
            self.fail(state, message, error)

    def on_bug(self, error: BaseException) -> None:
        """Halts after an internal error, since nothing else would wake the waiters that depend on its result."""
        if isinstance(error, DataflowError):
            self.halt(str(error), error.__cause__)
            return
        logger.opt(exception=error).error("reward agent: {}", describe(error))
        self.halt(f"reward agent: an error of its own, {describe(error)}; please report it with the log.", error)

    def close(self) -> bool:
        """Fails all steps; returns whether this was the first call."""
        if self.closed:
            return False
        self.closed = True
        for state in list(self.live.values()):
            self.fail(state, f"step {state.key}: the reward agent was closed.", None)
        return True

    def _end(self, state: StepRequests, kind: type[DataflowError], message: str, cause: BaseException | None) -> None:
        state.over = True
        state.settled.set()
        for task in state.post_processing:
            task.cancel()
        del self.live[state.key]
        self._ended[state.key] = (kind, prefixed(message, self._agent), cause)
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        for waiter in state.waiters:
            if not waiter.future.done():
                waiter.future.set_exception(self._gone(state.key))
        state.waiters.clear()
        state.unfinished.clear()
        for requests in state.groups.values():
            for request in requests:
                if request.open:
                    self._cancel(request)

    def _gone(self, step: Step) -> DataflowError:
        """Returns why a step is not there; a new exception each time, as one raised twice mixes tracebacks."""
        if step in self._ended:
            kind, message, cause = self._ended[step]
            error = kind(message)
            error.__cause__ = cause
            return error
        live = ", ".join(map(str, self.live)) or "none"
        return DataflowError(f"reward agent: step {step} was never submitted (in flight: {live}).")

    def waiting(self) -> int:
        """Returns the number of open requests for which no call runs."""
        requests = (each for state in self.live.values() for rows in state.groups.values() for each in rows)
        return sum(each.open and not (each.job and each.job.running) for each in requests)


def rewards_of(state: StepRequests, chosen: Sequence[int]) -> Batch:
    """Returns the rewards of finished groups and removes them from the step."""
    import torch

    requests = [request for group in chosen for request in state.groups.pop(group)]
    state.ended += requests
    replaced, state.replaced = state.replaced, []
    names = dict.fromkeys(name for request in requests for name in request.extras)
    columns: dict[str, Any] = {name: [request.extras.get(name) for request in requests] for name in names}
    columns["score"] = torch.tensor([request.score for request in requests], dtype=torch.float32)
    if state.rule.drops:
        columns["kept"] = torch.tensor([request.kept for request in requests])
    return Batch(
        [request.group for request in requests],
        columns,
        {
            "latency_s": [request.end - request.begin for request in requests],
            "records": [request.record() for request in requests],
            "replaced": [request.record() for request in replaced],
        },
    )


def step_summary(state: StepRequests) -> dict[str, float]:
    """Returns the metrics of the collected part of a step, keyed by name without ``reward/``."""
    called = [request for request in state.ended if request.how not in ("ledger", "shared", "cancelled")]
    hows = Counter(request.how for request in state.ended)
    latency = latency_summary([request.end - request.begin for request in called])
    found = {
        "requested": len(state.ended),
        "scored": len(state.ended) - hows["failed"] - hows["cancelled"],
        "failed": hows["failed"],
        "retried": sum(max(0, request.tries - 1) for request in called),
        **{name: sum(request.notes.get(name, 0) for request in called) for name in ENDED},
        "hedged": hows["hedged"],
        "cached": hows["ledger"] + hows["shared"],
        **({"filtered_groups": state.left_out, "equal_groups": state.equal} if state.group_filter else {}),
        **{f"latency_{name}": value for name, value in latency.items()},
    }
    return {name: float(value) for name, value in found.items()}


def latency_summary(latency_s: Collection[float]) -> dict[str, float]:
    """Returns p50, p95, p99, max and mean of durations, in seconds; nothing if there are none."""
    if not len(latency_s):
        return {}
    values = np.fromiter(latency_s, dtype=np.float64)
    p50, p95, p99 = np.percentile(values, [50, 95, 99]).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": float(values.max()), "mean": float(values.mean())}
