"""A stand-in for the server of a reward model, in a process of its own: it speaks the protocol and computes no model.

    python -P tests/rigs/model_server.py --port N [--host ADDRESS] [--fails TEXT] [--stubborn] [--never]

The score of an input is its length / 100, of a chat that of its last message.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from aiohttp import web

from dataflow.rewards.judge.server import completion, serve
from dataflow.system.address import family_of
from dataflow.system.loopback import ADDRESS


def fake_command(port: int, *more: str) -> list[str]:
    """Returns the command line of a stand-in."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), "--port", str(port), *more]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default=ADDRESS)
    parser.add_argument("--fails", help="the error that ends its start")
    parser.add_argument("--once", help="a file; fails only if it exists")
    parser.add_argument("--stubborn", action="store_true", help="ignores SIGTERM, and has a child that does")
    parser.add_argument("--never", action="store_true", help="answers no health check")
    given = parser.parse_args()
    if given.fails and (given.once is None or os.path.exists(given.once)):
        print("loading the model", flush=True)
        print(
            f"ValueError: {given.fails}\nEngineError: Engine core initialization failed.", file=sys.stderr, flush=True
        )
        return 1
    app = web.Application()
    app.router.add_get("/health", _hang if given.never else _health)
    app.router.add_post("/classify", _classify)
    app.router.add_post("/pooling", _pool)
    app.router.add_post("/v1/chat/completions", _chat)
    if given.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    bound = socket.socket(family_of(given.host))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((given.host, given.port))
    serve(app, bound)
    if given.stubborn:
        signal.pause()
    return 0


async def _hang(_request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def _health(_request: web.Request) -> web.Response:
    return web.Response()


async def _classify(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"index": 0, "probs": [await _score(request)], "num_classes": 1}]})


async def _pool(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"index": 0, "data": [await _score(request)]}]})


async def _chat(request: web.Request) -> web.Response:
    body = json.loads(await request.read())
    return web.json_response(completion(body, f"Score: {len(body['messages'][-1]['content']) / 100:g}", "fake"))


async def _score(request: web.Request) -> float:
    body = json.loads(await request.read())
    if "messages" in body:
        return len(body["messages"][-1]["content"]) / 100
    found = body["input"]
    return len(found[0] if isinstance(found[0], list | str) else found) / 100


if __name__ == "__main__":
    sys.exit(main())
