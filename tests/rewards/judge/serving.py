"""A judge's server in the test's own event loop, and a call of the judge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from dataflow.rewards.judge.client import JudgeError
from dataflow.rewards.judge.judge import Judge

RIGHT, WRONG = "It is 3 + 4 = 7.\n#### 7", "It is 3 + 4 = 8.\n#### 8"
Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[str]:
    """Yields the address of a server whose answers a function makes."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", reply)
    app.router.add_get("/v1/models", reply)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def answering(reply: Reply | str, **options: Any) -> Any:
    """Returns the columns that a judge makes of a reply, a function's or this text; the error if there is none."""

    async def body() -> Any:
        async with serving(said(reply) if isinstance(reply, str) else reply) as url:
            judge = Judge(url, **options)
            try:
                return await judge.compute_score("d", RIGHT, "7", {"question": "3 + 4?"})
            except JudgeError as error:
                return error
            finally:
                await judge.close()

    return asyncio.run(body())


def said(message: Any, finish: str | None = "stop", **more: Any) -> Reply:
    """Returns what answers with a message, or with one of this content."""
    message = {"role": "assistant", **(message if isinstance(message, dict) else {"content": message})}

    async def reply(_request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": message, "finish_reason": finish}], **more})

    return reply
