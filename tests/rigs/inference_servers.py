"""A stand-in for vLLM's OpenAI server, with real sockets and without a model.

What it samples depends on the weights that it holds, the prompt and the seed alone: :func:`tokens_of`. It runs on a
thread, and fails as a test wants: ``fault`` returns what happens to a request for a sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aiohttp import web

from dataflow.system.loopback import ADDRESS

START = "start"
"""What a server holds that has not loaded weights."""
Fault = Callable[[int], str]


def tokens_of(held: str, prompt: Sequence[int], seed: int, most: int, size: int, ends: Sequence[int]) -> list[int]:
    """Returns the tokens of a sample: random ones up to the first that ends it."""
    rng, tokens = random.Random(f"{held} {list(prompt)} {seed}"), list[int]()
    while len(tokens) < most and not (tokens and tokens[-1] in ends):
        tokens.append(rng.randrange(size))
    return tokens


def held_of(directory: Path) -> str:
    """Returns what stands for the weights in a directory: the sum of all numbers."""
    from safetensors.numpy import load_file

    total = sum(float(value.astype("float64").sum()) for value in load_file(directory / "model.safetensors").values())
    return f"{total:.6f}"


class FakeServer:
    """vLLM's OpenAI server in dev mode, with this package's worker extension unless ``extended`` is False.

    Args:
        size: tokens of its vocabulary.
        ends: those that end a sample.
        root: directory or name of the model that it says it serves.
        fault: of the n-th request for a sample: "" for none, ``die``, ``hang``, ``half``, ``short`` (a log-prob is
            missing), ``abort``, or a status, maybe with the seconds of its Retry-After: ``429 0.1``.
        key: the header ``Authorization`` that requests must have.

    Attributes:
        url: of the server; the same after a restart.
        asked: bodies of the requests for samples.
        most: largest number of them in flight.
        held: what stands for its weights.
        label: their version.
        calls: paths of the other requests.
        broken: a message with which it refuses weights.
    """

    extended = True
    dev = True
    mode = "processed_logits"
    shape: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, size: int = 61, ends: Sequence[int] = (1, 5, 11), root: str = "a/model", fault: Fault | None = None,
        key: str | None = None,
    ) -> None:  # fmt: skip
        self.size, self.ends, self.root, self.key = size, list(ends), root, key
        self.fault: Fault = fault or (lambda number: "")
        self.asked: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.running = self.most = 0
        self.longest = 512
        self.broken = ""
        self._port = 0
        self._thread: threading.Thread | None = None
        self._held_back: asyncio.Event | None = None
        self._aborts = 0
        self._reset()

    def _reset(self) -> None:
        self.held, self.label, self.paused = START, "default", False

    # --- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts it, with the weights of a start."""
        self._reset()
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(20)

    def stop(self) -> None:
        """Ends it as a kill does: all its connections break."""
        if self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._die)
            self._thread.join(20)

    def restart(self) -> None:
        """Ends it and starts it at the same port."""
        self.stop()
        self.start()

    def hold(self) -> Callable[[], None]:
        """Makes all requests for samples hang from now on, until the function that this returns is called."""
        self._held_back = finish = asyncio.Event()
        return lambda: self._loop.call_soon_threadsafe(finish.set) and None

    def abort(self) -> None:
        """Ends all requests for samples that are in flight."""
        self._aborts += 1
        if self._held_back is not None:
            self._held_back.set()

    def _die(self) -> None:
        for transport in self._transports:
            transport.abort()
        self._ended.set()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._ended, self._transports = asyncio.get_running_loop(), asyncio.Event(), set[Any]()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._route)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, ADDRESS, self._port, reuse_address=True)
        await site.start()
        self._port = runner.addresses[0][1]
        self.url = f"http://{ADDRESS}:{self._port}"
        ready.set()
        await self._ended.wait()
        await runner.cleanup()

    # --- requests -----------------------------------------------------------------------------------------------

    async def _route(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            self._transports.add(request.transport)
        if self.key and request.headers.get("Authorization") != self.key:
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = json.loads(await request.read() or b"{}")
        found = self.answer(request.method, request.path, body)
        if found is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if isinstance(found, tuple):
            return web.json_response(found[1], status=found[0])
        if isinstance(found, _Sample):
            return await self._sample(request, found)
        return web.json_response(found)

    async def _sample(self, request: web.Request, sample: _Sample) -> web.StreamResponse:
        self.asked.append(sample.body)
        what, aborts = self.fault(len(self.asked) - 1), self._aborts
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.002)
            if self._held_back is not None:
                await self._held_back.wait()
            if what == "die":
                self._die()
                await asyncio.sleep(1)
            if what == "hang":
                await asyncio.Event().wait()
            if what[:1].isdigit():
                status, _, wait = what.partition(" ")
                headers = {"Retry-After": wait} if wait else {}
                return web.json_response({"error": {"message": "not now"}}, status=int(status), headers=headers)
            tokens = tokens_of(self.held, sample.prompt, sample.seed, sample.most, self.size, self.ends)
            finish = (
                "abort" if what == "abort" or aborts < self._aborts else "stop" if tokens[-1] in self.ends else "length"
            )
            text = json.dumps(self.reply(tokens, finish, what == "short")).encode()
            if what == "half":
                reply = web.StreamResponse(headers={"Content-Length": str(len(text))})
                await reply.prepare(request)
                await reply.write(text[: len(text) // 2])
                assert request.transport is not None
                request.transport.close()
                return reply
            return web.Response(body=text, content_type="application/json")
        finally:
            self.running -= 1

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """Returns the JSON of a reply, a status with it, a sample to make, or None for an unknown page."""
        if path == "/v1/completions":
            prompt = body["prompt"]
            if len(prompt) + body["max_tokens"] > self.longest:
                return 400, {"error": {"message": f"This model's maximum context length is {self.longest}"}}
            return _Sample(body, prompt, body["seed"], body["max_tokens"])
        self.calls.append(path)
        if path == "/version":
            return {"version": "0.31.0"}
        if path == "/v1/models":
            return {"data": [{"id": "served", "root": self.root, "max_model_len": self.longest}]}
        return self.develop(path, body) if self.dev else None

    def develop(self, path: str, body: dict[str, Any]) -> Any:
        """Returns the answer to a request that vLLM takes in its dev mode, as :meth:`answer` does."""
        extension = "dataflow.engines.vllm.worker.RolloutWorker" if self.extended else ""
        if path == "/server_info":
            return {
                "vllm_config": {
                    "model_config": {"logprobs_mode": self.mode},
                    "parallel_config": {"worker_extension_cls": extension},
                }
            }
        if path == "/collective_rpc" and body["method"] == "shape_of_model":
            return {"results": [dict(self.shape)]}
        if path == "/collective_rpc" and body["method"] == "reload_weights":
            if self.broken:
                return 500, {"error": {"message": f"Worker failed with error '{self.broken}'"}}
            assert self.paused, "weights are replaced while samples may be drawn"
            self.held = held_of(Path(body["kwargs"]["weights_path"]))
        elif path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            if self.paused:
                self.abort()
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path not in ("/collective_rpc", "/weight_info", "/reset_prefix_cache"):
            return None
        return {"weight_version": self.label, "results": [None]}

    def reply(self, tokens: list[int], finish: str, short: bool) -> dict[str, Any]:
        """Returns the reply with a sample."""
        log_probs = [-0.5] * (len(tokens) - short)
        choice = {
            "token_ids": tokens,
            "logprobs": {"token_logprobs": log_probs},
            "finish_reason": finish,
        }
        return {"choices": [choice]}


class _Sample:
    def __init__(self, body: dict[str, Any], prompt: list[int], seed: int, most: int) -> None:
        self.body, self.prompt, self.seed, self.most = body, prompt, seed, most


@contextlib.contextmanager
def serving(*servers: FakeServer) -> Iterator[None]:
    """Starts servers and ends them."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        yield
