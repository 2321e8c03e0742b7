"""A judge that misbehaves on command, in a process of its own, and the client that commands it.

    python tests/faults/rig/server.py --port 0

prints ``{"url": ...}``, grades as :mod:`dataflow.rewards.judge.server` does, and ends with SIGTERM. What it does
wrong is switched by ``POST /behave``; ``GET /seen`` says what came.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import urllib.request
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.rewards.judge.server import completion, grade, serve
from dataflow.system.loopback import ADDRESS
from dataflow.system.serving import Child, Port

if TYPE_CHECKING:
    from aiohttp import web

WAIT_S = 30.0
"""Seconds in which the server must answer its commander."""

MODES = {
    "ok": "a score",
    "none": "empty content",
    "half_json": "the first half of the JSON",
    "reset": "the first half of the body, then a reset of the connection",
    "status": "status:CODE[:RETRY_AFTER], an error of that status",
    "hang": "no answer, ever",
    "echo": "echo:HOW, sends the request's Authorization back: a STATUS, score, prose, no_json, header or mixed",
}


class Behaviour:
    """The server's side: what it has seen and how it behaves."""

    def __init__(self) -> None:
        self.mode, self.count, self.every, self.after = "ok", 0, 1, 0
        self._since = 0
        self._came: Counter[str] = Counter()
        self._bodies: Counter[bytes] = Counter()
        self._now = 0
        self._news = asyncio.Condition()

    def next_mode(self) -> str:
        """Returns what to do with the request that has just come."""
        self._since += 1
        if self.mode == "ok" or self._since <= self.after or (self._since - self.after) % self.every:
            return "ok"
        mode = self.mode
        if self.count:
            self.count -= 1
            if not self.count:
                self.mode = "ok"
        return mode

    async def behave(self, request: web.Request) -> web.Response:
        """POST /behave."""
        from aiohttp import web

        wanted = await request.json()
        self.mode, self.count, self.every, self.after = (wanted[name] for name in ("mode", "count", "every", "after"))
        self._since = 0
        return web.json_response({})

    async def seen(self, request: web.Request) -> web.Response:
        """GET /seen: answers once as many requests came as ``?requests=`` asks for."""
        from aiohttp import web

        wanted = int(request.query.get("requests", "0"))
        async with self._news:
            await self._news.wait_for(lambda: self._came.total() >= wanted)
        return web.json_response(
            {
                "requests": self._came.total(),
                "modes": self._came,
                "in_flight": self._now,
                "distinct": len(self._bodies),
                "most_alike": max(self._bodies.values(), default=0),
            }
        )

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        raw = await request.read()
        mode = self.next_mode()
        kind, _, rest = mode.partition(":")
        self._bodies[hashlib.blake2b(raw, digest_size=16).digest()] += 1
        self._now += 1
        async with self._news:
            self._came[mode] += 1
            self._news.notify_all()
        try:
            return await ANSWERS[kind](request, json.loads(raw), rest)
        finally:
            self._now -= 1


async def _ok(request: web.Request, body: dict[str, Any], _rest: str) -> web.StreamResponse:
    from aiohttp import web

    return web.json_response(completion(body, _score(body), "fault"))


async def _none(request: web.Request, body: dict[str, Any], _rest: str) -> web.StreamResponse:
    from aiohttp import web

    return web.json_response(completion(body, "", "fault"))


def _score(body: dict[str, Any]) -> str:
    try:
        return f"Score: {grade(body['messages']):g}"
    except ValueError:  # asked by another template than the judge's own
        return "Score: 1"


