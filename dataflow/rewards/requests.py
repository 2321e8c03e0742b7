"""The requests of a step: what stands between submit and collect, without any event loop's doing.

A *request* is a sample that wants its score. An *ask* is the work of getting one: several requests with the same
prompt and response share it. A *step* holds the requests by group and hands out whole groups.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import numpy as np

from dataflow.batch import Batch
from dataflow.rewards.decode import Decode
from dataflow.rewards.failure import FailureRule
from dataflow.usercode.calls import Call

Step = int | str
Order = Literal["arrival", "index"]

NOTES = ("queued_s", "held_by", "throttled")
"""What a request's notes may say."""
_NO_WAIT_S = 0.01


@dataclass(frozen=True)
class Ticket:
    """What submit returns: the step, its group ids and how many requests it has."""

    step: Step
    groups: tuple[int, ...]
    requests: int

    @staticmethod
    def concat(tickets: Sequence[Ticket]) -> Ticket:
        """Returns the ticket of a step that was submitted in sets."""
        groups = tuple(group for ticket in tickets for group in ticket.groups)
        return Ticket(tickets[0].step, groups, sum(ticket.requests for ticket in tickets))


@dataclass(eq=False, slots=True)
class Request:
    """One sample to score; ``begin`` and ``end`` are seconds of ``clock.now()``."""

    step: StepRequests
    group: int
    sample: int
    score: float = math.nan
    extras: dict[str, Any] = field(default_factory=dict)
    begin: float = 0.0
    end: float = 0.0
    tries: int = 0
    ended: bool = False
    kept: bool = True
    """False for a sample that no loss may use."""
    how: str = ""
    """How it was scored if not by a call of its own: ``ledger``, ``shared``, ``hedged``. Or that it was not:
    ``failed``, or ``cancelled`` since another of its group had failed."""
    notes: Mapping[str, Any] | None = None
    """What held it up, see :attr:`Ask.notes`."""
    ask: Ask | None = None

    def __str__(self) -> str:
        return f"sample {self.sample} of group {self.group} of step {self.step.key}"


@dataclass(eq=False, slots=True)
class Ask:
    """The work behind one or several requests; it stands in a line until it may start, at each try anew."""

    arguments: dict[str, Any]
    key: bytes | None
    place: tuple[int, int, int]
    requests: list[Request]
    endpoint: str = ""
    tokens: int = 0
    begin: float = 0.0
    deadline: float = math.inf
    """Seconds of the loop's clock."""
    tries: int = 0
    queued_at: float = 0.0
    """Seconds of ``clock.now()``, like ``begin``."""
    held_by: str = ""
    """What its first call waited for, if it did not start at once: a free ``slot``, or the ``rate`` that is allowed."""
    throttled: int = 0
    """How often the service said that it is asked too much."""
    errors: list[str] = field(default_factory=list)
    error: BaseException | None = None
    """Of the last call that failed."""
    last_s: float = 0.0
    live: dict[Call, bool] = field(default_factory=dict)
    """Running calls; whether each is a hedge."""
    timer: asyncio.TimerHandle | None = None
    queued: bool = False

    @property
    def wanted(self) -> bool:
        # Not queued: it has started from a better place than the one where it is looked at.
        return self.queued and bool(self.requests)

    @property
    def notes(self) -> Mapping[str, Any] | None:
        """What the trace says of why it took long: ``queued_s`` and ``held_by`` (waits under 10 ms are none), and
        ``throttled``."""
        queued_s = self.begin - self.queued_at
        if queued_s < _NO_WAIT_S and not self.throttled:
            return None
        held = {"queued_s": int(queued_s * 1000) / 1000, "held_by": self.held_by} if queued_s >= _NO_WAIT_S else {}
        return {**held, "throttled": self.throttled} if self.throttled else held


