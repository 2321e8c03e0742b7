"""Rates: how many requests and tokens may go out a minute.

A leaky bucket sees to it that they go out evenly, a count of the last minute that no 60 seconds hold more than they
may, however they are cut. What is known only afterwards, the tokens that a call used, is settled in both.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right, insort

from aiolimiter import AsyncLimiter

_REQUEST_BURST_S, _TOKEN_BURST_S = 1.0, 5.0
"""Seconds' worth that may go out at once. A request has many tokens, so a second's worth may not be enough for one."""


class Rates:
    """Requests and tokens a minute.

    Several lines may share them. They take turns: a permit is one line's until its request begins, or it is dropped;
    so none has to let others by for ever, and no permits pile up that would all be used at once.

    Args:
        rpm: requests that may begin in 60 seconds; None for no limit.
        tpm: tokens that they may use.
    """

    def __init__(self, rpm: float | None, tpm: float | None) -> None:
        self._requests = None if rpm is None else Meter(rpm, _REQUEST_BURST_S)
        self._tokens = None if tpm is None else Meter(tpm, _TOKEN_BURST_S)
        self._turn = asyncio.Lock()

    async def take(self, tokens: int) -> None:
        """Waits until one request may begin; :meth:`begin` or :meth:`drop` must follow."""
        await self._turn.acquire()
        if self._requests is not None:
            await self._requests.wait(1)
        if self._tokens is not None:
            await self._tokens.wait(tokens)

    def begin(self, tokens: int) -> None:
        """One begins, with no more tokens than were waited for."""
        if self._requests is not None:
            self._requests.begin(1)
        if self._tokens is not None:
            self._tokens.begin(tokens)
        self._turn.release()

    def drop(self) -> None:
        """None begins."""
        for meter in (self._requests, self._tokens):
            if meter is not None:
                meter.drop()
        self._turn.release()

    def give(self, tokens: int, age_s: float) -> None:
        """One that began so many seconds ago has ended; ``tokens`` are those it used beyond what it began with."""
        if self._tokens is not None and tokens:
            self._tokens.correct(tokens, age_s)


class Meter:
    """Lets so much begin in any 60 seconds; who waits for it must not be joined before it has begun or dropped.

    Args:
        most: in 60 seconds. What is larger begins when nothing else counts, and counts for as many minutes itself.
        burst_s: seconds' worth that may begin at once.
    """

    def __init__(self, most: float, burst_s: float) -> None:
        burst = max(1.0, most / 60 * burst_s)
        self._pace = AsyncLimiter(burst, burst / most * 60)
        self._paid = self._owed = 0.0
        self._most = most
        self._begun: list[tuple[float, float]] = []
        """Sorted (the loop's time from which it counts no more, amount)."""
        self._sum = 0.0
        self._freed = asyncio.Event()

    async def wait(self, amount: float) -> None:
        """Waits until so much more may begin."""
        owed, self._paid = amount + self._owed, amount
        self._owed = min(owed, 0.0)
        while owed > 0:
            part = min(owed, self._pace.max_rate)
            await self._pace.acquire(part)
            owed -= part
        while not self._has_room(amount):
            self._freed.clear()
            timer = asyncio.get_running_loop().call_at(self._begun[0][0], self._freed.set)
            await self._freed.wait()
            timer.cancel()

    def _has_room(self, amount: float) -> bool:
        over = bisect_right(self._begun, (asyncio.get_running_loop().time(), math.inf))
        self._sum -= sum(amount for _until, amount in self._begun[:over])
        del self._begun[:over]
        return not self._begun or self._sum + amount <= self._most

    def begin(self, amount: float) -> None:
        """So much begins now."""
        self._owed += amount - self._paid
        self._count(amount, 0.0)

    def drop(self) -> None:
        """What was waited for does not begin."""
        self._owed -= self._paid

    def _count(self, amount: float, age_s: float) -> None:
        minutes = max(1.0, amount / self._most)
        insort(self._begun, (asyncio.get_running_loop().time() - age_s + 60 * minutes, amount))
        self._sum += amount

    def correct(self, more: float, age_s: float) -> None:
        """What began so many seconds ago was more than was said, or less."""
        self._owed += more
        if more > 0:
            self._count(more, age_s)
            return
        own = bisect_right(self._begun, (asyncio.get_running_loop().time() - age_s + 60, math.inf))
        # What is not found there is taken from older ones, which count no longer than it.
        while more < 0 and own:
            own -= 1
            until, amount = self._begun[own]
            cut = min(amount, -more)
            self._begun[own] = until, amount - cut
            self._sum -= cut
            more += cut
        self._freed.set()
