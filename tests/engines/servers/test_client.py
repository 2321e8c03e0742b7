"""The client of an inference server refuses replies that are longer than their request needs, or compressed."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from dataflow.engines.base import Sampling
from dataflow.engines.servers import client as client_module
from dataflow.engines.servers.client import PAGE_BYTES, Client, ServerError
from dataflow.engines.servers.protocol import ServerProtocol, reply_bytes
from dataflow.engines.servers.sglang import SglangServer
from dataflow.engines.servers.vllm import VllmServer
from dataflow.system.loopback import ADDRESS

pytestmark = pytest.mark.timeout(30)

PROMPT, SAMPLING = [3, 4, 5], Sampling(max_tokens=16)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def outcome(handler: Handler, send: Callable[[Client], Awaitable[Any]], login: str = "") -> Any:
    """Returns what a request to a server with this handler gives: its JSON, or the message of its error."""

    async def body() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, ADDRESS, 0).start()
        client = Client(f"http://{login}{ADDRESS}:{runner.addresses[0][1]}", None, 20.0)
        try:
            return await send(client)
        except ServerError as error:
            return str(error)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(body())


def endless(sent: list[int]) -> Handler:
    """Sends a reply without an end, and counts its bytes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        while True:
            await reply.write(b" " * (1 << 16))
            sent.append(1 << 16)

    return handle


@pytest.mark.parametrize("protocol", [VllmServer, SglangServer])
def test_a_sample_is_read_up_to_what_its_tokens_can_need(protocol: Callable[..., ServerProtocol]) -> None:
    sent: list[int] = []
    most = reply_bytes(PROMPT, SAMPLING)
    assert (1 << 20) < most < (1 << 20) + (1 << 16)
    said = outcome(endless(sent), lambda client: protocol(client, "0").sample(PROMPT, SAMPLING, [2], 7))
    assert f"sent a reply of over {most:,} bytes, more than the request can need" in said
    assert sum(sent) < 16 * most  # what is on its way is not read


def test_the_bound_grows_with_the_tokens() -> None:
    long = reply_bytes([0] * 1000, Sampling(max_tokens=8192))
    assert long == reply_bytes([], Sampling(max_tokens=8192)) + 16 * 1000
    entry = json.dumps(["x" * 128] * 3 + [-12.345678901234567, 151_643, {"x" * 128: -12.345678901234567}])
    assert len(entry) * 8192 < long


def test_a_page_that_says_how_long_it_is_is_not_read() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Length": str(PAGE_BYTES + 1)})
        await reply.prepare(request)
        await asyncio.Event().wait()
        return reply

    said = outcome(handle, lambda client: client.get("/server_info"))
    assert said == f"GET /server_info sent a reply of over {PAGE_BYTES:,} bytes, more than the request can need"


def test_a_compressed_reply_is_refused_unread() -> None:
    bomb = gzip.compress(b" " * (64 << 20), 1)

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    said = outcome(handle, lambda client: client.post("/v1/completions", {}))
    assert said.startswith("POST /v1/completions sent its reply in the encoding 'gzip', which was not requested; ")


def test_a_reply_as_requested_is_json() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.json_response({"got": await request.json()})

    assert outcome(handle, lambda client: client.post("/x", {"a": 1}, most_bytes=100)) == {"got": {"a": 1}}


def test_a_long_reply_is_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(_request: web.Request) -> web.StreamResponse:
        return web.json_response("a" * (1 << 20))

    threads, loads = [], json.loads

    def decode(raw: bytes) -> Any:
        threads.append(threading.current_thread())
        return loads(raw)

    monkeypatch.setattr(json, "loads", decode)
    assert outcome(handle, lambda client: client.get("/page")) == "a" * (1 << 20)
    assert threads != [threading.main_thread()]


def test_a_connection_that_is_not_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(_request: web.Request) -> web.StreamResponse:
        raise AssertionError

    async def never(*_: Any, **_options: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(client_module, "CONNECT_S", 0.05)
    monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", never)
    assert outcome(handle, lambda client: client.get("/page")) == "GET /page: no connection within 0.05 s"


def test_a_login_in_the_address_is_sent_as_a_header() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response([request.headers["Authorization"], str(request.url.user)])

    found = outcome(handle, lambda client: client.get("/page"), login="me:pass%20word@")
    assert found == ["Basic " + base64.b64encode(b"me:pass word").decode(), "None"]