@dataclass(eq=False, slots=True)
class Finish:
    """All samples of a group have their score: the group waits to be post-processed."""

    step: StepRequests
    group: int
    place: tuple[int, int, int]
    endpoint: str = ""
    tokens: int = 0

    @property
    def wanted(self) -> bool:
        return self.group in self.step.unfinished


@dataclass(eq=False)
class Waiter:
    take: int
    order: Order
    future: asyncio.Future[list[int]]


@dataclass(eq=False)
class Rows:
    """Samples submitted together, of which the first ``ready`` have their asks.

    Attributes:
        begin: when they were submitted, in seconds of ``clock.now()``.
    """

    arguments: Arguments
    requests: list[Request]
    begin: float
    ready: int = 0


@dataclass(eq=False)
class StepRequests:
    """A submitted step. Its groups go from unfinished to arrived to collected, or are lost."""

    key: Step
    rule: FailureRule
    priority: tuple[int, int]
    spare: int = 0
    """Groups beyond those that will be collected, to take the place of lost ones; below 0, too many were lost."""
    more: bool = False
    """Whether further groups may be submitted."""
    seen: set[int] = field(default_factory=set)
    """All groups that were submitted."""
    rows: int = 0
    """All samples that were submitted."""
    unready: deque[Rows] = field(default_factory=deque)
    """Those that no ask has been made for."""
    admitting: bool = False
    """Whether the next of these are about to be made ready."""
    in_line: int = 0
    """Asks that wait for their first call."""
    groups: dict[int, list[Request]] = field(default_factory=dict)
    unfinished: dict[int, int] = field(default_factory=dict)
    """How many samples of a group are still to come."""
    arrived: list[int] = field(default_factory=list)
    waiters: deque[Waiter] = field(default_factory=deque)
    open: int = 0
    """Requests that have not ended."""
    ended: list[Request] = field(default_factory=list)
    """Collected requests: what the metrics of the step are of."""
    lost: int = 0
    """Groups that failed and were replaced."""
    replaced: list[Request] = field(default_factory=list)
    """Requests of these, until the next collect tells of them."""
    failed: int = 0
    """Requests that a rule took care of."""
    story: str = ""
    """Of the last failure that a rule took care of."""
    over: bool = False

    def add(self, groups: Sequence[int]) -> list[Request]:
        """Takes a row of each of these group ids, which are new; returns their requests, in that order."""
        rows: list[Request] = []
        for group, same in groupby(groups):
            requests = [Request(self, group, sample) for sample, _group in enumerate(same)]
            rows += requests
            self.groups[group] = requests
            self.unfinished[group] = len(requests)
            self.seen.add(group)
        self.rows += len(rows)
        self.open += len(rows)
        return rows

    @property
    def left(self) -> int:
        """Groups to collect, of those submitted so far, that nobody has collected or is waiting for."""
        there = len(self.unfinished) + len(self.arrived)
        return there - self.spare - sum(waiter.take for waiter in self.waiters if not waiter.future.done())

    def waiting(self) -> int:
        """Returns how many requests no call runs for."""
        return sum(not r.ended and not (r.ask and r.ask.live) for rows in self.groups.values() for r in rows)

    def pick(self, take: int, order: Order) -> list[int] | None:
        """Takes the next groups out, in order of their ids; None while they are not all there."""
        if order == "index":
            chosen = sorted([*self.unfinished, *self.arrived])[:take]
            if len(chosen) < take or not self.unfinished.keys().isdisjoint(chosen):
                return None
        elif len(self.arrived) < take:
            return None
        else:
            chosen = sorted(self.arrived[:take])
        taken = set(chosen)
        self.arrived = [group for group in self.arrived if group not in taken]
        return chosen


def latency_summary(latency_s: Sequence[float]) -> dict[str, float]:
    """Returns p50, p95, p99, max and mean of durations, in seconds; nothing if there are none."""
    if not len(latency_s):
        return {}
    values = np.asarray(latency_s, dtype=np.float64)
    p50, p95, p99 = np.percentile(values, [50, 95, 99]).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": float(values.max()), "mean": float(values.mean())}


