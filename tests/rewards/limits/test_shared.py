"""Limits that several agents share: they hold for all together, also if one dies, and no waiter is forgotten."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.errors import RewardFailed
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.limits.endpoint_queue import EndpointQueue
from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.queues import Limiter
from dataflow.rewards.limits.server import Address, LimitServer, Wire
from dataflow.rewards.limits.shared import SharedLimits
from dataflow.system import clock
from dataflow.system.address import host_port
from tests.rigs.addresses import OTHERS

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]


def run(test: Callable[[], Coroutine[Any, Any, None]], deadline_s: float = 20.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(deadline_s):
            await test()

    asyncio.run(limited())


@dataclass(eq=False)
class Item:
    """A request as an agent has it."""

    priority: tuple[int, int, int]
    endpoint: str = ""
    tokens: int = 0
    prefers: str = ""
    avoids: tuple[str, ...] = ()
    second: bool = False
    wanted: bool = True
    begun: float = 0.0


class Client:
    """What an agent does with its limits; its calls end when the test says so."""

    def __init__(self, limits: Limits, address: Address, name: str) -> None:
        self.shared = SharedLimits(address, name)
        self.lost: list[Exception] = []
        self.live: list[tuple[Item, EndpointQueue]] = []
        self.started: list[Item] = []
        self.pushed: list[Item] = []
        self.changed = asyncio.Event()
        self.limiter = Limiter(limits, self._start, self.shared.queue, self._lose)
        self._sequence = itertools.count()

    def _start(self, item: Item, queue: EndpointQueue) -> None:
        item.begun = clock.now()
        self.live.append((item, queue))
        self.started.append(item)
        self.changed.set()

    def _lose(self, error: Exception) -> None:
        self.lost.append(error)
        self.changed.set()

    def push(self, count: int = 1, step: int = 1, endpoint: str = "", tokens: int = 0) -> list[Item]:
        items = [Item((0, step, next(self._sequence)), endpoint, tokens) for _ in range(count)]
        self.pushed += items
        for item in items:
            self.limiter.push(item)
        self.limiter.fill()
        return items

    def end(self, count: int = 1, **how: Any) -> None:
        for _ in range(count):
            item, queue = self.live.pop(0)
            self.limiter.release(queue, item.begun, **how)

    async def until(self, true: Callable[[], Any]) -> None:
        while not true():
            self.changed.clear()
            await self.changed.wait()


@asynccontextmanager
async def serving(limits: Limits, clients: int = 2) -> AsyncIterator[tuple[Any, ...]]:
    server = LimitServer(limits)
    address = await server.open()
    made = [Client(limits, address, f"agent {i}") for i in range(clients)]
    yield (server, *made)
    for client in made:
        client.limiter.close()
    await server.close()


class Traffic:
    """All connections of a test, and what they have sent and received."""

    def __init__(self) -> None:
        self.said: dict[Wire, list[dict[str, Any]]] = {}
        """What the ends of the connections that are open have sent."""
        self.heard: dict[Wire, list[bytes]] = {}
        self._transports: dict[Wire, asyncio.BaseTransport] = {}

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, send, received, lost = Wire.connection_made, Wire.send, Wire.data_received, Wire.connection_lost

        def connection_made(wire: Wire, transport: asyncio.BaseTransport) -> None:
            self.said[wire], self.heard[wire], self._transports[wire] = [], [], transport
            made(wire, transport)

        def said(wire: Wire, message: dict[str, Any]) -> None:
            if wire in self.said:
                self.said[wire].append(message)
            send(wire, message)

        def heard(wire: Wire, data: bytes) -> None:
            self.heard[wire].append(data)
            received(wire, data)

        def connection_lost(wire: Wire, error: Exception | None) -> None:
            del self.said[wire], self.heard[wire]
            lost(wire, error)

        for method in (connection_made, connection_lost):
            monkeypatch.setattr(Wire, method.__name__, method)
        monkeypatch.setattr(Wire, "send", said)
        monkeypatch.setattr(Wire, "data_received", heard)

    def of(self, client: Client) -> Wire:
        """Returns an agent's end of its connection."""
        return next(wire for wire, said in self.said.items() if said and said[0].get("name") == client.shared.name)

    def cut(self, client: Client) -> None:
        """Ends an agent's connection as the death of its process does."""
        transport = self._transports[self.of(client)]
        assert isinstance(transport, asyncio.Transport)
        transport.abort()

    def counts(self) -> tuple[int, int]:
        """Returns the number of messages sent and received."""
        return sum(map(len, self.said.values())), sum(b"".join(data).count(b"\n") for data in self.heard.values())


