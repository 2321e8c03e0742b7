"""An address that stays the same while the server behind it moves: passes connections on, byte by byte.

Clients get the addresses of servers when they are built. The replacement of a server whose node is lost has another
address, so what clients get is that of a relay in the run's own process.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress

BACKLOG = 4096
"""Connections that may wait to be accepted."""
_CONNECT_S = 10.0
_PIECE_BYTES = 1 << 16
_OPEN_S = 30.0
"""Seconds for the thread's start and end."""


class Relay:
    """Passes connections on to a server, on a thread of its own.

    While there is no server, it closes connections at once, which a client sees as a server that is down.

    Args:
        address: where it listens, at a free port.

    Attributes:
        url: of it.
    """

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=BACKLOG)
        self.url = f"http://{address}:{self._listener.getsockname()[1]}"
        self._server: tuple[str, int] | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(up,), name=f"relay {self.url}", daemon=True)
        self._thread.start()
        up.wait(_OPEN_S)

    def lead_to(self, server: tuple[str, int] | None) -> None:
        """Sets the address and the port of the server, and ends the connections to another one; from any thread."""
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._lead_to, server)

    def _lead_to(self, server: tuple[str, int] | None) -> None:
        if server != self._server:
            self._server = server
            for connection in self._open:
                connection.cancel()

    def close(self) -> None:
        """Ends all connections and the thread; may be called twice."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_OPEN_S)

    def _run(self, up: threading.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            server = runner.run(asyncio.start_server(self._accept, sock=self._listener, backlog=BACKLOG))
            self._loop.call_soon(up.set)
            self._loop.run_forever()
            server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._open.add(connection)
        try:
            await self._pass_on(reader, writer)
        except asyncio.CancelledError:  # it leads to another server now, or it is closed
            pass
        finally:
            self._open.discard(connection)
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:
            return
        try:
            async with asyncio.timeout(_CONNECT_S):
                replies, requests = await asyncio.open_connection(*self._server)
        except OSError:  # a time-out, too: the client sees a broken connection, and tries again
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, requests))
                group.create_task(_copy(replies, writer))
        finally:
            requests.transport.abort()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copies until the source ends, and ends the sink then; a connection that breaks is an end."""
    with suppress(OSError):
        while piece := await source.read(_PIECE_BYTES):
            sink.write(piece)
            await sink.drain()
    with suppress(OSError):
        sink.close()
