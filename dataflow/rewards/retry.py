"""When a call is sent again: which errors are worth another try, how long to wait before it, and hedges."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.errors import ConfigError
from dataflow.system.http import THROTTLED, may_pass, seconds, wait_asked
from dataflow.usercode.failures import causes_of, parts_of

# Base classes of the errors of HTTP clients for connections that fail, break or time out; by name, so that none of
# these packages needs to be installed.
_TRANSPORT = {
    "aiohttp": ("ClientConnectionError", "ClientPayloadError"),
    "http": ("IncompleteRead", "BadStatusLine"),
    "httpx": ("TransportError",),
    "httpx2": ("TransportError",),
    "openai": ("APIConnectionError",),
    "requests": ("ConnectionError", "Timeout", "ChunkedEncodingError"),
    "urllib": ("URLError",),
    "urllib3": ("HTTPError",),
}
_TIME_OUTS = {
    "httpx": ("TimeoutException",),
    "httpx2": ("TimeoutException",),
    "openai": ("APITimeoutError",),
    "requests": ("Timeout",),
    "urllib3": ("TimeoutError",),
}
_WINDOW, _EVERY, _ENOUGH = 1000, 25, 20
"""Latencies that a percentile is computed from, how often it is updated, and how many it needs."""


@dataclass(frozen=True)
class Retry:
    """The tries of one request.

    Attributes:
        tries: maximum number, including the first; a refusal by rate (429, 503, 529) counts only without a deadline.
        timeout_s: time limit of one try; None for no limit.
        deadline_s: time limit from the begin of the first try to the end of the last; None for no limit.
        backoff_s: the wait before the second try is random, up to this; it doubles with each further try.
        max_backoff_s: the longest such wait. A server's Retry-After may be longer, and is obeyed.
        predicate: the user's decision which errors are worth another try; replaces :func:`is_transient`.

    Raises:
        ConfigError: a number out of range.
    """

    tries: int = 4
    timeout_s: float | None = 120.0
    deadline_s: float | None = 600.0
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    predicate: Callable[[BaseException], bool] | None = None

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ConfigError(f"reward.tries={self.tries}; give 1 or more.")
        for name in ("timeout_s", "deadline_s"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ConfigError(f"reward.{name.removesuffix('_s')}={limit}; give seconds above 0, or null.")
        if not 0 <= self.backoff_s <= self.max_backoff_s < math.inf:
            raise ConfigError(
                f"reward.backoff={self.backoff_s:g} and reward.max_backoff={self.max_backoff_s:g}: give seconds, "
                "the second not below the first."
            )

    def again(self, error: BaseException) -> bool:
        """Whether another try may succeed."""
        return bool(self.predicate(error)) if self.predicate is not None else is_transient(error)

    def wait_s(self, tried: int, error: BaseException) -> float:
        """Returns the seconds to wait after ``tried`` tries, the last of which raised ``error``."""
        longest_s = min(self.max_backoff_s, self.backoff_s * 2.0 ** min(tried - 1, 60))
        # Jitter after Retry-After: otherwise all rejected requests would come back at the same moment.
        return retry_after_s(error) + random.uniform(0.0, longest_s)


class Hedge:
    """The time after which a second call is sent for a slow request; ``after`` is as in :func:`parse_hedge`.

    ``after_s`` is None while no call is hedged.
    """

    def __init__(self, after: str | float | None) -> None:
        self._percentile, self.after_s = parse_hedge(after)
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._seen = 0

    def answered(self, seconds: float) -> None:
        """Adds the latency of a successful call, in seconds."""
        if self._percentile is None:
            return
        self._recent.append(seconds)
        self._seen += 1
        if self._seen >= _ENOUGH and (self.after_s is None or self._seen % _EVERY == 0):
            self.after_s = float(np.percentile(self._recent, self._percentile))


def parse_hedge(text: str | float | None) -> tuple[float | None, float | None]:
    """Parses ``hedge_after``; returns a percentile of the latencies so far, and seconds: one of them, or None twice.

    >>> parse_hedge("p95"), parse_hedge(2), parse_hedge(None)
    ((95.0, None), (None, 2.0), (None, None))
    """
    if text is None:
        return None, None
    percentile = isinstance(text, str) and text.startswith("p")
    try:
        number = float(str(text)[1:] if percentile else text)
    except ValueError:
        number = -1.0
    if not 0 < number < (100 if percentile else math.inf):
        raise ConfigError(f"reward.hedge_after={text}; give a percentile such as p95, or seconds above 0.")
    return (number, None) if percentile else (None, number)


def is_transient(error: BaseException) -> bool:
    """Whether an error may be gone at the next try: a time-out, a broken connection, 429, 5xx.

    An error decides itself if it has a bool attribute ``retry``. Otherwise the error it was raised from (``__cause__``)
    is checked too, but not one that was only being handled (``__context__``). An exception group is transient if all
    its errors are.

    >>> is_transient(ConnectionResetError()), is_transient(ValueError())
    (True, False)
    >>> is_transient(ExceptionGroup("", [ConnectionResetError(), ValueError()]))
    False
    """
    for one in causes_of(error):  # clients wrap errors of their transport in their own
        own, status = getattr(one, "retry", None), status_of(one)
        if isinstance(own, bool):
            return own
        if isinstance(one, BaseExceptionGroup):
            return all(map(is_transient, parts_of(one)))
        if status is not None:
            return may_pass(status)
        if isinstance(one, TimeoutError | ConnectionError) or _is_one(one, _TRANSPORT):
            return True
    return False


def _is_one(error: BaseException, names: Mapping[str, Sequence[str]]) -> bool:
    return any(base.__name__ in names.get(base.__module__.partition(".")[0], ()) for base in type(error).__mro__)


def is_timeout(error: BaseException) -> bool:
    """Whether a call timed out, by our clock or the HTTP client's."""
    return all(isinstance(one, TimeoutError) or _is_one(one, _TIME_OUTS) for one in parts_of(error))