@pytest.fixture(autouse=True)
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    found = Traffic()
    found.watch(monkeypatch)
    return found


async def quiet(server: LimitServer, traffic: Traffic, *clients: Client) -> None:
    """Returns when all that the agents and the server had to say has been heard."""
    while not {client.shared.name for client in clients} <= server.stats()["holders"].keys():
        await asyncio.sleep(0)
    turns, before = 0, (-1, 0)
    while turns < 3:  # what is said in one turn of the loop is sent in the next one
        said, heard = counts = traffic.counts()
        turns, before = (turns + 1 if counts == before and said == heard else 0), counts
        await asyncio.sleep(0)


# --- all together ---------------------------------------------------------------------------------------------------


def test_two_agents_have_no_more_in_flight_than_the_job_may(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(5)) as (server, a, b):
            a.push(20)
            b.push(20)
            while len(a.started) + len(b.started) < 40 or a.live or b.live:
                await asyncio.wait([asyncio.ensure_future(c.until(lambda c=c: c.live)) for c in (a, b)], timeout=0.02)
                assert len(a.live) + len(b.live) <= 5
                for client in (a, b):
                    client.end(len(client.live))
            assert server.stats()["peak"] == 5
            await quiet(server, traffic, a, b)
            assert server.stats()["running"] == server.stats()["waiting"] == 0

    run(body)


def test_the_oldest_step_goes_first_in_any_order_of_requests(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(1)) as (server, a, b):
            a.push(1, step=5)
            await a.until(lambda: a.live)
            a.push(2, step=6)
            b.push(2, step=4)
            await quiet(server, traffic, a, b)
            a.end()
            for n in (1, 2):
                await b.until(lambda n=n: len(b.started) == n)
                assert len(a.started) == 1
                b.end()
            await a.until(lambda: len(a.started) == 2)

    run(body)


def test_agents_with_the_same_step_take_turns(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(4)) as (server, a, b):
            for _ in range(10):  # a has served more before, so that its requests have higher numbers
                a.push(4, step=0)
                await a.until(lambda: len(a.live) == 4)
                a.end(4)
            await quiet(server, traffic, a, b)
            a.started.clear()
            a.push(20)
            b.push(20)
            for _ in range(5):
                await quiet(server, traffic, a, b)
                a.end(len(a.live))
                b.end(len(b.live))
            await quiet(server, traffic, a, b)
            assert abs(len(a.started) - len(b.started)) <= 4

    run(body)


def test_requests_a_minute_hold_for_the_job(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(100, rpm=1200)) as (server, a, b):
            a.push(20)
            b.push(20)
            await asyncio.gather(a.until(lambda: len(a.started) == 20), b.until(lambda: len(b.started) == 20))
            begun = sorted(item.begun for item in a.started + b.started)
            # 20 a second, as many at once: a slow machine makes it longer, nothing makes it shorter.
            assert begun[-1] - begun[0] >= 0.9
            assert a.started
            assert b.started
            await quiet(server, traffic, a, b)
            assert server.stats()["rate_limit_wait_s"] > 0.5
            assert a.limiter.queues[""].waited_s > 0.5

    run(body)


def test_tokens_a_minute_hold_for_the_job_and_are_corrected(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(100, tpm=1200)) as (server, a, b):
            a.push(1, tokens=60)
            await a.until(lambda: a.live)
            b.push(1, tokens=40)
            await b.until(lambda: b.live)
            a.end(extra_tokens=40)  # as if it had been 100, five seconds' worth: all that may go at once
            await quiet(server, traffic, a, b)
            begin = time.time()
            b.push(1, tokens=20)
            await b.until(lambda: len(b.started) == 2)
            assert time.time() - begin >= 1.5

    run(body)


