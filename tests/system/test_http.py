"""HTTP: the text of an error, whatever its headers say, and why a connection failed."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator

import pytest

from dataflow.system.http import beginning_of_error, message_in, reason


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"error": {"message": "too long", "code": 400}}', "too long"),
        ('{"error": "Unauthorized"}', "Unauthorized"),
        ('{"detail": "Not Found"}', "Not Found"),
        ('{"success": false, "message": "no such file"}', "no such file"),
        ("<html>", "<html>"),
        ("[1]", "[1]"),
    ],
)
def test_the_message_of_an_error(text: str, said: str) -> None:
    assert message_in(text) == said
