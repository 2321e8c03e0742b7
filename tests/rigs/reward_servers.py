"""A reward model's server in the test's process: it speaks vLLM's protocol; it dies, hangs and fails on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

ADDRESS = "127.0.0.1"


@dataclass(eq=False)
class FakeServer:
    """A server; its score is the number of its input's tokens or, of messages, of their letters.

    Attributes:
        bodies: of the requests that arrived, by path.
        status: answered in place of a score, unless it is 200.
    """

    score: Callable[[dict[str, Any]], float] = lambda body: float(len(body.get("input", [""])[0]))
    status: int = 200
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    port: int = 0
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}"

    async def start(self) -> None:
        """Listens, after a stop at the same port as before."""
        self.answering.set()
        app = web.Application()
        for path in ("/classify", "/pooling", "/v1/chat/completions"):
            app.router.add_post(path, self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, ADDRESS, self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Breaks all connections and refuses further ones, as a killed process does."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            for connection in list(runner.server.connections if runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    def hang(self) -> None:
        """Answers nothing any more."""
        self.answering.clear()

    async def until(self, requests: int) -> None:
        """Waits until so many requests have arrived."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.bodies) >= requests)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        async with self.arrived:
            self.bodies.append((request.path, body))
            self.arrived.notify_all()
        await self.answering.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "out of order"}}, status=self.status)
        if request.path == "/classify":
            return web.json_response({"data": [{"probs": [self.score(body)]}], "usage": {"total_tokens": 7}})
        if request.path == "/pooling":
            return web.json_response({"data": [{"data": [self.score(body)]}], "usage": {"total_tokens": 7}})
        message = {"message": {"content": f"Score: {self.score(body):g}"}}
        return web.json_response({"choices": [message], "usage": {"prompt_tokens": 3, "total_tokens": 5}})


@asynccontextmanager
async def reward_server(**options: Any) -> AsyncIterator[FakeServer]:
    """Runs a server with these options."""
    server = FakeServer(**options)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()
