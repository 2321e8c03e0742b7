"""Retry: how long a try may take, which errors are worth another one, and how long to wait before it."""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenacity import RetryCallState, Retrying, wait_random_exponential

from dataflow.errors import ConfigError
from dataflow.usercode.failures import attribute_of, causes_of, is_interrupt, parts_of

THROTTLED = (429, 503, 529)
"""HTTP statuses by which a server says that it is asked too much."""
_ENDLESS_S = 1e9
_AGAIN = (408, 409, 425, 429)
# Base classes of what HTTP clients raise when a connection cannot be made, breaks or gives no answer in time; by
# name, so that none of these packages need be there.
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


@dataclass(frozen=True)
class Retry:
    """The tries of one request.

    Attributes:
        tries: at most, the first included.
        timeout_s: of one try; None for no limit.
        deadline_s: from the first try's begin to the end of the last, waits included; None for no limit.
        backoff_s: the wait before the second try is random, up to this; it doubles with each further try.
        max_backoff_s: the longest such wait. A server's Retry-After may be longer, and is obeyed.
        predicate: the user's word on which errors are worth another try, in place of ours.

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
        return self.predicate(error) if self.predicate is not None else is_transient(error)

    def wait_s(self, tried: int, error: BaseException) -> float:
        """Returns the seconds to wait after a number of tries, of which the last ended so."""
        if not self.backoff_s:
            return retry_after_s(error)
        state = RetryCallState(Retrying(), None, (), {})
        state.attempt_number = tried
        backoff = wait_random_exponential(multiplier=self.backoff_s, max=self.max_backoff_s)(state)
        # Behind Retry-After comes the jitter, or all whom the server turned away would be back at the same moment.
        return retry_after_s(error) + backoff


def is_transient(error: BaseException) -> bool:
    """Whether an error may be gone at the next try: a time-out, a broken connection, 429, 5xx.

    An error may say so itself, by a bool attribute ``retry``. One that says nothing counts as the one it was raised
    from (``__cause__``); what was only being handled meanwhile (``__context__``) does not count. An exception group
    may be gone if all that it holds may: the others would be raised again.

    >>> is_transient(ConnectionResetError()), is_transient(ValueError())
    (True, False)
    >>> is_transient(ExceptionGroup("", [ConnectionResetError(), ValueError()]))
    False
    """
    for one in causes_of(error):  # clients wrap what their transport raised in errors of their own
        own, status = attribute_of(one, "retry"), status_of(one)
        if isinstance(own, bool):
            return own
        if isinstance(one, BaseExceptionGroup):
            return all(map(is_transient, parts_of(one)))
        if status is not None:
            return may_pass(status)
        if isinstance(one, TimeoutError | ConnectionError) or _is_one(one, _TRANSPORT):
            return True
    return False


def may_pass(status: int) -> bool:
    """Whether a server that answered so may answer otherwise at the next try."""
    return status >= 500 or status in _AGAIN


def _is_one(error: BaseException, names: Mapping[str, Sequence[str]]) -> bool:
    return any(base.__name__ in names.get(base.__module__.partition(".")[0], ()) for base in type(error).__mro__)


def is_timeout(error: BaseException) -> bool:
    """Whether there was no answer in time, by our clock or by that of the HTTP client."""
    return all(isinstance(one, TimeoutError) or _is_one(one, _TIME_OUTS) for one in parts_of(error))


def is_throttle(error: BaseException) -> bool:
    """Whether it says that the service is asked more than it can or will answer."""
    return is_timeout(error) or is_rejected(error)


def is_rejected(error: BaseException) -> bool:
    """Whether the service answered that it is asked too much, with a status such as 429."""
    return any(status_of(one) in THROTTLED for one in parts_of(error))


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status an exception carries, as aiohttp, httpx, openai, requests and Google name it."""
    response = attribute_of(error, "response")
    for place, name in ((error, "status"), (error, "status_code"), (response, "status_code"), (response, "status")):
        value = attribute_of(place, name)
        if isinstance(value, int) and 100 <= (status := int.__index__(value)) <= 599:  # a subclass compares as it likes
            return status
    code = attribute_of(error, "code")  # many other things have one
    known = isinstance(code, int) and not isinstance(error, SystemExit)
    return status if known and 400 <= (status := int.__index__(code)) <= 599 else None


def retry_after_s(error: BaseException) -> float:
    """Returns how long the server asks to be left alone, in seconds; 0 if it does not."""
    return max(map(_retry_after_s, parts_of(error)))


def _retry_after_s(error: BaseException) -> float:
    own = attribute_of(error, "retry_after")
    if isinstance(own, int | float):
        return _seconds(int.__index__(own) if isinstance(own, int) else float.__float__(own))
    for place in (error, attribute_of(error, "response")):
        headers = attribute_of(place, "headers")
        if attribute_of(headers, "get") is not None and (wait_s := read_retry_after(headers)):
            return wait_s
    return 0.0


def _seconds(number: float) -> float:
    """Returns what can be waited: 0 for what is behind us, and for what is no time at all."""
    return float(number) if 0 < number < _ENDLESS_S else 0.0


def read_retry_after(headers: Mapping[str, Any]) -> float:
    """Returns the seconds of a Retry-After header, a number or a date; 0 where there is none that can be read.

    A date counts from the header ``Date`` of the same reply, so that a clock of ours that is wrong does no harm.

    >>> read_retry_after({"Retry-After": "1.5"})
    1.5
    """
    try:
        text = str(headers.get("Retry-After") or headers.get("retry-after") or "").strip()
    except BaseException as own:  # the headers of an exception of the user's may be anything
        if is_interrupt(own):
            raise
        return 0.0
    try:
        return _seconds(float(text)) if text else 0.0
    except ValueError:
        sent = _unix(str(headers.get("Date") or headers.get("date") or ""))
        until = _unix(text)
        # Both dates are of the server's clock; where it does not send its own, ours has to do.
        return 0.0 if until is None else _seconds(until - (time.time() if sent is None else sent))


def _unix(date: str) -> float | None:
    """Returns the unix time of an HTTP date; None if it cannot be read."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None