def is_overload(error: BaseException) -> bool:
    """Whether the service takes no more load: it rejected the request, or did not answer in time."""
    return is_timeout(error) or is_throttle(error)


def is_throttle(error: BaseException) -> bool:
    """Whether the service rejected a request for its rate or load, with a status such as 429."""
    return any(status_of(one) in THROTTLED for one in parts_of(error))


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status an exception carries, as aiohttp, httpx, openai, requests and Google name it."""
    response = getattr(error, "response", None)
    for place, name in ((error, "status"), (error, "status_code"), (response, "status_code"), (response, "status")):
        value = getattr(place, name, None)
        if isinstance(value, int) and 100 <= value <= 599:
            return int(value)
    code: Any = getattr(error, "code", None)  # many unrelated errors have a code
    known = isinstance(code, int) and 400 <= code <= 599 and not isinstance(error, SystemExit)
    return code if known else None


def retry_after_s(error: BaseException) -> float:
    """Returns the seconds of the server's Retry-After; 0 without one."""
    return max(map(_retry_after_s, parts_of(error)))


def _retry_after_s(error: BaseException) -> float:
    own = getattr(error, "retry_after", None)
    if isinstance(own, int | float):
        return seconds(own)
    for place in (error, getattr(error, "response", None)):
        headers: Any = getattr(place, "headers", None)
        if hasattr(headers, "get"):
            text, date = (headers.get(name) or headers.get(name.lower()) or "" for name in ("Retry-After", "Date"))
            if wait_s := wait_asked(str(text), str(date)):
                return wait_s
    return 0.0


def brief(error: BaseException) -> str:
    """Returns an error in a word or two: ``time-out``, ``HTTP 429``, or its type."""
    if is_timeout(error):
        return "time-out"
    names = [f"HTTP {status_of(one)}" if status_of(one) is not None else type(one).__name__ for one in parts_of(error)]
    return " and ".join(dict.fromkeys(names))
