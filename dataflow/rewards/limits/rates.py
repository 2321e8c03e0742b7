"""Rates: how many requests and tokens may be sent a minute.

A leaky bucket spaces them evenly, and a sliding window keeps any 60 seconds within the limit. The tokens that a call
really used are known only at its end, and corrected in both.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right, insort

from aiolimiter import AsyncLimiter
from loguru import logger

_REQUEST_BURST_S, _TOKEN_BURST_S = 1.0, 5.0
"""Burst, in seconds of the rate. Larger for tokens, since one request may use more than a second's worth."""


LONG_S = 60.0
"""Seconds that a rate, or a pause that a service asked for, may hold up requests without a warning."""
_SPANS = ((31_557_600.0, "years"), (86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def _span(seconds: float) -> str:
    """Returns a long duration in its largest unit.

    >>> _span(5400.0)
    '1.5 hours'
    """
    unit, name = next((unit, name) for unit, name in _SPANS if seconds >= unit or unit == 60)
    return f"{seconds / unit:.3g} {name}"


class Rates:
    """Permits for requests and tokens a minute.

    Queues that share them take turns: a permit is held by one queue until its request begins or the permit is dropped.
    So no queue starves, and no permits accumulate that would all be used at once.

    Args:
        rpm: requests that may begin in 60 seconds; None for no limit.
        tpm: tokens that may be used in 60 seconds; None for no limit.
    """

    def __init__(self, rpm: float | None, tpm: float | None) -> None:
        self._requests = None if rpm is None else Meter(rpm, _REQUEST_BURST_S)
        self._tokens = None if tpm is None else Meter(tpm, _TOKEN_BURST_S)
        self._warned = False
        if rpm is not None:
            self._check(60 / rpm, f"rpm={rpm:g} allows one request")
        self._tpm = tpm
        self._turn = asyncio.Lock()

    async def acquire(self, tokens: int) -> None:
        """Waits for a permit to begin one request; :meth:`begin` or :meth:`drop` must follow."""
        if self._tpm is not None and not self._warned:
            self._check(tokens * 60 / self._tpm, f"tpm={self._tpm:g} allows one request of {tokens:,} tokens")
        await self._turn.acquire()
        if self._requests is not None:
            await self._requests.wait(1)
        if self._tokens is not None:
            await self._tokens.wait(tokens)

    def _check(self, seconds: float, what: str) -> None:
        """Warns once if one request takes up more than :data:`LONG_S` of the rate."""
        if seconds > LONG_S and not self._warned:
            self._warned = True
            logger.warning("reward agent: the limit {} in {}; raise it if you did not mean that.", what, _span(seconds))

    def begin(self, tokens: int) -> None:
        """Uses the permit, for no more tokens than it was acquired for."""
        if self._requests is not None:
            self._requests.begin(1)
        if self._tokens is not None:
            self._tokens.begin(tokens)
        self._turn.release()

    def drop(self) -> None:
        """Gives the permit back unused."""
        for meter in (self._requests, self._tokens):
            if meter is not None:
                meter.drop()
        self._turn.release()

    def correct(self, tokens: int, age_s: float) -> None:
        """Corrects the tokens of a call that has ended.

        Args:
            tokens: tokens it used beyond its estimate; negative if it used fewer.
            age_s: seconds since it began.
        """
        if self._tokens is not None and tokens:
            self._tokens.correct(tokens, age_s)


class Meter:
    """Limits the amount that begins in any 60 seconds, for one caller at a time.

    Args:
        most: amount in 60 seconds. A larger amount begins when nothing else is counted, and is then counted for a
            proportionally longer time.
        burst_s: amount that may begin at once, in seconds of the rate.
    """

    def __init__(self, most: float, burst_s: float) -> None:
        burst = max(1.0, most / 60 * burst_s)
        self._pace = AsyncLimiter(burst, burst / most * 60)
        self._paid = self._owed = 0.0
        self._most = most
        self._begun: list[tuple[float, float]] = []
        """Sorted (time of the loop until which it counts, amount)."""
        self._sum = 0.0
        self._freed = asyncio.Event()

    async def wait(self, amount: float) -> None:
        """Waits until this amount may begin; :meth:`begin` or :meth:`drop` must follow."""
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
        """Counts an amount that begins now."""
        self._owed += amount - self._paid
        self._count(amount, 0.0)

    def drop(self) -> None:
        """Gives back the amount that was waited for."""
        self._owed -= self._paid

    def _count(self, amount: float, age_s: float) -> None:
        minutes = max(1.0, amount / self._most)
        insort(self._begun, (asyncio.get_running_loop().time() - age_s + 60 * minutes, amount))
        self._sum += amount

    def correct(self, more: float, age_s: float) -> None:
        """Corrects the amount that began ``age_s`` seconds ago by ``more``, which may be negative."""
        self._owed += more
        if more > 0:
            self._count(more, age_s)
            return
        own = bisect_right(self._begun, (asyncio.get_running_loop().time() - age_s + 60, math.inf))
        # The rest is taken from older amounts, which stop counting earlier.
        while more < 0 and own:
            own -= 1
            until, amount = self._begun[own]
            cut = min(amount, -more)
            self._begun[own] = until, amount - cut
            self._sum -= cut
            more += cut
        self._freed.set()
