"""HTTP as every client of this package speaks it: statuses, Retry-After, the text of an error in one line."""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dataflow.system.secrets import redact

THROTTLED = (429, 503, 529)
"""HTTP statuses by which a server rejects a request for its rate or load."""
_ENDLESS_S = 1e9
_AGAIN = (408, 409, 425, 429)
ERROR_BYTES = 64 * 1024
"""Bytes read of the text of an error."""
ERROR_S = 0.3
"""Seconds for reading the text of an error: the status matters more and must not be lost to the call's time-out."""

_QUOTED = 1000  # characters of a server's text that are searched for secrets before it is shortened
_RATE = re.compile(r"rate.?limit|too.?many|throttl|exhausted|quota", re.IGNORECASE)
"""What providers write in place of status 429."""


def may_pass(status: int) -> bool:
    """Whether a request with this HTTP status may succeed at the next try."""
    return status >= 500 or status in _AGAIN


def wait_asked(retry_after: str, date: str) -> float:
    """Returns the seconds that a server asks to wait; 0 if that cannot be read.

    Args:
        retry_after: the header of that name, a number or a date.
        date: the header ``Date`` of the same reply, from which a date counts, so that a wrong local clock does no harm.

    >>> wait_asked("1.5", ""), wait_asked("-1", ""), wait_asked("soon", "")
    (1.5, 0.0, 0.0)
    """
    text = retry_after.strip()
    try:
        return seconds(float(text)) if text else 0.0
    except ValueError:
        sent, until = _unix(date), _unix(text)
        # Both dates come from the server's clock; without Date, the local clock is used.
        return 0.0 if until is None else seconds(until - (time.time() if sent is None else sent))


def seconds(number: float) -> float:
    """Returns seconds to wait: 0 for a time in the past, or one that is not finite."""
    return float(number) if 0 < number < _ENDLESS_S else 0.0


def _unix(date: str) -> float | None:
    """Returns the unix time of an HTTP date; None if it cannot be read."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


def reason(error: BaseException) -> str:
    """Returns why a connection failed, in a few words."""
    number = getattr(error, "errno", None) or 0
    if number > 0:
        return os.strerror(number)
    # An address that no name server knows has a negative number and a reason of its own.
    told = getattr(error, "strerror", None) if number < 0 else None
    return short(told or str(error)) or type(error).__name__


def short(text: str) -> str:
    """Returns a text on one line of at most 200 characters, secrets masked and unprintable characters escaped."""
    line = redact(" ".join(text.split())[:_QUOTED])
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in line)
    return line if len(line) <= 200 else line[:197] + "..."


def message_in(text: str) -> str:
    """Returns the message in the JSON of an error, as vLLM, SGLang and FastAPI write it, or the text if it has none."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return found if isinstance(found, str) else text


@dataclass(frozen=True)
class ErrorWithin:
    """An error in a body of status 200; ``status`` is the one it stands for, None if unknown."""

    status: int | None
    message: str
    wait_s: float


def error_within(answer: Any, headers: Mapping[str, Any]) -> ErrorWithin | None:
    """Returns the error that stands in a body of status 200, as proxies and providers of several models send it.

    Args:
        answer: the JSON; its ``error``, or that of its first choice, or all of a body that calls itself an error.
        headers: of the reply.

    >>> error_within({"error": {"code": "rate_limit_exceeded", "message": "later"}}, {"Retry-After": "7"})
    ErrorWithin(status=429, message='later', wait_s=7.0)
    """
    body = answer[0] if isinstance(answer, list) and answer else answer
    if not isinstance(body, Mapping):
        return None
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
    found = body.get("error") or first.get("error") or (body if body.get("object") == "error" else None)
    if not found:
        return None
    message, error = message_in(json.dumps({"error": found})), found if isinstance(found, Mapping) else {}
    codes = [str(error.get(name, "")) for name in ("code", "status", "status_code", "type")]
    status = next((int(code) for code in codes if re.fullmatch(r"[45]\d\d", code)), None)
    if status is None and _RATE.search(" ".join([*codes, message])):
        status = 429
    return ErrorWithin(status, message, wait_asked(str(headers.get("Retry-After", "")), str(headers.get("Date", ""))))


async def beginning_of_error(pieces: AsyncIterator[bytes], timeout: float | None = None) -> str:
    """Returns the text of an error, as much of it as arrives within :data:`ERROR_S`.

    Args:
        pieces: the body, which may be slow or endless, or break off.
        timeout: of the whole exchange, in seconds.
    """
    got = bytearray()
    with suppress(Exception):  # the status and the text so far are what counts
        async with asyncio.timeout(min(ERROR_S, (timeout or ERROR_S) / 2)):
            async for piece in pieces:
                got += piece
                if len(got) >= ERROR_BYTES:
                    break
    return got[:ERROR_BYTES].decode(errors="replace")