def test_endpoints_have_limits_of_their_own_job_wide(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(10, endpoints={"slow": Limits(2)})) as (server, a, b):
            a.push(3, endpoint="slow")
            b.push(3, endpoint="slow")
            b.push(3)
            await b.until(lambda: sum(item.endpoint == "" for item in b.started) == 3)
            await quiet(server, traffic, a, b)
            assert Counter(item.endpoint for item in a.started + b.started) == {"slow": 2, "": 3}
            assert server.stats()["running"] == 5
            assert a.limiter.queues["slow"].waiting() + b.limiter.queues["slow"].waiting() == 4

    run(body)


def test_an_adaptive_limit_falls_for_all_when_one_is_turned_away(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(10, adaptive=True)) as (server, a, b):
            a.push(20)
            b.push(20)
            await quiet(server, traffic, a, b)
            first = a if a.live else b
            first.end(3, overloaded=True, error=TimeoutError())  # one flight: one cut
            await quiet(server, traffic, a, b)
            assert server.stats()["limit"] == {"": 7}
            assert len(a.live) + len(b.live) == 7
            for client in (a, b):
                assert int(client.limiter.queues[""].limit) == 7
                assert [(name, limit) for _at, name, limit in client.limiter.changes()] == [("", 7)]
            for _ in range(3):
                for client in (a, b):
                    client.end(len(client.live))
                await quiet(server, traffic, a, b)
            assert server.stats()["limit"][""] > 7

    run(body)


def test_a_pause_for_one_agent_holds_for_all(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(2)) as (server, a, b):
            a.push(1)
            await a.until(lambda: a.live)
            begin = time.time()
            a.limiter.queues[""].pause(0.5)
            await quiet(server, traffic, a)
            a.end(overloaded=True, error=TimeoutError())
            b.push(1)
            await b.until(lambda: b.live)
            assert b.started[0].begun - begin >= 0.45

    run(body)


def test_what_is_said_in_one_turn_of_the_loop_is_one_message(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(100), clients=1) as (server, a):
            await quiet(server, traffic, a)
            before = len(traffic.said[traffic.of(a)])
            a.push(60)
            a.push(40)
            await a.until(lambda: len(a.live) == 100)
            a.end(100)
            a.push(7)
            await a.until(lambda: len(a.live) == 7)
            said = traffic.said[traffic.of(a)][before:]
            assert [{kind: len(what) for kind, what in message.items()} for message in said] == [
                {"wants": 100},
                {"ends": 100, "wants": 7},
            ]

    run(body)


# --- what is wanted no more -----------------------------------------------------------------------------------------


def test_cancelled_requests_leave_the_line_and_take_no_permit_from_others(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(1)) as (server, a, b):
            items = a.push(100)
            await a.until(lambda: a.live)
            b.push(1, step=2)
            await quiet(server, traffic, a, b)
            for item in items:
                item.wanted = False
            a.end(error=asyncio.CancelledError())
            await b.until(lambda: b.live)
            await quiet(server, traffic, a, b)
            stats = server.stats()
            assert (stats["running"], stats["waiting"]) == (1, 0)
            assert len(a.started) == 1

    run(body)


def test_a_permit_that_comes_too_late_goes_back(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(1)) as (server, a, b):
            await quiet(server, traffic, a, b)
            (item,) = a.push(1)
            await asyncio.sleep(0)  # it is on its way
            item.wanted = False
            b.push(1, step=2)
            await b.until(lambda: b.live)
            assert not a.started
            assert server.stats()["holders"] == {"agent 0": 0, "agent 1": 1}

    run(body)


# --- ends -----------------------------------------------------------------------------------------------------------


