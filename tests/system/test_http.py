"""HTTP: the text of an error, and why a connection failed."""

from __future__ import annotations

import email.utils
import errno
import os
import socket

import pytest

from dataflow.system.http import message_in, reason, wait_asked


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "connect() failed"), os.strerror(errno.ECONNREFUSED)),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "[Errno -2] Name or service not known"),
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


def test_a_date_in_retry_after_counts_from_the_servers_clock() -> None:
    date, later = (email.utils.formatdate(at, usegmt=True) for at in (1e9, 1e9 + 60))
    assert wait_asked(later, date) == 60
    assert wait_asked(date, later) == 0
