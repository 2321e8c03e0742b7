"""Reads replies of a chat server: at most a given number of bytes is held, whatever the server sends."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from dataflow.rewards.judge.errors import JudgeError, overlong, short

ERROR_BYTES = 64 * 1024
"""Bytes read of the text of an error."""
ERROR_S = 0.3
"""Seconds for reading the text of an error: the status matters more and must not be lost to the call's time-out."""

_LET_THROUGH = ("", "identity")
_PACKED = ("gzip", "x-gzip", "deflate")


async def whole(
    url: str, pieces: AsyncIterator[bytes], max_bytes: int, headers: Mapping[str, Any] | None = None
) -> bytes:
    """Returns a reply, decompressed.

    Args:
        url: of the request, for messages.
        pieces: the body.
        max_bytes: of the decompressed reply.
        headers: of the reply.

    Raises:
        JudgeError: the reply is longer than ``max_bytes`` or has an unsupported encoding.
    """
    got = bytearray()
    async for piece in pieces:
        got += piece
        if len(got) > max_bytes:
            raise overlong(url, max_bytes)
    encoding = _encoding(headers)
    if encoding not in (*_LET_THROUGH, *_PACKED):
        fix = "configure the server, or the proxy before it, to send replies without encoding, as they are requested"
        sent = short(str((headers or {}).get("Content-Encoding", "")))  # masking needs the original case
        raise JudgeError(f"{url} sent its reply in the encoding '{sent}', which was not requested", fix=fix)
    text = _unpacked(bytes(got), encoding, max_bytes + 1)
    if len(text) > max_bytes:
        raise overlong(url, max_bytes)
    return text


def _encoding(headers: Mapping[str, Any] | None) -> str:
    return str((headers or {}).get("Content-Encoding", "")).strip().lower()


def _unpacked(raw: bytes, encoding: str, most: int) -> bytes:
    """Returns the first ``most`` bytes, decompressed, or the bytes as they are if they are not compressed."""
    if encoding not in _PACKED:
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
    return _text(_unpacked(bytes(got[:ERROR_BYTES]), _encoding(headers), ERROR_BYTES), headers)


def _text(raw: bytes, headers: Mapping[str, Any]) -> str:
    """Decodes a text by the character set in its header, else as UTF-8."""
    _, _, charset = str(headers.get("Content-Type", "")).lower().partition("charset=")
    with suppress(LookupError):
        return raw.decode(charset.partition(";")[0].strip(" \"'") or "utf-8", errors="replace")
    return raw.decode(errors="replace")