def test_the_permits_of_an_agent_that_dies_are_free(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(3)) as (server, a, b):
            a.push(10)
            await a.until(lambda: len(a.live) == 3)
            b.push(3, step=2)
            await quiet(server, traffic, b)
            assert not b.started
            traffic.cut(a)
            await b.until(lambda: len(b.live) == 3)
            assert server.stats()["holders"] == {"agent 1": 3}
            assert server.stats()["waiting"] == 0

    run(body)


def test_an_agent_that_comes_again_takes_the_place_of_the_one_before() -> None:
    async def body() -> None:
        limits = Limits(2)
        async with serving(limits, clients=1) as (server, old):
            old.push(2)
            await old.until(lambda: len(old.live) == 2)
            new = Client(limits, old.shared.address, "agent 0")
            new.push(2)
            await new.until(lambda: len(new.live) == 2)
            await old.until(lambda: old.lost)
            assert isinstance(old.lost[0], RewardFailed)
            assert "another agent has come under its name, 'agent 0'" in str(old.lost[0])
            assert server.stats()["holders"] == {"agent 0": 2}
            new.limiter.close()

    run(body)


def test_agents_hear_at_once_that_the_server_is_gone(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(1)) as (server, a, b):
            a.push(2)
            await a.until(lambda: a.live)
            b.push(1)
            await quiet(server, traffic, b)
            await server.close()
            for client in (a, b):
                await client.until(lambda client=client: client.lost)
                assert isinstance(client.lost[0], RewardFailed)
                assert str(client.lost[0]).startswith("the server of the job's shared reward limits, 127.0.0.1:")
            assert len(a.lost) == len(b.lost) == 1

    run(body)


@pytest.mark.parametrize("host", OTHERS)
def test_a_missing_server_is_reported(host: str) -> None:
    async def body() -> None:
        server = LimitServer(Limits(1))
        address = await server.open(host)
        await server.close()
        client = Client(Limits(1), address, "a")
        client.push(1)
        await client.until(lambda: client.lost)
        assert f"limits, {host_port(host, address.port)}, is lost to agent 'a'" in str(client.lost[0])

    run(body)


def test_nobody_is_served_without_the_key() -> None:
    async def body() -> None:
        server = LimitServer(Limits(1))
        host, port, _key = await server.open()
        stranger = Client(Limits(1), Address(host, port, "guess"), "stranger")
        stranger.push(1)
        await stranger.until(lambda: stranger.lost)
        assert not stranger.started
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"x" * 100_000)
        assert await reader.read() == b""
        writer.close()
        await server.close()

    run(body)


def test_close_frees_what_is_held_without_an_error() -> None:
    async def body() -> None:
        async with serving(Limits(1)) as (_server, a, b):
            a.push(1)
            await a.until(lambda: a.live)
            b.push(1)
            a.limiter.close()
            await b.until(lambda: b.live)
            assert a.lost == []

    run(body)


# --- at random ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_in_any_order_nothing_is_lost_and_no_limit_is_passed(seed: int, traffic: Traffic) -> None:
    async def body() -> None:
        rng = random.Random(seed)
        limits = Limits(6, endpoints={"e": Limits(2)})
        async with serving(limits, clients=3) as (server, *clients):
            dead: list[Client] = []
            for turn in range(120):
                client = rng.choice(clients)
                act = rng.random()
                if act < 0.4:
                    client.push(rng.randrange(1, 6), step=rng.randrange(4), endpoint=rng.choice(["", "e"]))
                elif act < 0.75 and client.live:
                    client.end(rng.randrange(1, len(client.live) + 1), overloaded=rng.random() < 0.1)
                elif act < 0.9:
                    for item in [item for item in client.pushed if item.wanted and not item.begun][:1]:
                        item.wanted = False
                elif turn > 60 and len(clients) > 1:
                    traffic.cut(client)
                    clients.remove(client)
                    dead.append(client)
                await asyncio.sleep(rng.choice([0, 0, 0.002]))
                held = [(item, queue) for c in clients for item, queue in c.live]
                assert len(held) <= 6
                assert sum(queue.name == "e" for _item, queue in held) <= 2
            while any(c.live or c.limiter.waiting() for c in clients):
                await asyncio.sleep(0.002)
                for c in clients:
                    c.end(len(c.live))
            await quiet(server, traffic, *clients)
            stats = server.stats()
            assert (stats["running"], stats["waiting"]) == (0, 0)
            assert stats["peak"] <= 6
            assert all(len(c.lost) == 1 for c in dead)

    run(body)


