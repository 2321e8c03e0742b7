"""HTTP as every client of this package speaks it: statuses, Retry-After, the text of an error in one line."""

from __future__ import annotations

import asyncio
import email.utils
import os
import time
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from dataflow.system.secrets.redaction import redact

THROTTLED = (429, 503, 529)
"""HTTP statuses by which a server rejects a request for its rate or load."""
_ENDLESS_S = 1e9
_AGAIN = (408, 409, 425, 429)
ERROR_BYTES = 64 * 1024
"""Bytes read of the text of an error."""
ERROR_S = 0.3
"""Seconds for reading the text of an error: the status matters more and must not be lost to the call's time-out."""

_QUOTED = 1000  # characters of a server's text that are searched for secrets before it is shortened
PACKED = ("gzip", "x-gzip", "deflate")


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


def encoding_of(headers: Mapping[str, Any] | None) -> str:
    return str((headers or {}).get("Content-Encoding", "")).strip().lower()


def unpacked(raw: bytes, encoding: str, most: int) -> bytes:
    """Returns the first ``most`` bytes, decompressed, or the bytes as they are if they are not compressed."""
    if encoding not in PACKED:
        return raw
    for window in (zlib.MAX_WBITS | 32, -zlib.MAX_WBITS):  # with a header of either kind, or without
        with suppress(zlib.error):
            return zlib.decompressobj(window).decompress(raw, most)
    return raw


async def beginning_of_error(
    pieces: AsyncIterator[bytes], headers: Mapping[str, Any], timeout: float | None = None
) -> str:
    """Returns the text of an error, as much of it as arrives within :data:`ERROR_S`.

    Args:
        pieces: the body, which may be slow or endless, or break off.
        headers: of the reply.
        timeout: of the whole exchange, in seconds.
    """
    got = bytearray()
    with suppress(Exception):  # the status and the text so far are what counts
        async with asyncio.timeout(min(ERROR_S, (timeout or ERROR_S) / 2)):
            async for piece in pieces:
                got += piece
                if len(got) >= ERROR_BYTES:
                    break
    return _text(unpacked(bytes(got[:ERROR_BYTES]), encoding_of(headers), ERROR_BYTES), headers)


def _text(raw: bytes, headers: Mapping[str, Any]) -> str:
    """Decodes a text by the character set in its header, else as UTF-8."""
    _, _, charset = str(headers.get("Content-Type", "")).lower().partition("charset=")
    with suppress(LookupError, ValueError):  # unknown, or one that cannot replace what it cannot read
        return raw.decode(charset.partition(";")[0].strip(" \"'") or "utf-8", errors="replace")
    return raw.decode(errors="replace")
