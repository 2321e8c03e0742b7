"""A relay: one address for a server that moves."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from dataflow.errors import RunError
from dataflow.rewards.models.placed.relay import Relay
from dataflow.system.loopback import ADDRESS
from tests.rigs.addresses import OTHERS

pytestmark = pytest.mark.timeout(30)


class Server:
    """Repeats each line that it gets, behind its name; a thread, with a listening socket that closes with it."""

    def __init__(self, name: bytes) -> None:
        self.name, self.loop, up = name, asyncio.new_event_loop(), threading.Event()
        self.port = 0
        self.thread = threading.Thread(target=self._run, args=(up,), daemon=True)
        self.thread.start()
        assert up.wait(10)

    def _run(self, up: threading.Event) -> None:
        async def body() -> None:
            self.ended = asyncio.Event()
            server = await asyncio.start_server(self._repeat, ADDRESS, 0)
            self.port = server.sockets[0].getsockname()[1]
            up.set()
            await self.ended.wait()
            server.close()

        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(body())

    async def _repeat(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(self.name + line)
            if line == b"bye\n":
                break
        writer.close()

    def close(self) -> None:
        with suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join(10)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made = [Server(b"a:"), Server(b"b:")]
    yield made
    for server in made:
        server.close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    made = Relay(ADDRESS)
    yield made
    made.close()


def connected(relay: Relay) -> socket.socket:
    found = socket.create_connection((ADDRESS, int(relay.url.rpartition(":")[2])), timeout=10)
    found.settimeout(10)
    return found


def said(connection: socket.socket, line: bytes) -> bytes:
    """Sends a line; returns the answer, b"" if the connection is closed."""
    try:
        connection.sendall(line + b"\n")
        return connection.makefile("rb").readline().rstrip()
    except ConnectionError:
        return b""


def test_a_connection_is_passed_on_both_ways(relay: Relay, servers: list[Server]) -> None:
    relay.lead_to((ADDRESS, servers[0].port))
    with connected(relay) as one, connected(relay) as two:
        long = b"x" * 60_000
        assert said(one, b"1") == b"a:1"
        assert said(two, b"2") == b"a:2"
        assert said(one, long) == b"a:" + long
        assert said(two, b"bye") == b"a:bye"
        assert two.recv(10) == b""  # the server has ended it


@pytest.mark.parametrize("address", OTHERS)
def test_it_listens_at_the_address_of_its_node(address: str, servers: list[Server]) -> None:
    relay = Relay(address)
    try:
        relay.lead_to((ADDRESS, servers[0].port))
        at = urlsplit(relay.url)
        assert at.hostname == address
        with socket.create_connection((address, at.port or 0), timeout=10) as client:
            assert said(client, b"1") == b"a:1"
    finally:
        relay.close()


def test_connections_end_when_the_server_moves(relay: Relay, servers: list[Server]) -> None:
    relay.lead_to((ADDRESS, servers[0].port))
    with connected(relay) as old:
        assert said(old, b"1") == b"a:1"
        relay.lead_to((ADDRESS, servers[1].port))
        assert said(old, b"2") == b""
    with connected(relay) as new:
        assert said(new, b"3") == b"b:3"


def test_without_a_server_a_connection_is_closed_at_once(relay: Relay, servers: list[Server]) -> None:
    with connected(relay) as early:
        assert said(early, b"1") == b""
    servers[0].close()
    relay.lead_to((ADDRESS, servers[0].port))  # nothing listens there any more
    with connected(relay) as late:
        assert said(late, b"1") == b""


def test_a_relay_that_is_closed_refuses_and_ends_what_is_open(relay: Relay, servers: list[Server]) -> None:
    relay.lead_to((ADDRESS, servers[0].port))
    with connected(relay) as one:
        assert said(one, b"1") == b"a:1"
        relay.close()
        assert said(one, b"2") == b""
    with pytest.raises(ConnectionRefusedError):
        connected(relay)
    relay.lead_to(None)
    relay.close()


def answering_once(relay: Relay, answer: Callable[[socket.socket], None]) -> threading.Thread:
    """Makes a relay lead to a server of one connection; returns its thread."""
    listener = socket.create_server((ADDRESS, 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.settimeout(10)
            answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    relay.lead_to(listener.getsockname())
    return thread


def test_a_client_that_has_sent_all_gets_its_answer(relay: Relay) -> None:
    def count(connection: socket.socket) -> None:
        total = sum(len(piece) for piece in iter(lambda: connection.recv(4096), b""))
        connection.sendall(b"got %d, " % total + b"y" * 1_000_000)

    serving = answering_once(relay, count)
    with connected(relay) as one:
        one.sendall(b"x" * 100)
        one.shutdown(socket.SHUT_WR)
        got = b"".join(iter(lambda: one.recv(1 << 16), b""))
    assert got == b"got 100, " + b"y" * 1_000_000
    serving.join(10)


def test_a_reply_that_breaks_does_not_pass_for_a_whole_one(relay: Relay, servers: list[Server]) -> None:
    def reset(connection: socket.socket) -> None:
        connection.sendall(connection.recv(100))
        connection.recv(100)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    serving = answering_once(relay, reset)
    with connected(relay) as one:
        one.sendall(b"half")
        assert one.recv(100) == b"half"
        one.sendall(b"now")
        with pytest.raises(ConnectionResetError):
            one.recv(100)
    serving.join(10)
    relay.lead_to((ADDRESS, servers[0].port))
    with connected(relay) as moved:
        assert said(moved, b"1") == b"a:1"
        relay.lead_to(None)
        with pytest.raises(ConnectionResetError):
            moved.recv(100)


@pytest.mark.parametrize("what", ["address", "thread", "server"])
def test_a_relay_that_cannot_start_leaves_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_server(*_: object, **_options: object) -> None:
        raise OSError("too many files")

    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made: list[socket.socket] = []
    create = socket.create_server

    def listen(*arguments: object, **options: object) -> socket.socket:
        made.append(create(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(socket, "create_server", listen)
    if what == "thread":
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    if what == "server":
        monkeypatch.setattr(asyncio, "start_server", no_server)
    with pytest.raises(RunError, match=r"no relay to their servers can listen at \S+ \(.+\); mend that"):
        Relay("192.0.2.1" if what == "address" else ADDRESS)
    assert all(listener.fileno() == -1 for listener in made)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("relay ") and what == "thread"]
