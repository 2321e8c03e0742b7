"""HTTP: the text of an error, whatever its headers say, and why a connection failed."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator

import pytest

from dataflow.system.http import beginning_of_error, reason


async def _pieces() -> AsyncIterator[bytes]:
    yield "r\u00e9fused".encode()


@pytest.mark.parametrize("charset", ["undefined", "idna", "no-such", "punycode", "hex", "a\0b", ""])
def test_an_odd_character_set_does_not_hide_the_error(charset: str) -> None:
    text = asyncio.run(beginning_of_error(_pieces(), {"Content-Type": f"text/plain; charset={charset}"}))
    assert "fused" in text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "connect() failed"), os.strerror(errno.ECONNREFUSED)),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (OSError("the pipe broke"), "the pipe broke"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_why_a_connection_failed_is_a_few_words(error: OSError, words: str) -> None:
    assert reason(error) == words
