"""Servers that are restarted, replaced or refuse weights: they get the current ones after they pass the check."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import Aborted, RunError
from tests.engines.servers.test_pool import KINDS, Rig, in_thread, on
from tests.rigs.inference_servers import START, FakeServer, FakeVllm

pytestmark = pytest.mark.timeout(60)


@KINDS
def test_a_restarted_server_gets_the_weights(tmp_path: Path, kind: type[FakeServer]) -> None:
    """It comes back with those of its start before anything was asked, so only its label tells."""
    servers = [kind(), kind()]

    async def test(rig: Rig) -> None:
        await rig.sync(2)
        await in_thread(servers[0].restart)
        rig.check(await rig.draw(), 2)
        while rig.pool.up < 2:
            await asyncio.sleep(0.01)
        assert [server.held for server in servers] == ["weights 2", "weights 2"]
        before = len(servers[0].asked)
        rig.check(await rig.draw(), 2)
        assert len(servers[0].asked) > before

    on(tmp_path, servers, test)


def test_a_server_changed_by_another_client_gets_its_weights_back(tmp_path: Path) -> None:
    servers = [FakeVllm()]

    async def test(rig: Rig) -> None:
        servers[0].held, servers[0].label = "weights of others", "other:1"
        rig.check(await rig.draw(), 1)

    on(tmp_path, servers, test)


@KINDS
def test_a_server_that_is_away_during_a_sync_follows(tmp_path: Path, kind: type[FakeServer]) -> None:
    servers = [kind(), kind()]

    async def test(rig: Rig) -> None:
        await in_thread(servers[1].stop)
        await rig.sync(2)
        rig.check(await rig.draw(), 2)
        assert rig.pool.up == 1
        await rig.sync(3)
        await in_thread(servers[1].start)
        while rig.pool.up < 2:
            await asyncio.sleep(0.01)
        assert servers[1].held == "weights 3"
        rig.check(await rig.draw(), 3)

    on(tmp_path, servers, test)


def test_a_sync_may_abort_and_redraw(tmp_path: Path) -> None:
    held = threading.Event()
    servers = [FakeVllm(fault=lambda number: "" if held.is_set() else "hang")]

    async def test(rig: Rig) -> None:
        drawing = asyncio.ensure_future(rig.draw())
        while servers[0].running < 8:
            await asyncio.sleep(0.01)
        held.set()
        await rig.sync(2, redraw=True)
        rig.check(await drawing, 2)

    on(tmp_path, servers, test)


def test_no_server_is_left(tmp_path: Path) -> None:
    servers = [FakeVllm(), FakeVllm()]

    async def test(rig: Rig) -> None:
        for server in servers:
            await in_thread(server.stop)
        with pytest.raises(RunError, match=r"none of the 2 servers of engine\.urls took a sample for 0\.4 s") as caught:
            await rig.draw()
        assert "start them, then resume the run" in str(caught.value)
        with pytest.raises(RunError, match="none of the 2 servers"):
            await rig.draw()
        with pytest.raises(RunError, match=r"none of the 2 servers.* the last with .* GET /\S+: Connection refused"):
            await rig.sync(2)
        await in_thread(servers[0].start)
        while not rig.pool.up:
            await asyncio.sleep(0.01)
        rig.check(await rig.draw(), 1)  # the sync has failed

    on(tmp_path, servers, test, wait_s=0.4)


@KINDS
def test_weights_that_all_servers_refuse(tmp_path: Path, kind: type[FakeServer]) -> None:
    server = kind()

    async def test(rig: Rig) -> None:
        server.broken = "no parameter named 'layers.2'"
        with pytest.raises(RunError, match=r"http\S+ does not take the weights.*layers\.2.*engine\.weights_dir"):
            await rig.sync(2)

    on(tmp_path, [server], test)


# An exception of vLLM's worker (500 of /collective_rpc) is no passing failure: it may have half of the weights.
@pytest.mark.parametrize(("status", "what"), [(429, "reload"), (502, "reload"), (503, "reload"), (500, "/pause")])
def test_a_passing_failure_of_a_load_is_waited_for(tmp_path: Path, status: int, what: str) -> None:
    server: FakeVllm = FakeVllm()
    answer, failed = server.answer, list[str]()

    def failing(method: str, path: str, body: dict[str, Any]) -> Any:
        if what in f"{path} {body.get('method')}" and not failed:
            failed.append(path)
            return status, {"error": "passing"}
        return answer(method, path, body)

    async def test(rig: Rig) -> None:
        server.answer = failing  # type: ignore[method-assign]
        await rig.sync(2)
        assert failed
        rig.check(await rig.draw(), 2)

    on(tmp_path, [server], test)


# A server whose reply is lost may have done what it was asked, or not.
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("number", range(8))
def test_a_server_with_the_current_label_is_never_paused(tmp_path: Path, number: int, done: bool) -> None:
    """Whichever request of a load fails; and while it may have half of its weights, it is not resumed."""
    server: FakeVllm = FakeVllm()
    answer, asked, half = server.answer, list[str](), list[bool]()

    def failing(method: str, path: str, body: dict[str, Any]) -> Any:
        if method == "GET" or path in ("/tokenize", "/v1/completions") or body.get("method") == "shape_of_model":
            return answer(method, path, body)
        asked.append(path)
        fails = len(asked) == number + 1
        reply = answer(method, path, body) if done or not fails else None
        if body.get("method") in ("reload_weights", "refresh_head"):
            half[:] = [True] if fails or body["method"] == "reload_weights" else []
        assert not (path == "/resume" and half), "resumed with half of the weights"
        assert not (server.paused and server.label == "run:2"), "it passes for one that draws samples"
        return (502, {"error": "of a proxy"}) if fails else reply

    async def test(rig: Rig) -> None:
        server.answer = failing  # type: ignore[method-assign]
        await rig.sync(2)
        server.answer = answer  # type: ignore[method-assign]
        assert (server.paused, server.label, len(asked) > 8) == (False, "run:2", True)
        rig.check(await rig.draw(), 2)

    on(tmp_path, [server], test)


def test_a_server_that_is_replaced_between_two_steps_is_checked(tmp_path: Path) -> None:
    servers: list[FakeVllm] = [FakeVllm(), FakeVllm()]

    async def test(rig: Rig) -> None:
        servers[0].text_tokens = lambda text: [3]
        await in_thread(servers[0].restart)
        await rig.sync(2)
        assert servers[0].held == START
        rig.check(await rig.draw(), 2)
        assert rig.pool.up == 1
        servers[0].text_tokens = lambda text: [len(text)]
        while rig.pool.up < 2:
            await asyncio.sleep(0.01)
        servers[0].text_tokens = lambda text: [3]
        await in_thread(servers[0].restart)
        rig.check(await rig.draw(), 2)  # found by its label
        assert servers[0].held == START

    on(tmp_path, servers, test)


def test_a_server_that_fails_its_check_at_the_first_sync_is_not_used(tmp_path: Path) -> None:
    servers: list[FakeVllm] = [FakeVllm(), FakeVllm()]
    answer = servers[0].answer
    # The check is interrupted; then the server turns out to have another tokenizer.
    asked: list[str] = []

    def failing(method: str, path: str, body: dict[str, Any]) -> Any:
        if path == "/tokenize":
            asked.append(path)
            return (503, {"error": "passing"}) if len(asked) == 1 else {"tokens": [3]}
        return answer(method, path, body)

    servers[0].answer = failing  # type: ignore[method-assign]

    async def test(rig: Rig) -> None:
        rig.check(await rig.draw(), 1)
        while len(asked) < 3:
            await asyncio.sleep(0.01)
        assert rig.pool.up == 1
        assert servers[0].held == START

    on(tmp_path, servers, test)


@pytest.mark.parametrize(
    ("during", "paused"),
    [("prepare_sampler", False), ("reload_weights", True), ("refresh_head", True), ("/reset_prefix_cache", False)],
)
def test_closing_during_a_sync_resumes_a_server_unless_it_may_have_half_of_its_weights(
    tmp_path: Path, during: str, paused: bool
) -> None:
    server: FakeVllm = FakeVllm()
    answer, began = server.answer, threading.Event()

    def slow(method: str, path: str, body: dict[str, Any]) -> Any:
        if during in (path, body.get("method")):
            began.set()
            threading.Event().wait(0.3)
        return answer(method, path, body)

    async def test(rig: Rig) -> None:
        server.answer = slow  # type: ignore[method-assign]
        syncing = asyncio.ensure_future(rig.sync(2))
        await in_thread(lambda: began.wait(20) and None)
        rig.queue.close()
        await rig.pool.close()
        assert server.paused is paused
        assert server.label == "run:2, loading"
        with pytest.raises(Aborted):
            await syncing

    on(tmp_path, [server], test)


def test_weights_that_one_server_refuses(tmp_path: Path) -> None:
    """It stays paused: vLLM with half of its weights can end at the next sample."""
    servers = [FakeVllm(), FakeVllm()]

    async def test(rig: Rig) -> None:
        servers[0].broken = "disk full"
        await rig.sync(2)
        rig.check(await rig.draw(), 2)
        assert servers[0].paused
        assert servers[0].label == "run:2, loading"  # it must not pass for one with the old weights
        servers[0].broken = ""
        await rig.sync(3)
        while servers[0].label != "run:3":  # it is asked again at growing intervals
            await asyncio.sleep(0.01)
        while servers[0].paused:
            await asyncio.sleep(0.01)

    on(tmp_path, servers, test)
