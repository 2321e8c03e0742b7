"""The HTTP router: one address for several models, whose servers die, hang and fail behind it."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from dataflow.errors import RunError
from dataflow.rewards.limits.router import Probing
from dataflow.rewards.models.http_router import HttpRouter, RoutedModel, main
from dataflow.rewards.models.router_keeper import RouterKeeper
from dataflow.system.address import host_and_port
from tests.rigs.addresses import OTHERS
from tests.rigs.reward_servers import FakeServer, servers

pytestmark = pytest.mark.timeout(90)

FAST = Probing(first_s=0.02, most_s=0.1, limit_s=0.2, patience_s=0.5)


def run(body: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await body

    return asyncio.run(limited())


def model(found: list[FakeServer], timeout: float = 20.0, slots: int = 4) -> RoutedModel:
    return RoutedModel(url=[server.url for server in found], timeout=timeout, slots=slots)


@asynccontextmanager
async def router(**models: RoutedModel) -> AsyncIterator[aiohttp.ClientSession]:
    """Runs a router in this process; yields a client of it."""
    runner = web.AppRunner(
        HttpRouter(models, FAST).application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(base, connector=aiohttp.TCPConnector(limit=0)) as client:
            yield client
    finally:
        await runner.cleanup()


async def ask(client: aiohttp.ClientSession, path: str = "/classify", **body: Any) -> tuple[int, Any]:
    async with client.post(path, json={"input": ["x"], **body}) as reply:
        return reply.status, await reply.json()


async def until(check: Any) -> None:
    while not check():
        await asyncio.sleep(0.005)


def test_the_body_names_the_model() -> None:
    async def body() -> None:
        async with servers(1) as ones, servers(1, score=lambda _body: 7.0) as twos:
            async with router(one=model(ones), two=model(twos)) as client:
                assert (await ask(client, model="one"))[1]["data"][0]["probs"] == [1.0]
                assert (await ask(client, "/pooling", model="two"))[1]["data"][0]["data"] == [7.0]
                status, said = await ask(client, model="tow")
                assert (status, said["error"]["message"]) == (
                    404,
                    "there is no reward model 'tow'; did you mean 'two'?",
                )
                status, said = await ask(client)
                assert said["error"]["message"] == "the body names no model; there are one, two."
            async with router(one=model(ones)) as client:
                assert (await ask(client))[0] == 200
                async with client.post("/classify", data=b"{broken") as reply:
                    assert reply.status == 500  # the server's answer
            async with router(one=model(ones), two=model(twos)) as client:
                status, said = await ask(client, model=["one"])
                assert (status, said["error"]["message"][:31]) == (404, "there is no reward model '['one")
                async with client.get("/v1/models") as reply:
                    assert [entry["id"] for entry in (await reply.json())["data"]] == ["one", "two"]

    run(body())


def test_requests_are_spread_and_those_of_a_dead_server_go_to_another() -> None:
    async def body() -> None:
        async with servers(2) as found, router(rm=model(found)) as client:
            for server in found:
                server.hang()
            asked = [asyncio.ensure_future(ask(client)) for _ in range(12)]
            for server in found:
                await server.until(4)
            assert [server.running for server in found] == [4, 4]
            await found[0].stop()
            found[1].answering.set()
            assert [status for status, _reply in await asyncio.gather(*asked)] == [200] * 12
            async with client.get("/health") as reply:
                models = (await reply.json())["models"]
                assert (reply.status, models["rm"]) == (200, {found[0].url: False, found[1].url: True})

    run(body())


def test_a_hung_server_is_ejected_in_its_time_out() -> None:
    async def body() -> None:
        async with servers(2) as found, router(rm=model(found, timeout=0.4)) as client:
            found[0].hang()
            replies = await asyncio.gather(*(ask(client) for _ in range(30)))
            assert [status for status, _reply in replies] == [200] * 30
            assert len(found[0].bodies) == 4

    run(body())


def test_all_out_is_503_with_a_sentence_until_one_is_back() -> None:
    async def body() -> None:
        async with servers(2) as found, router(rm=model(found)) as client:
            for server in found:
                await server.stop()
            status, said = await ask(client)
            message = said["error"]["message"]
            assert status == 503
            assert message.startswith("no server of reward model 'rm' answered; the last was http://127.0.0.1:")
            async with client.get("/health") as reply:
                assert (reply.status, (await reply.json())["status"]) == (503, "out")
            await found[1].start()
            while (await ask(client))[0] != 200:
                pass
            assert len(found[1].bodies) > 0

    run(body())


def test_a_status_of_the_server_is_passed_on() -> None:
    async def body() -> None:
        async with servers(2) as found, router(rm=model(found)) as client:
            for server in found:
                server.status = 400
            assert await ask(client) == (400, {"error": {"message": "out of order"}})
            assert [len(server.bodies) for server in found] == [1, 1]
            found[1].status = 200
            assert [(await ask(client))[0] for _ in range(8)] == [200] * 8
            for server in found:
                server.status = 500
            assert (await ask(client))[0] == 500

    run(body())


@asynccontextmanager
async def stream(
    pieces: list[bytes], gate: asyncio.Event, breaks: bool = False, status: int = 200, **headers: str
) -> AsyncIterator[str]:
    """Serves an event stream: its first piece, the others when the gate is open, and then its end or a broken line."""

    async def answer(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream", **headers})
        reply.set_cookie("a", "1")
        reply.set_cookie("b", "2")
        await reply.prepare(request)
        for piece in pieces:
            await reply.write(piece)
            await gate.wait()
        if breaks and request.transport is not None:
            request.transport.abort()
        return reply

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def test_a_stream_is_passed_on_piece_by_piece() -> None:
    async def body() -> None:
        gate = asyncio.Event()
        async with (
            stream([b"data: 1\n\n", b"data: 2\n\n"], gate) as url,
            router(rm=RoutedModel(url=[url])) as client,
            client.post("/v1/chat/completions", json={"stream": True}) as reply,
        ):
            assert reply.headers["Content-Type"] == "text/event-stream"
            assert await reply.content.readuntil(b"\n\n") == b"data: 1\n\n"
            gate.set()
            assert await reply.content.read() == b"data: 2\n\n"

    run(body())


@pytest.mark.parametrize("status", [200, 500])
def test_a_long_reply_is_passed_on_as_it_arrives_with_all_its_headers(status: int) -> None:
    half = b"x" * (1 << 20)

    async def body() -> None:
        gate = asyncio.Event()
        async with (
            stream([half, half], gate, status=status, **{"Content-Length": str(2 * len(half))}) as url,
            router(rm=RoutedModel(url=[url])) as client,
            client.post("/v1/chat/completions", json={}) as reply,
        ):
            assert reply.status == status
            assert sorted(reply.cookies) == ["a", "b"]
            assert await reply.content.readexactly(len(half)) == half
            gate.set()
            assert await reply.content.read() == half

    run(body())


def test_a_short_reply_must_be_there_within_the_time_out() -> None:
    async def body() -> None:
        async with (
            stream([b"x", b"x"], asyncio.Event(), **{"Content-Length": "2"}) as url,
            router(rm=RoutedModel(url=[url], timeout=0.3)) as client,
            client.post("/v1/chat/completions", json={}) as reply,
        ):
            assert "did not answer within 0.3 s (reward.models.rm.timeout)" in await reply.text()

    run(body())


def test_a_stream_that_breaks_breaks_at_the_client_too() -> None:
    async def body() -> None:
        gate = asyncio.Event()
        gate.set()
        async with (
            stream([b"data: 1\n\n"], gate, breaks=True) as url,
            router(rm=RoutedModel(url=[url])) as client,
            client.post("/v1/chat/completions", json={}) as reply,
        ):
            assert await reply.content.readuntil(b"\n\n") == b"data: 1\n\n"
            with pytest.raises(aiohttp.ClientError):
                await reply.read()

    run(body())


def test_a_client_that_leaves_frees_its_slot() -> None:
    async def body() -> None:
        async with servers(1) as (one,), router(rm=model([one], slots=1)) as client:
            one.hang()
            first, second = (asyncio.ensure_future(ask(client)) for _ in range(2))
            await one.until(1)
            second.cancel()
            first.cancel()
            await asyncio.gather(first, second, return_exceptions=True)
            third = asyncio.ensure_future(ask(client))
            await one.until(2)
            one.answering.set()
            assert (await third)[0] == 200

    run(body())


def test_bad_models_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.json"
    for text, words in (
        (None, "cannot be read"),
        ("{}", "names no model; give one."),
        ('{"rm": {"slots": 1}}', "url"),
        ('{"rm": {"url": ["nowhere"]}}', "is not an address"),
    ):
        if text is not None:
            file.write_text(text)
        assert main(["--models", str(file)]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("address", OTHERS)
def test_a_router_that_hangs_is_restarted_at_its_address(address: str) -> None:
    losses: queue.Queue[RunError] = queue.Queue()

    async def body() -> None:
        async with servers(1) as (one,):
            with RouterKeeper({"rm": {"url": [one.url]}}, losses.put, hang_s=1.0, address=address) as keeper:
                assert urlsplit(keeper.url).hostname == host_and_port(keeper.address)[0] == address
                async with aiohttp.ClientSession(keeper.url) as client:
                    assert (await ask(client))[0] == 200
                    os.kill(keeper.pid, signal.SIGSTOP)
                    await until(lambda: keeper.deaths == 1)
                    assert (await ask(client))[0] == 200

    run(body())
    assert losses.empty()


@pytest.mark.slow
def test_a_router_that_is_killed_is_restarted_at_its_address() -> None:
    losses: queue.Queue[RunError] = queue.Queue()

    async def body() -> None:
        async with servers(1) as (one,):
            options = {"url": [one.url], "slots": 4, "path": "/ignored"}
            with RouterKeeper({"rm": options}, losses.put) as keeper:
                async with aiohttp.ClientSession(keeper.url) as client:
                    assert (await ask(client))[0] == 200
                    one.hang()
                    broken = asyncio.ensure_future(ask(client))
                    await one.until(2)
                    os.kill(keeper.pid, signal.SIGKILL)
                    with pytest.raises(aiohttp.ClientError):
                        await broken
                    one.answering.set()
                    assert (await ask(client))[0] == 200  # it waits for the new process
                pid = keeper.pid
            assert keeper.deaths == 1
            await until(lambda: not Path(f"/proc/{pid}").exists())

    run(body())
    assert losses.empty()