async def _half_json(request: web.Request, body: dict[str, Any], _rest: str) -> web.StreamResponse:
    from aiohttp import web

    text = json.dumps(completion(body, _score(body), "fault"))
    return web.Response(text=text[: len(text) // 2], content_type="application/json")


async def _reset(request: web.Request, body: dict[str, Any], _rest: str) -> web.StreamResponse:
    from aiohttp import web

    text = json.dumps(completion(body, _score(body), "fault")).encode()
    reply = web.StreamResponse(headers={"Content-Length": str(len(text))})
    await reply.prepare(request)
    await reply.write(text[: len(text) // 2])
    # The client must have what was sent before the reset: with it the kernel drops what is still on its way.
    await asyncio.sleep(0.05)
    transport = request.transport
    assert transport is not None
    linger = struct.pack("ii", 1, 0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()
    return reply


async def _status(request: web.Request, body: dict[str, Any], what: str) -> web.StreamResponse:
    from aiohttp import web

    code, _, after = what.partition(":")
    headers = {"Retry-After": after} if after else None
    return web.json_response({"error": {"message": "misbehaves on command"}}, status=int(code), headers=headers)


async def _hang(request: web.Request, body: dict[str, Any], _rest: str) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets the event")


async def _echo(request: web.Request, body: dict[str, Any], how: str) -> web.StreamResponse:
    """Tells the client its own key."""
    from aiohttp import web

    if how == "mixed":  # of the same request always the same
        how = "500" if zlib.crc32(json.dumps(body["messages"]).encode()) % 3 == 0 else "score"
    sent = request.headers.get("Authorization", "")
    key = sent.rpartition(" ")[2]
    text = f"you sent {sent}, {key}, {sent.encode()!r} and {json.dumps(dict(request.headers))}"
    headers = {"X-Your-Key": key, "Set-Cookie": f"key={key}", "WWW-Authenticate": f'Bearer error="{key}"'}
    if how == "header":  # a line that is none, with which the client's own error is about the key
        reply = web.StreamResponse()
        assert request.transport is not None
        request.transport.write(f"HTTP/1.1 200 OK\r\n{sent} \x01 {key}\r\n\r\n".encode())
        request.transport.close()
        return reply
    if how == "no_json":
        return web.Response(text=f'{{"key": "{key}", {text}', headers=headers)
    if how in ("score", "prose"):
        said = f"{text}\n{_score(body) if how == 'score' else 'no score'}"
        return web.json_response(completion(body, said, "fault"), headers=headers)
    headers["Location"] = f"http://elsewhere.invalid/?api_key={key}"
    return web.json_response({"error": {"message": text}}, status=int(how), headers=headers)


ANSWERS: dict[str, Callable[[web.Request, dict[str, Any], str], Awaitable[web.StreamResponse]]] = {
    "ok": _ok,
    "none": _none,
    "half_json": _half_json,
    "reset": _reset,
    "status": _status,
    "hang": _hang,
    "echo": _echo,
}


def main(host: str, port: int) -> None:
    """Serves until SIGTERM."""
    from aiohttp import web

    judge = Behaviour()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", judge.complete)
    app.router.add_post("/behave", judge.behave)
    app.router.add_get("/seen", judge.seen)
    # Who hangs up is no longer in flight.
    serve(app, host, port, handler_cancellation=True)


class FaultServer:
    """The commander's side; a context manager. Its calls block: on an event loop use ``asyncio.to_thread``.

    Attributes:
        url: where it listens, the same after a restart.
    """

    def __init__(self) -> None:
        words = [sys.executable, str(Path(__file__).resolve())]
        self._process = Child(words, Port(), None, None, WAIT_S, "the server").__enter__()
        self.url = self._process.url

    def behave(self, mode: str = "ok", *, count: int = 0, every: int = 1, after: int = 0) -> None:
        """Sets the mode for requests that arrive from now on.

        Args:
            mode: see :data:`MODES`.
            count: of requests to misbehave to, after which it behaves again; 0 for all.
            every: misbehaves to each so manieth request only.
            after: so many requests it still behaves to.
        """
        self._call("/behave", {"mode": mode, "count": count, "every": every, "after": after})

    def seen(self, requests: int = 0) -> dict[str, Any]:
        """Returns the requests since the start of the server; closed connections are not in flight any more.

        Args:
            requests: waits until so many have come.

        Returns:
            ``requests``; ``modes``, how many were met with each mode; ``in_flight`` now; ``distinct``, how many had
            different bodies; ``most_alike``, how often the most frequent came.
        """
        return self._call(f"/seen?requests={requests}")

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(self.url + path, data, timeout=WAIT_S) as reply:
            answer: dict[str, Any] = json.loads(reply.read())
        return answer

    def kill(self) -> None:
        """Ends it at once, as a machine that goes down; requests in flight lose their connection."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stop()

    def restart(self) -> None:
        """Starts it again on the same port; it behaves, and has seen nothing."""
        self.kill()
        self._process.start()
        self._process.wait_ready()

    def __enter__(self) -> FaultServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--host", default=ADDRESS)
    given = parser.parse_args()
    main(given.host, given.port)
