"""A service in the test's process that speaks SandboxFusion's protocol; programs run in the sandbox of this machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from dataflow.rewards.sandbox.local import LocalSandbox

Answer = Callable[[dict[str, Any]], Awaitable[Any]]


async def run_code(body: dict[str, Any]) -> dict[str, Any]:
    """Runs a request's program, and answers as SandboxFusion does."""
    outcome = await LocalSandbox(body["run_timeout"], body["memory_limit_MB"]).run(body["code"], body["stdin"] or "")
    late, good = outcome.status == "timeout", outcome.status == "finished"
    ran = {
        "status": "TimeLimitExceeded" if late else "Finished",
        "return_code": None if late else int(not good),
        "stdout": outcome.stdout,
        "stderr": outcome.stderr,
        "execution_time": 0.1,
    }
    return {"status": "Success" if good else "Failed", "message": "", "compile_result": None, "run_result": ran}


@contextmanager
def serving(answer: Answer = run_code) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serves in a thread; yields the address and the bodies of the requests.

    Args:
        answer: returns the reply to a body, JSON or a response.
    """
    bodies: list[dict[str, Any]] = []
    loop = asyncio.new_event_loop()
    addresses: list[str] = []
    ready = threading.Event()
    ends = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        reply = await answer(bodies[-1])
        return reply if isinstance(reply, web.StreamResponse) else web.json_response(reply)

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/run_code", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        addresses.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        await ends.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield addresses[0], bodies
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(20)
        loop.close()
