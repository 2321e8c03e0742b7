"""Reads replies of a chat server: at most a given number of bytes is held, whatever the server sends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from dataflow.rewards.judge.errors import JudgeError, overlong
from dataflow.system.http import PACKED, encoding_of, short, unpacked

_LET_THROUGH = ("", "identity")


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
    encoding = encoding_of(headers)
    if encoding not in (*_LET_THROUGH, *PACKED):
        fix = "configure the server, or the proxy before it, to send replies without encoding, as they are requested"
        sent = short(str((headers or {}).get("Content-Encoding", "")))  # masking needs the original case
        raise JudgeError(f"{url} sent its reply in the encoding '{sent}', which was not requested", fix=fix)
    text = unpacked(bytes(got), encoding, max_bytes + 1)
    if len(text) > max_bytes:
        raise overlong(url, max_bytes)
    return text
