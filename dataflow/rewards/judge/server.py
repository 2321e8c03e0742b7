"""A judge server on loopback that grades by the GSM8K rule after a random delay, like a slow remote judge.

    python -m dataflow.rewards.judge.server --latency uniform:1:40 --time-scale 0.02 --seed 0 --port 0

prints ``{"port": N, ...}`` on one line when it is ready. It ends on SIGTERM and at the end of its standard input, so
that it never outlives the process that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dataflow.distribution import parse_distribution
from dataflow.errors import ConfigError, DataflowError, RunError
from dataflow.rewards.judge.budget import estimate
from dataflow.rewards.judge.prompt import read_messages
from dataflow.rewards.user.gsm8k import compute_score
from dataflow.system.address import host_and_port, host_port
from dataflow.system.children import command
from dataflow.system.health import answers, hangs
from dataflow.system.loopback import ADDRESS

if TYPE_CHECKING:
    from aiohttp import web

    from dataflow.distribution import Distribution

BACKLOG = 4096  # connections that may wait to be accepted; net.core.somaxconn may lower it
_FILES = 1 << 16


def grade(chat: list[dict[str, str]]) -> float:
    """Returns the score of the response in a chat that :func:`dataflow.rewards.judge.prompt.messages` made.

    Raises:
        ValueError: the chat has another form.
    """
    question, reference, response, method = read_messages(chat)
    score = compute_score("openai/gsm8k", response, reference, {"question": question}, method=method)
    return float(score)


def application(distribution: Distribution, time_scale: float, seed: int) -> web.Application:
    """Returns the server: POST /v1/chat/completions, GET /health.

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

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/health", health)
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


async def serve(app: web.Application, port: int, *, listener: int | None = None, **options: Any) -> None:
    """Serves until SIGTERM, SIGINT or the end of standard input; prints its address first.

    Args:
        app: the application.
        port: of the loopback interface; 0 takes a free one.
        listener: descriptor of a listening socket, in place of a port.
        options: of aiohttp's AppRunner.
    """
    from aiohttp import web

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def watch() -> None:
        # Not sys.stdin: a thread that holds its buffer's lock aborts the interpreter at exit.
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(stop.set)

    _allow_files()
    # Requests whose delay is not over get no reply: the run that sent them has ended.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, keepalive_timeout=3600.0, **options)
    await runner.setup()
    try:
        # An agent opens all its connections at once, hence the backlog.
        if listener is None:
            await web.TCPSite(runner, ADDRESS, port, backlog=BACKLOG).start()
        else:
            await web.SockSite(runner, socket.socket(fileno=listener), backlog=BACKLOG).start()
        address, bound = runner.addresses[0][:2]
        print(json.dumps({"port": bound, "url": f"http://{host_port(address, bound)}"}), flush=True)
        threading.Thread(target=watch, daemon=True).start()
        await stop.wait()
    finally:
        await runner.cleanup()


def _allow_files() -> None:
    """Raises the soft limit on open files, usually 1,024, as far as the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class JudgeProcess:
    """A running judge server; a context manager.

    Args:
        process: has printed its url.
        url: of the server.
        hang_s: seconds without an answer after which :meth:`wait` ends it; None for no limit.

    Attributes:
        url: of the server.
        hung: whether it was ended because it did not answer.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, hang_s: float | None = None) -> None:
        self._process, self._hang_s = process, hang_s
        self.url = url
        self.hung = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Waits until the server has ended; ends it if it answers no more."""
        if self._hang_s is not None:
            address, port = host_and_port(urlsplit(self.url).netloc)
            asked = partial(answers, port, self._hang_s, well=False, address=address)
            self.hung = hangs(self.pid, asked, self._hang_s)
            if self.hung:
                self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends the server and waits for it; may be called twice."""
        _stop(self._process)

    def kill(self) -> None:
        """Ends the server with SIGKILL and waits for it."""
        self._process.kill()
        self.close()

    def __enter__(self) -> JudgeProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_judge(
    latency: str, time_scale: float = 1.0, seed: int = 0, *, deadline_s: float = 30.0, listener: int | None = None
) -> JudgeProcess:
    """Starts a judge server on a free port of this machine, or on a listening socket.

    Args:
        latency: a distribution, see :func:`~dataflow.distribution.parse_distribution`, in seconds.
        time_scale: factor on its delays.
        seed: of the delays.
        deadline_s: for its start, in seconds.
        listener: descriptor of the socket, which the server inherits and which stays open when the server dies.

    Raises:
        ConfigError: a bad distribution or scale.
        RunError: it did not start in time.
    """
    parse_distribution(latency, "judge.latency")
    _check_scale(time_scale)
    options = ["--time-scale", repr(float(time_scale)), "--seed", str(seed), "--port", "0"]
    arguments = command("dataflow.rewards.judge.server", "--latency", str(latency), *options)
    if listener is None:
        return start_server(arguments, deadline_s)
    return start_server([*arguments, "--listener", str(listener)], deadline_s, inherits=(listener,))


def start_server(
    arguments: Sequence[str],
    deadline_s: float,
    inherits: Sequence[int] = (),
    what: str = "the judge server",
    hang_s: float | None = None,
) -> JudgeProcess:
    """Starts a process that calls :func:`serve`.

    Args:
        arguments: its command line.
        deadline_s: seconds for its start.
        inherits: descriptors that stay open in it.
        what: it is, for messages.
        hang_s: see :class:`JudgeProcess`.

    Raises:
        RunError: it did not start within ``deadline_s``.
    """
    with tempfile.TemporaryFile() as errors:
        # In a session of its own, so that Ctrl-C reaches only the run, which ends the judge after its last request.
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            pass_fds=inherits,
        )
        try:
            assert process.stdout is not None
            url = json.loads(_first_line(process.stdout, deadline_s))["url"]
        except BaseException as error:
            _stop(process)
            if not isinstance(error, ValueError | LookupError):
                raise
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"no answer within {deadline_s:g} s"
            raise RunError(f"{what} did not start: {reason}.") from error
    return JudgeProcess(process, url, hang_s)


def _first_line(stream: IO[bytes], deadline_s: float) -> bytes:
    """Returns the first line, or its beginning if the deadline passes or the stream ends."""
    line, end = b"", time.monotonic() + deadline_s
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while b"\n" not in line and selector.select(max(0.0, end - time.monotonic())):
            piece = os.read(stream.fileno(), 4096)
            if not piece:
                break
            line += piece
    return line


def _stop(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check_scale(time_scale: float) -> None:
    if not 0 <= time_scale < float("inf"):
        raise ConfigError(f"judge.time_scale={time_scale}; give a finite number of 0 or more.")


def main(arguments: list[str] | None = None) -> int:
    """Runs the server from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dataflow.rewards.judge.server", description=__doc__.split("\n")[0])
    parser.add_argument("--latency", default="uniform:1:40", help="in seconds")
    parser.add_argument("--time-scale", type=float, default=1.0, help="multiplies every delay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--listener", type=int, help="descriptor of a listening socket, in place of --port")
    given: Any = parser.parse_args(arguments)
    import uvloop

    try:
        distribution = parse_distribution(given.latency, "--latency")
        _check_scale(given.time_scale)
        uvloop.run(serve(application(distribution, given.time_scale, given.seed), given.port, listener=given.listener))
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
