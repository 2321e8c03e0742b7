"""The misbehaving judge misbehaves as commanded, so that the tests that use it are valid."""

from __future__ import annotations

import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from dataflow.rewards.judge.rubric import messages
from tests.faults.rig.server import FaultServer

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(90)]


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as running:
        yield running


def post(server: FaultServer, chat: Any = None) -> str:
    """Returns the content of the answer, or the status of an error."""
    body = {"messages": chat or messages("3 + 4?", "7", "#### 7")}
    url = f"{server.url}/v1/chat/completions"
    try:
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=30) as reply:
            return str(json.loads(reply.read())["choices"][0]["message"]["content"])
    except urllib.error.HTTPError as error:
        return str(error.code)


def test_it_grades(server: FaultServer) -> None:
    right, wrong = (messages("3 + 4?", "7", text) for text in ("#### 7", "#### 8"))
    assert [post(server, chat) for chat in (right, wrong, [{"role": "user", "content": "hi"}])] == [
        "Score: 1",
        "Score: 0",
        "Score: 1",
    ]


def test_it_misbehaves_to_the_next_requests_only(server: FaultServer) -> None:
    server.behave("status:500", count=2)
    assert [post(server) for _ in range(4)] == ["500", "500", "Score: 1", "Score: 1"]


def test_it_misbehaves_to_each_so_manieth_request(server: FaultServer) -> None:
    server.behave("none", every=3)
    assert [post(server) for _ in range(7)] == ["Score: 1", "Score: 1", "", "Score: 1", "Score: 1", "", "Score: 1"]
    server.behave("status:429:1", every=2, count=1)
    assert [post(server) for _ in range(4)] == ["Score: 1", "429", "Score: 1", "Score: 1"]


def test_the_error_names_what_was_returned(server: FaultServer) -> None:
    server.behave("nan", count=1)
    said = [post(server), post(server), post(server, [{"role": "user", "content": "hi"}])]
    assert said == ["Score: nan", "Score: 1", "Score: 1"]
    assert server.seen(requests=3) == {
        "requests": 3,
        "modes": {"nan": 1, "ok": 2},
        "in_flight": 0,
        "peak": 1,
        "distinct": 2,
        "most_alike": 2,
    }


def test_a_reset_is_one(server: FaultServer) -> None:
    server.behave("reset")
    body = json.dumps({"messages": messages("3 + 4?", "7", "#### 7")}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30) as line:
        line.sendall(head.encode() + body)
        line.settimeout(30)
        pieces: list[bytes] = []
        with pytest.raises(ConnectionResetError):
            pieces.extend(iter(partial(line.recv, 4096), b""))
    got = b"".join(pieces)
    assert b"200 OK" in got
    assert b'"choices"' in got
    assert b'"usage"' not in got


def test_a_mode_that_there_is_not(server: FaultServer) -> None:
    with pytest.raises(urllib.error.HTTPError):
        server.behave("naughty")


def test_it_is_killed_and_restarted_on_its_port(server: FaultServer) -> None:
    server.behave("none")
    assert post(server) == ""
    url, pid = server.url, server.pid
    server.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(urllib.error.URLError):
        post(server)
    server.restart()
    assert server.url == url
    assert post(server) == "Score: 1"
    assert server.seen()["requests"] == 1
    server.close()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
