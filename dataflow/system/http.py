"""HTTP as every client of this package speaks it: statuses, Retry-After, the text of an error in one line."""

from __future__ import annotations

import email.utils
import json
import os
import time
from typing import Any

from dataflow.system.secrets import redact

THROTTLED = (429, 503, 529)
"""HTTP statuses by which a server rejects a request for its rate or load."""
_ENDLESS_S = 1e9
_AGAIN = (408, 409, 425, 429)
_QUOTED = 1000  # characters of a server's text that are searched for secrets before it is shortened


def may_pass(status: int) -> bool:
    """Whether a request with this HTTP status may succeed at the next try."""
    return status >= 500 or status in _AGAIN


def wait_asked(retry_after: str, date: str) -> float:
    """Returns the seconds that a server asks to wait; 0 if that cannot be read.

    ``retry_after`` is a number or a date. A date counts from ``date``, the header of the same reply, so that a wrong
    local clock does no harm.

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
    return os.strerror(number) if number > 0 else short(str(error)) or type(error).__name__


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