class Arguments:
    """The keywords of each row's call, verl's names, made as they are needed.

    Args:
        samples: columns ``data_source``, ``ground_truth`` and ``response_text``, or in place of the last
            ``responses`` and ``response_mask``, token ids ``[rows, R]``; ``extra_info`` and ``raw_prompt``
            where there are such.
        decode: turns token ids into texts.
        with_ids: adds ``response_ids``, a list of the response's token ids, to ``extra_info``.

    Raises:
        DataflowError: a column is missing.
    """

    def __init__(self, samples: Batch, decode: Decode | None, with_ids: bool = False) -> None:
        self._sources, self._truths = samples["data_source"], samples["ground_truth"]
        self._decode = decode if "response_text" not in samples else None
        self._texts = samples["responses" if self._decode else "response_text"]
        # By name: a column that nobody reads is not copied out of shared memory.
        names = ("extra_info", "raw_prompt", "response_mask", "responses" if with_ids else "")
        self._extras, self._prompts, self._mask, self._ids = (samples[n] if n in samples else None for n in names)  # noqa: SIM401

    def rows(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Returns the keywords of the rows from begin to end."""
        lengths = None if self._mask is None else _lengths(self._mask[begin:end])
        texts = self._text(begin, end, lengths)
        return [
            self._row(row, text, lengths[row - begin] if lengths else None) for row, text in enumerate(texts, begin)
        ]

    def _text(self, begin: int, end: int, lengths: list[int] | None) -> list[str]:
        if self._decode is None:
            return list(self._texts[begin:end])
        ids = list(self._texts[begin:end].numpy())
        return self._decode(ids if lengths is None else [row[:n] for row, n in zip(ids, lengths, strict=True)])

    def _row(self, row: int, text: str, length: int | None) -> dict[str, Any]:
        extra = dict((None if self._extras is None else self._extras[row]) or {})
        if self._prompts is not None and self._prompts[row] is not None:
            extra["raw_prompt"] = self._prompts[row]
        if length is not None:
            extra["response_length"] = length
        if self._ids is not None:
            extra["response_ids"] = self._ids[row][: extra.get("response_length")].tolist()
        return {
            "data_source": self._sources[row],
            "solution_str": text,
            "ground_truth": self._truths[row],
            "extra_info": extra,
        }


def _lengths(mask: Any) -> list[int]:
    """Returns where each response ends; tokens within it may be masked out of the loss (a tool's)."""
    backwards = mask.cpu().numpy()[:, ::-1].astype(bool)
    last = mask.shape[-1] - backwards.argmax(axis=1)
    return np.where(backwards.any(axis=1), last, 0).tolist()  # type: ignore[no-any-return]


def rewards_of(state: StepRequests, chosen: Sequence[int]) -> Batch:
    """Returns the rewards of finished groups and forgets them."""
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
            "records": [record(request) for request in requests],
            "replaced": [record(request) for request in replaced],
        },
    )


def record(request: Request) -> dict[str, Any]:
    """Returns what the trace says of a request: where, when, and what was out of the ordinary."""
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


def step_summary(state: StepRequests) -> dict[str, float]:
    """Returns the metrics of what was collected of a step so far, by their names without ``reward/``."""
    requests = state.ended
    called = [request for request in requests if request.how not in ("ledger", "shared", "cancelled")]
    hows = [request.how for request in requests]
    latency = latency_summary([request.end - request.begin for request in called])
    return {
        "requested": float(len(requests)),
        "scored": float(len(requests) - hows.count("failed") - hows.count("cancelled")),
        "failed": float(hows.count("failed")),
        "retried": float(sum(max(0, request.tries - 1) for request in called)),
        "hedged": float(hows.count("hedged")),
        "cached": float(hows.count("ledger") + hows.count("shared")),
        **{f"latency_{name}": value for name, value in latency.items()},
    }
