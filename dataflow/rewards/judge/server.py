"""The stand-in for a judge: a server that grades by the GSM8K rule after a random delay, like a slow remote judge.

    python -m dataflow.rewards.judge.server --latency uniform:1:40 --time-scale 0.02 --seed 0 --port 0

prints ``{"url": ...}`` on one line, and ends on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import socket
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dataflow.distribution import Distribution, parse_distribution
from dataflow.errors import ConfigError, DataflowError
from dataflow.rewards.gsm8k import compute_score
from dataflow.rewards.judge.rubric import estimate, read_messages
from dataflow.system.address import family_of, host_port
from dataflow.system.children import command
from dataflow.system.loopback import ADDRESS
from dataflow.system.serving import Child, Port

if TYPE_CHECKING:
    from aiohttp import web

_BACKLOG = 4096  # connections that may wait: an agent opens all at once; net.core.somaxconn may lower it
_START_S = 30.0


def grade(chat: list[dict[str, str]]) -> float:
    """Returns the score of the response in a chat that :func:`dataflow.rewards.judge.rubric.messages` made.

    Raises a ValueError if the chat has another form.
    """
    question, reference, response = read_messages(chat)
    return float(compute_score("openai/gsm8k", response, reference, {"question": question}))


def application(distribution: Distribution, time_scale: float, seed: int) -> web.Application:
    """Returns the server, whose delays in seconds are drawn in order of arrival and multiplied by a factor."""
    from aiohttp import web

    rng = random.Random(seed)

    async def complete(request: web.Request) -> web.Response:
        delay_s = distribution.draw(rng) * time_scale
        try:
            body = json.loads(await request.read())
            score = grade(body["messages"])
        except (DataflowError, ValueError, LookupError, TypeError, AttributeError) as error:
            return web.json_response({"error": {"message": f"{type(error).__name__}: {error}"}}, status=400)
        await asyncio.sleep(delay_s)
        return web.json_response(completion(body, f"Score: {score:g}", f"judge-{rng.getrandbits(48):x}"))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    return app


def completion(body: Mapping[str, Any], content: str, name: str) -> dict[str, Any]:
    """Returns the reply to a request; its usage is estimated from the lengths of the texts."""
    prompt, reply = estimate(sum(len(turn["content"]) for turn in body["messages"])), estimate(len(content))
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model", "judge"),
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply},
    }


def serve(app: web.Application, host: str, port: int, **options: Any) -> None:
    """Serves until SIGTERM or SIGINT, and answers ``GET /health``; with port 0 it takes a free one and prints it.

    ``options`` are of aiohttp's ``run_app``.
    """
    import uvloop
    from aiohttp import web

    async def well(_request: web.Request) -> web.Response:
        return web.Response()

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # usually 1,024, fewer than an agent's connections
    bound = socket.create_server((host, port), family=family_of(host), backlog=_BACKLOG)
    if not port:
        print(json.dumps({"url": f"http://{host_port(*bound.getsockname()[:2])}"}), flush=True)
    app.router.add_get("/health", well)
    # Requests whose delay is not over get no reply: the run that sent them has ended.
    web.run_app(
        app, sock=bound, backlog=_BACKLOG, loop=uvloop.new_event_loop(), access_log=None, print=None,
        shutdown_timeout=0.1, keepalive_timeout=3600.0, **options,
    )  # fmt: skip


def start_judge(latency: str, time_scale: float = 1.0, seed: int = 0, address: str = ADDRESS) -> Child:
    """Returns a judge on a free port of this machine, which runs within the context of what is returned."""
    options = ["--latency", str(latency), "--time-scale", repr(float(time_scale)), "--seed", str(seed)]
    words = command("dataflow.rewards.judge.server", *options)
    return Child(words, Port(address), None, None, _START_S, "the judge server")


def main(arguments: list[str] | None = None) -> int:
    """Runs the server from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dataflow.rewards.judge.server", description=__doc__.split("\n")[0])
    parser.add_argument("--latency", default="uniform:1:40", help="in seconds")
    parser.add_argument("--time-scale", type=float, default=1.0, help="multiplies every delay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host", default=ADDRESS)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    given = parser.parse_args(arguments)
    try:
        distribution = parse_distribution(given.latency, "--latency")
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    serve(application(distribution, given.time_scale, given.seed), given.host, given.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
