"""The life of an ask: tries, time-outs, backoff and hedges, until it is settled or given up. Exactly one of both.

An ask holds a slot only while a call runs for it. Between two tries it waits on a timer, then stands in line again
at its old place, before all that came later.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from dataflow.rewards.hedge import Hedge
from dataflow.rewards.limits.queues import Limiter, Line
from dataflow.rewards.requests import Ask
from dataflow.rewards.retry import Retry, is_rejected, is_throttle, is_timeout, retry_after_s, status_of
from dataflow.rewards.sentinel.sentinel import Kind
from dataflow.rewards.user.results import read_result, tokens_used
from dataflow.system import clock
from dataflow.system.redaction import redact_known
from dataflow.usercode.calls import Call, Calls
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import attribute_of, is_ours, message_of, parts_of
from dataflow.usercode.load import describe, fix_of, is_async, name_of


class BadScore(ValueError):
    """What a reward function returned is no score."""

    fix = "return a finite number, (score, query, explanation) or a dict with 'score'"


class Outcome(Protocol):
    """What the lifecycle calls when an ask begins and ends."""

    def started(self, ask: Ask) -> None: ...

    def settled(self, ask: Ask, score: float, extras: dict[str, Any], how: str) -> None: ...

    def gave_up(self, ask: Ask, story: str, error: BaseException) -> None: ...


class Lifecycle:
    """Takes asks through their tries.

    Args:
        score: the user's function.
        calls: runs it.
        limiter: gives the slots.
        retry: the tries of an ask.
        hedge_after: how long a first call may take before a second one is sent, see
            :func:`~dataflow.rewards.hedge.parse_hedge`; None never sends one.
        outcome: told of each end.
    """

    def __init__(
        self,
        score: Callable[..., Any],
        calls: Calls,
        limiter: Limiter,
        retry: Retry,
        hedge_after: str | float | None,
        outcome: Outcome,
    ) -> None:
        self._score = score
        self._waits = is_async(score)
        self._calls = calls
        self._limiter = limiter
        self._retry = retry
        limits_s = [limit for limit in (retry.timeout_s, retry.deadline_s) if limit is not None]
        # The same for all first calls, so that they share a timer.
        self._first_s = min(limits_s, default=None)
        self._hedging = Hedge(hedge_after)
        self._outcome = outcome
        self.counts: Counter[str] = Counter()

    def queue(self, ask: Ask) -> None:
        """Puts an ask in line; ``fill`` starts it."""
        ask.queued = True
        self._limiter.push(ask)

    def fill(self) -> None:
        """Starts what may start."""
        self._limiter.fill()

    def start(self, ask: Ask, line: Line) -> None:
        """Its turn has come, and its slot is taken."""
        loop = self._calls.loop
        ask.queued = False
        timeout_s = self._first_s
        if not ask.tries:
            ask.begin = clock.now()
            ask.held_by = "slot" if self._limiter.full(line) else "rate"
            if self._retry.deadline_s is not None:
                ask.deadline = loop.time() + self._retry.deadline_s
        elif timeout_s is not None:
            self._unwatch(ask)
            timeout_s = min(self._retry.timeout_s or math.inf, max(0.0, ask.deadline - loop.time()))
        hedge = bool(ask.live)
        if hedge:
            self.counts["hedged"] += 1
        else:
            ask.tries += 1
        if ask.tries == 1 and not hedge:
            self._outcome.started(ask)
        call = self._calls.start(
            self._score,
            own_copy(ask.arguments),  # what a try changes must not be seen by the next one, nor by other samples
            on_done=partial(self._tried, ask, line),
            on_freed=partial(self._freed, ask, line),
            timeout_s=timeout_s,
            awaits=self._waits,
            mark=self._mark(ask),
        )
        ask.live[call] = hedge
        threshold_s = None if hedge else self._hedging.after_s
        if threshold_s is not None:
            ask.timer = loop.call_later(threshold_s, self._hedge, ask)

    def drop(self, ask: Ask) -> None:
        """Nobody wants it any more."""
        self._unwatch(ask)
        calls, ask.live = ask.live, {}
        for call in calls:
            call.cancel()

    def _freed(self, ask: Ask, line: Line, call: Call) -> None:
        error = call.error
        throttled = error is not None and is_throttle(error)
        used = tokens_used(call.result) if isinstance(call.result, Mapping) else None
        spent = 0 if used is None else used - ask.tokens
        self._limiter.release(line, call.begin, throttled, spent, error)
        # The call is kept as long as its time-out, what it returned need not be.
        call.result = call.error = None

    def _tried(self, ask: Ask, line: Line, call: Call) -> None:
        hedge = ask.live.pop(call)
        error = call.error
        if error is None:
            try:
                score, extras = read_result(call.result)
                if extras:
                    extras = redact_known(extras)  # what a server said is kept and shown in these columns
            except BaseException as bad:  # reading it may run code of the user's: a tensor's, a mapping's
                if is_ours(bad):
                    raise
                known = type(bad) is ValueError
                error = BadScore(message_of(bad) if known else f"what cannot be read: {describe(bad)}")
            else:
                self._hedging.answered(self._latency_s(ask, call))
                self.drop(ask)
                self._outcome.settled(ask, score, extras, "hedged" if hedge else "")
                return
        self._failed(ask, line, call, error)

    def _latency_s(self, ask: Ask, call: Call) -> float:
        """Returns how long the call took; where another one lost against it, how long that has taken at least.

        A percentile of winners alone would fall and fall, as it says who is sent a second call.
        """
        return max([call.seconds, *(clock.now() - slower.begin for slower in ask.live)]) if ask.live else call.seconds

    def _failed(self, ask: Ask, line: Line, call: Call, error: BaseException) -> None:
        ask.errors.append(_brief(error))
        ask.error, ask.last_s = error, call.seconds
        if is_timeout(error):
            self.counts["timed_out"] += 1
        if is_throttle(error):
            # Those behind it learn by their own tries that the server is away for longer than any of them may take.
            pause_s = min(retry_after_s(error), self._retry.deadline_s or math.inf)
            if is_rejected(error):
                self.counts["throttled"] += 1
                ask.throttled += 1
            if pause_s:
                line.pause(pause_s)
        if ask.live:
            return  # its hedge may still answer
        self._unwatch(ask)
        now = self._calls.loop.time()
        try:
            again = attribute_of(error, "fatal") is not True and self._again(ask, error)
        except BaseException as own:
            if is_ours(own):
                raise
            self._give_up(ask, own, f"the predicate for retries raised {describe(own)}")
            return
        if not again or ask.tries >= self._retry.tries:
            self._give_up(ask, error)
            return
        # A hedge that still stands in line becomes the next try.
        wait_s = 0.0 if ask.queued else self._retry.wait_s(ask.tries, error)
        if now + wait_s >= ask.deadline:
            self._give_up(ask, error, f"its deadline of {self._retry.deadline_s:g} s leaves no time for another")
            return
        self.counts["retried"] += 1
        if ask.queued:
            self._watch(ask)
        else:
            ask.timer = self._calls.loop.call_later(wait_s, self._requeue, ask)

    def _mark(self, ask: Ask) -> bytes | None:
        sentinel = self._calls.sentinel
        if sentinel is None:
            return None
        request = ask.requests[0]
        return sentinel.mark(Kind.SCORE, request.step.key, request.group, request.sample, ask.key)

    def _again(self, ask: Ask, error: BaseException) -> bool:
        mark = self._mark(ask) if ask.requests else None
        if mark is None or self._calls.sentinel is None:
            return bool(self._retry.again(error))
        with self._calls.sentinel.inside(mark):
            return bool(self._retry.again(error))

    def _requeue(self, ask: Ask) -> None:
        self._watch(ask)
        self.queue(ask)
        self.fill()

    def _watch(self, ask: Ask) -> None:
        """Sees to it that the ask, which stands in line again, does not stand there beyond its deadline."""
        ask.timer = None
        if ask.deadline < math.inf:
            ask.timer = self._calls.loop.call_at(ask.deadline, self._calls.guarded, self._late, ask)

    def _unwatch(self, ask: Ask) -> None:
        if ask.timer is not None:
            ask.timer.cancel()
            ask.timer = None

    def _late(self, ask: Ask) -> None:
        assert ask.error is not None
        why = f"its deadline of {self._retry.deadline_s:g} s passed while it stood in line for another"
        self._give_up(ask, ask.error, why)

    def _hedge(self, ask: Ask) -> None:
        ask.timer = None
        if ask.live and not ask.queued:
            self.queue(ask)
            self.fill()

    def _give_up(self, ask: Ask, error: BaseException, why: str = "") -> None:
        self.drop(ask)
        self._outcome.gave_up(ask, self._story(ask, error, why), error)

    def _story(self, ask: Ask, error: BaseException, why: str) -> str:
        """Returns what happened, and what to do about it."""
        name = f"'{name_of(self._score)}'"
        verb = f"returned {error}" if isinstance(error, BadScore) else f"raised {describe(error)}"
        if ask.tries > 1 and len(set(ask.errors)) > 1:
            verb = f"failed on each of {ask.tries} tries: {', '.join(ask.errors)}; it {verb}"
        elif ask.tries > 1:
            verb += f" on each of {ask.tries} tries"
        if ask.tries > 1 or isinstance(error, TimeoutError):
            verb += f" (last: {ask.last_s:.1f} s)"
        return f"{name} {verb}{'; ' + why if why else ''}; {fix_of(error)}."


def _brief(error: BaseException) -> str:
    names = [f"HTTP {status_of(one)}" if status_of(one) is not None else type(one).__name__ for one in parts_of(error)]
    return " and ".join(dict.fromkeys(names))
