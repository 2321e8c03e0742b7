"""A judge server that grades by the GSM8K rule after a random delay, like a slow remote judge.

    python -m dataflow.rewards.judge.server --latency uniform:1:40 --time-scale 0.02 --seed 0 --port 0

prints ``{"url": ...}`` on one line when it is ready. It ends on SIGTERM and at the end of its standard input, so
that it never outlives the process that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dataflow.distribution import parse_distribution
from dataflow.errors import ConfigError, DataflowError, RunError
from dataflow.rewards.gsm8k import compute_score
from dataflow.rewards.judge.rubric import estimate, read_messages
from dataflow.system.address import host_port, listening
from dataflow.system.children import command
from dataflow.system.loopback import ADDRESS

if TYPE_CHECKING:
    from aiohttp import web

    from dataflow.distribution import Distribution

BACKLOG = 4096  # connections that may wait: an agent opens all at once; net.core.somaxconn may lower it
_FILES = 1 << 16


def grade(chat: list[dict[str, str]]) -> float:
    """Returns the score of the response in a chat that :func:`dataflow.rewards.judge.rubric.messages` made.

    Raises:
        ValueError: the chat has another form.
    """
    question, reference, response, method = read_messages(chat)
    score = compute_score("openai/gsm8k", response, reference, {"question": question}, method=method)
    return float(score)


def application(distribution: Distribution, time_scale: float, seed: int) -> web.Application:
    """Returns the server: POST /v1/chat/completions.

    Args:
        distribution: of the delays, in seconds.
        time_scale: factor on the delays.
        seed: of the delays, which are drawn in order of arrival.
    """
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
    prompt = estimate(sum(len(turn["content"]) for turn in body["messages"]))
    reply = estimate(len(content))
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model", "judge"),
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply},
    }


def serve(app: web.Application, bound: socket.socket, **options: Any) -> None:
    """Serves until SIGTERM, SIGINT or the end of standard input; prints its address first.

    Args:
        app: the application.
        bound: the socket.
        options: of aiohttp's ``run_app``.
    """
    import resource

    import uvloop
    from aiohttp import web

    bound.listen(BACKLOG)
    url = f"http://{host_port(*bound.getsockname()[:2])}"

    async def announce(_app: web.Application) -> None:
        print(json.dumps({"url": url}), flush=True)
        threading.Thread(target=watch, daemon=True).start()  # now that SIGTERM is handled

    def watch() -> None:
        # Not sys.stdin: a thread that holds its buffer's lock aborts the interpreter at exit.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    # The soft limit of open files is usually 1,024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    app.on_startup.append(announce)
    # Requests whose delay is not over get no reply: the run that sent them has ended.
    options = {"access_log": None, "print": None, "shutdown_timeout": 0.1, "keepalive_timeout": 3600.0, **options}
    web.run_app(app, sock=bound, backlog=BACKLOG, loop=uvloop.new_event_loop(), **options)


class JudgeProcess:
    """A process that calls :func:`serve`; a context manager. It ends with this process, however that ends.

    Args:
        arguments: its command line.
        deadline_s: seconds for its start.
        inherits: descriptors that stay open in it.
        what: it is, for messages.

    Attributes:
        url: of the server.

    Raises:
        RunError: it did not start in time.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        deadline_s: float = 30.0,
        inherits: Sequence[int] = (),
        what: str = "the judge server",
    ) -> None:
        # In a session of its own, so that Ctrl-C reaches only the run, which ends the judge after its last request.
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, pass_fds=inherits
        )
        assert self._process.stdout is not None
        late = threading.Timer(deadline_s, self._process.kill)
        try:
            late.start()
            line = self._process.stdout.readline()
            if not line:
                raise RunError(f"{what} did not start within {deadline_s:g} s; its own error is above.")
            self.url = str(json.loads(line)["url"])
        except BaseException:
            self.close()
            raise
        finally:
            late.cancel()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Waits until the server has ended."""
        self._process.wait()

    def close(self) -> None:
        """Ends the server and waits for it; may be called twice."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """Ends the server with SIGKILL and waits for it."""
        self._process.kill()
        self.close()

    def __enter__(self) -> JudgeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_judge(latency: str, time_scale: float = 1.0, seed: int = 0, address: str = ADDRESS) -> JudgeProcess:
    """Starts a judge server on a free port of this machine.

    Args:
        latency: a distribution, see :func:`~dataflow.distribution.parse_distribution`, in seconds.
        time_scale: factor on its delays.
        seed: of the delays.
        address: where it listens.

    Raises:
        RunError: it did not start in time.
    """
    options = ["--latency", str(latency), "--time-scale", repr(float(time_scale)), "--seed", str(seed)]
    return JudgeProcess(command("dataflow.rewards.judge.server", *options, "--host", address))


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
    serve(application(distribution, given.time_scale, given.seed), listening(given.host, given.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