# --- whole agents ---------------------------------------------------------------------------------------------------


def samples(groups: int, n: int, first: int = 0) -> Batch:
    rows = [(g, i) for g in range(first, first + groups) for i in range(n)]
    texts = [f"{g}.{i}" for g, i in rows]
    columns = {"response_text": texts, "data_source": ["d"] * len(rows), "ground_truth": texts}
    return Batch([g for g, _ in rows], columns)


def test_two_agents_score_all_and_never_more_at_once_than_one_may() -> None:
    now = most = 0

    async def score(ground_truth: str, **_others: Any) -> float:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.001)
        now -= 1
        return float(ground_truth)

    async def body() -> None:
        limits = Limits(8)
        server = LimitServer(limits)
        address = await server.open()
        agents = [RewardAgent(score, limits=limits, shared=SharedLimits(address, f"{i}").queue) for i in range(2)]
        for i, agent in enumerate(agents):
            agent.submit(1, samples(20, 4, first=100 * i))
            agent.submit("val:1", samples(5, 2))
        got = await asyncio.gather(*(agent.collect(step) for agent in agents for step in (1, "val:1")))
        for rewards in got:
            wanted = [g + i / 10 for g, i in ((r["group"], r["sample"]) for r in rewards.meta["records"])]
            assert rewards["score"].tolist() == pytest.approx(wanted)
        assert most == 8
        assert server.stats()["peak"] == 8
        for agent in agents:
            await agent.close()
        await server.close()

    run(body)


def test_a_cancelled_step_of_one_agent_lets_the_other_go_on() -> None:
    gate = asyncio.Event()

    async def score(solution_str: str, **_others: Any) -> float:
        if int(solution_str.split(".")[0]) >= 100:
            await gate.wait()
        return 1.0

    async def body() -> None:
        limits = Limits(2)
        server = LimitServer(limits)
        address = await server.open()
        a, b = (RewardAgent(score, limits=limits, shared=SharedLimits(address, name).queue) for name in "ab")
        a.submit(1, samples(50, 2, first=100))
        waiting: Awaitable[Batch] = asyncio.ensure_future(a.collect(1))
        while a.stats()["running"] < 2:
            await asyncio.sleep(0.001)
        b.submit(2, samples(3, 2))
        a.cancel(1)
        with pytest.raises(RewardFailed, match="cancelled"):
            await waiting
        assert len(await b.collect(2)) == 6
        for agent in (a, b):
            await agent.close()
        await server.close()

    run(body)


def test_an_agent_that_loses_the_server_fails_its_steps() -> None:
    async def score(**_others: Any) -> float:
        await asyncio.sleep(60)
        return 1.0

    async def body() -> None:
        limits = Limits(2)
        server = LimitServer(limits)
        agent = RewardAgent(score, limits=limits, shared=SharedLimits(await server.open(), "a").queue)
        agent.submit(1, batch)
        while agent.stats()["running"] < 2:
            await asyncio.sleep(0.001)
        await server.close()
        try:
            with pytest.raises(RewardFailed, match="the server of the job's shared reward limits"):
                await agent.collect(1)
        finally:
            await agent.close()

    batch = samples(4, 2)  # what it imports takes longer than the deadline
    run(body, deadline_s=3.0)


def test_messages_are_plain_json(traffic: Traffic) -> None:
    async def body() -> None:
        async with serving(Limits(1), clients=1) as (server, a):
            await quiet(server, traffic, a)
            heard = traffic.heard[traffic.of(a)]
            before = len(heard)
            a.push(1)
            await a.until(lambda: a.live)
            assert json.loads(b"".join(heard[before:])) == {"grants": [1], "levels": []}
            assert server.stats()["holders"] == {"agent 0": 1}

    run(body)
