"""From samples to asks, and from answers back to the samples that wait for them.

Rows are made ready a few at a time, so that a large step holds up nothing that is in flight; and no more than can soon
start, so that the first calls of a large step do not compete with the decoding of its last responses. What the ledger
knows is not asked again; where it is wished, requests in flight with the same prompt and response share one ask.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from loguru import logger

from dataflow.errors import RewardFailed
from dataflow.rewards.latencies import Latencies
from dataflow.rewards.ledger.ledger import Answer, Ledger, key_of
from dataflow.rewards.lifecycle import Lifecycle
from dataflow.rewards.limits.queues import Limits
from dataflow.rewards.requests import Arguments, Ask, Request, Rows, StepRequests
from dataflow.rewards.sentinel.frozen import Frozen, FrozenCall
from dataflow.rewards.sentinel.sentinel import Kind, Sentinel
from dataflow.rewards.user.results import read_amount, tokens_used
from dataflow.system import clock
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import is_ours
from dataflow.usercode.load import describe, name_of, raised

_ADMITTED = 64  # rows that are made ready before the loop may do something else
_AHEAD = 4 * _ADMITTED  # asks of a step in line, from which on no further rows are made ready


class Ends(Protocol):
    """Who is told how a request ended: Groups."""

    def scored(self, request: Request, score: float, extras: dict[str, Any], how: str) -> None: ...

    def broken(self, request: Request, message: str, error: BaseException) -> None: ...


class Asks:
    """The asks of an agent.

    Args:
        owner: the user's reward object, which may know ``endpoint`` and ``tokens`` of a request.
        limits: whether anything depends on these.
        ledger: where requests and answers are journaled, if anywhere.
        share_equal: whether equal requests in flight are asked once.
        scorer: what scores them, as a part of their keys.
        counts: of the agent.
        fail: ends a step that cannot be read.
        ended: called after each ask.
        frozen: samples that are not to be scored again.
        sentinel: sees what runs.
    """

    def __init__(
        self,
        owner: Any,
        limits: Limits,
        ledger: Ledger | None,
        share_equal: bool,
        scorer: str,
        counts: Counter[str],
        fail: Callable[[StepRequests, str, BaseException | None], None],
        ended: Callable[[], None],
        frozen: Frozen,
        sentinel: Sentinel | None,
    ) -> None:
        self._frozen = frozen
        self._sentinel = sentinel
        self._endpoint = getattr(owner, "endpoint", None) if limits.endpoints else None
        rated = any(each.tpm is not None for each in (limits, *limits.endpoints.values()))
        self._tokens = getattr(owner, "tokens", None) if rated else None
        self._unmetered = rated and self._tokens is None
        # Where rows know of each other all are made ready: by their keys, or as one line must not wait for another.
        together = ledger is not None or share_equal or self._endpoint is not None
        self._ahead = math.inf if together else _AHEAD
        self._owner = owner
        self._ledger = ledger
        self._share_equal = share_equal
        self._scorer = scorer
        self._counts = counts
        self._fail = fail
        self._ended = ended
        self._by_key: dict[bytes, Ask] = {}
        self._sequence = 0
        self.latency_s = Latencies()
        self.life: Lifecycle
        self.ends: Ends

    def add(self, state: StepRequests, arguments: Arguments, requests: list[Request]) -> None:
        """Takes further samples of a step; their asks are made on the next turns of the loop."""
        state.unready.append(Rows(arguments, requests, clock.now()))
        self._go_on(state)

    def _admit(self, state: StepRequests) -> None:
        """Makes the next rows of a step ready and puts them in line; comes back for those behind them."""
        state.admitting = False
        if state.over or not state.unready:
            return
        rows = state.unready[0]
        begin, rows.ready = rows.ready, min(rows.ready + _ADMITTED, len(rows.requests))
        if rows.ready == len(rows.requests):
            state.unready.popleft()
        try:
            arguments = rows.arguments.rows(begin, rows.ready)
            for request, keywords, answer in self._ready(state, rows.requests[begin : rows.ready], arguments):
                if request.ended:
                    continue  # its group was dropped meanwhile
                if answer is not None:
                    self._counts["cached"] += 1
                    request.begin = request.end = clock.now()
                    # Samples with the same key have the same answer, each with columns of its own.
                    self.ends.scored(request, answer.score, own_copy(answer.extras), "ledger")
                elif story := self._frozen.sample(state.key, request.group, request.sample, keywords[1]):
                    request.begin = request.end = clock.now()
                    self.ends.broken(request, f"{request}: {story}", FrozenCall(story))
                else:
                    self._ask(state, request, rows.begin, *keywords)
                if state.over:
                    return
        except BaseException as error:  # reading a request runs code of the user's
            if is_ours(error):
                raise
            if not state.over:
                self._fail(
                    state, f"reward agent: step {state.key} cannot be sent: {describe(error).rstrip('.')}.", error
                )
            return
        self.life.fill()
        self._go_on(state)

    def _go_on(self, state: StepRequests) -> None:
        """Sees to it that further rows are made ready, if enough of the step's asks have left the line."""
        if state.unready and not state.admitting and state.in_line < self._ahead:
            state.admitting = True
            asyncio.get_running_loop().call_soon(self._admit, state)

    def _ready(
        self, state: StepRequests, requests: list[Request], arguments: list[dict[str, Any]]
    ) -> list[tuple[Request, tuple[dict[str, Any], bytes | None], Answer | None]]:
        """Returns each request with its arguments, its key, and the answer that was paid for before."""
        if self._ledger is None and not self._share_equal:
            return [(request, (keywords, None), None) for request, keywords in zip(requests, arguments, strict=True)]
        keys = [key_of(keywords, self._scorer) for keywords in arguments]
        rows = [(request.group, request.sample, key) for request, key in zip(requests, keys, strict=True)]
        known = {} if self._ledger is None else self._ledger.submitted(state.key, rows)
        return [
            (request, (keywords, key), known.get((request.group, request.sample)))
            for request, keywords, key in zip(requests, arguments, keys, strict=True)
        ]

    def _ask(
        self, state: StepRequests, request: Request, begin: float, arguments: dict[str, Any], key: bytes | None
    ) -> None:
        shared = key if self._share_equal else None
        ask = None if shared is None else self._by_key.get(shared)
        if ask is not None:
            self._counts["shared"] += 1
            request.how = "shared"
            request.ask = ask
            ask.requests.append(request)
            self._bring_forward(ask, state)
            return
        self._sequence += 1
        ask = Ask(arguments, key, (*state.priority, self._sequence), [request])
        if self._endpoint is not None or self._tokens is not None:
            if self._sentinel is None:
                self._measure(ask)
            else:
                mark = self._sentinel.mark(Kind.SCORE, state.key, request.group, request.sample, key)
                with self._sentinel.inside(mark):
                    self._measure(ask)
        if shared is not None:
            self._by_key[shared] = ask
        request.ask = ask
        ask.queued_at = begin
        state.in_line += 1
        self.life.queue(ask)

    def _measure(self, ask: Ask) -> None:
        """Asks the user's object where the ask goes, and how many tokens it will use."""
        if self._endpoint is not None:
            ask.endpoint = _told(self._endpoint, ask.arguments)
        if self._tokens is not None:
            ask.tokens = _estimate(self._tokens, ask.arguments)

    def _bring_forward(self, ask: Ask, state: StepRequests) -> None:
        """An ask goes as early as the earliest step that wants it; its old place in the line counts no more."""
        if state.priority < ask.place[:2]:
            self._sequence += 1
            ask.place = (*state.priority, self._sequence)
            if ask.queued:
                self.life.queue(ask)

    # --- Lifecycle's Outcome ----------------------------------------------------------------------------------

    def started(self, ask: Ask) -> None:
        """Counts an ask whose first call starts as out of the line."""
        self._left(ask.requests[0].step)

    def _left(self, state: StepRequests) -> None:
        """An ask stands no longer in line for its first call."""
        state.in_line -= 1
        self._go_on(state)

    def settled(self, ask: Ask, score: float, extras: dict[str, Any], how: str) -> None:
        """An ask has its score: so have all requests behind it."""
        requests, end = self._take_requests(ask), clock.now()
        self.latency_s.append(end - ask.begin)
        used = tokens_used(extras)
        self._counts["tokens"] += used or 0
        if self._unmetered:
            self._unmetered = False
            if used is None:
                logger.warning(
                    "reward.tpm limits nothing: '{}' has no method tokens, and its answers have no column 'tokens'.",
                    name_of(self._owner),
                )
        for request in requests:
            _stamp(request, ask, end)
            if self._ledger is not None and ask.key is not None:
                answer = Answer(score, extras, end - ask.begin, ask.tries)
                self._ledger.answered(request.step.key, request.group, request.sample, ask.key, answer)
            columns = extras if len(requests) == 1 else own_copy(extras)
            self.ends.scored(request, score, columns, request.how or how)
        self._ended()

    def gave_up(self, ask: Ask, story: str, error: BaseException) -> None:
        """An ask has failed: the rule of each step behind it says what becomes of its request."""
        requests, end = self._take_requests(ask), clock.now()
        for request in requests:
            _stamp(request, ask, end)
            if self._ledger is not None and ask.key is not None:
                self._ledger.failed(request.step.key, request.group, request.sample, ask.key, story)
            if not request.ended:
                self.ends.broken(request, f"{request}: {story}", error)
        self._ended()

    def _take_requests(self, ask: Ask) -> list[Request]:
        requests, ask.requests = ask.requests, []
        if ask.key is not None and self._by_key.get(ask.key) is ask:
            del self._by_key[ask.key]
        for request in requests:
            request.ask = None
        return requests

    def detach(self, request: Request) -> None:
        """The request has ended without its ask, which goes on only for others."""
        request.ended = True
        ask, request.ask = request.ask, None
        if ask is None:
            return
        ask.requests.remove(request)
        if not ask.requests:
            if not ask.tries:
                self._left(request.step)
            self._take_requests(ask)
            self.life.drop(ask)


def _told(method: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Returns what a method of the user's says of a request."""
    try:
        return method(**own_copy(arguments))
    except BaseException as error:
        if is_ours(error):
            raise
        raise RewardFailed(raised("before a request is sent", method, error).rstrip(".")) from error


def _estimate(method: Callable[..., Any], arguments: dict[str, Any]) -> int:
    """Returns the tokens that a request is expected to use."""
    try:
        return int(read_amount(_told(method, arguments)))
    except ValueError as error:
        raise RewardFailed(
            f"before a request is sent: '{name_of(method)}' returned {error}; return a number of 0 or more"
        ) from error


def _stamp(request: Request, ask: Ask, end: float) -> None:
    """Says when the request was served; one that shared another's call took no service of its own."""
    request.end = end
    if request.how == "shared":
        request.begin, request.tries = end, 0
    else:
        request.begin, request.tries, request.notes = ask.begin, ask.tries, ask.notes
