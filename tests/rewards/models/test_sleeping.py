"""Waking and sleeping of servers by HTTP, against a server that speaks vLLM's protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from dataflow.config.run import RunConfig
from dataflow.errors import ConfigError, RunError
from dataflow.rewards.models.sleeping import Sleeper
from dataflow.running.services.colocation import sleepers_of
from dataflow.system.loopback import ADDRESS

pytestmark = pytest.mark.timeout(60)


class Server:
    """Sleeps, unless it is one that only says so."""

    def __init__(self, sleeps: bool = True, knows: bool = True) -> None:
        self.asleep, self._sleeps, self.knows = False, sleeps, knows
        self.calls: list[str] = []

    async def call(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        if not self.knows:
            return web.Response(status=404)
        if self._sleeps:
            self.asleep = request.path == "/sleep"
        return web.Response()

    async def state(self, _request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.asleep})

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/sleep", self.call)
        app.router.add_post("/wake_up", self.call)
        app.router.add_get("/is_sleeping", self.state)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, ADDRESS, port).start()
            yield f"http://{ADDRESS}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def test_all_servers_sleep_and_wake() -> None:
    async def run() -> None:
        one, two = Server(), Server()
        async with one.serve() as first, two.serve() as second:
            sleeper = Sleeper("rm", [first, f"{second}/v1"], 10.0)
            await sleeper.sleep()
            assert one.asleep
            assert two.asleep
            await sleeper.wake()
            assert not one.asleep
            assert not two.asleep
        assert one.calls == two.calls == ["/sleep?level=1", "/wake_up"]

    asyncio.run(run())


@pytest.mark.parametrize("server", [Server(sleeps=False), Server(knows=False)], ids=["says so", "does not know"])
def test_a_server_that_cannot_sleep_is_named(server: Server) -> None:
    async def run() -> None:
        async with server.serve() as url:
            with pytest.raises(RunError, match=f"reward model 'rm': server {url} does not sleep \\(/.*\\); start vLLM"):
                await Sleeper("rm", [url], 10.0).sleep()

    asyncio.run(run())


def test_a_server_that_fails_is_quoted_and_a_login_is_sent() -> None:
    seen: list[str | None] = []

    async def fail(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response(status=500, text="CUDA out of memory")

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    async def run(words: str, **handlers: Any) -> None:
        app = web.Application()
        app.router.add_post("/sleep", handlers.get("sleep", page))
        app.router.add_get("/is_sleeping", page)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, ADDRESS, 0).start()
        url = f"http://me:hush@{ADDRESS}:{runner.addresses[0][1]}/v1"
        with pytest.raises(RunError, match=words):
            await Sleeper("rm", [url], 10.0).sleep()
        await runner.cleanup()

    asyncio.run(run(r"does not sleep \(/sleep\?level=1 answered 500: CUDA out of memory\); see its log", sleep=fail))
    asyncio.run(run(r"does not sleep \(/is_sleeping answered 200: <html>\); start vLLM"))
    assert seen == ["Basic bWU6aHVzaA=="]


def test_a_server_that_is_being_restarted_is_waited_for() -> None:
    async def run() -> None:
        async with Server().serve() as url:
            port = int(url.rpartition(":")[2])
        waking = asyncio.create_task(Sleeper("rm", [url], 30.0).wake())
        await asyncio.sleep(0)
        async with Server().serve(port):
            await waking

    asyncio.run(run())


def test_a_server_that_is_gone_is_named() -> None:
    async def run() -> None:
        async with Server().serve() as url:
            pass
        with pytest.raises(RunError, match=f"server {url} did not answer /wake_up within 0.1 s"):
            await Sleeper("rm", [url], 0.1).wake()
        with pytest.raises(RunError, match="reward model 'rm' has no server"):
            await Sleeper("rm", [], 0.1).wake()

    asyncio.run(run())


def test_vllm_on_a_cpu_is_refused() -> None:
    def config(**keys: object) -> RunConfig:
        return RunConfig.model_validate({"reward": {"models": {"rm": {"placement": "colocated", **keys}}}})

    with pytest.raises(ConfigError, match=r"reward\.models\.rm\.placement=colocated: vLLM cannot sleep on a CPU"):
        sleepers_of(config(path="m"))
    assert [each.model for each in sleepers_of(config(path="m", engine="hf"))] == ["rm"]
    assert sleepers_of(config(url=["http://h:1"]))[0].urls == ("http://h:1",)
