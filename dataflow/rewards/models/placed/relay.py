"""An address that stays the same while the server behind it moves: passes connections on, byte by byte.

Clients get the addresses of servers when they are built. The replacement of a server whose node is lost has another
address, so what clients get is that of a relay in the run's own process.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from concurrent.futures import Future
from contextlib import suppress

from dataflow.errors import RunError
from dataflow.system.address import host_port, listening

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
        self._server: tuple[str, int] | None = None
        self._open: set[asyncio.Task[None]] = set()
        try:
            self._listener = listening(address, backlog=BACKLOG)
        except OSError as error:
            raise _closed(address, error) from error
        self.url = f"http://{host_port(address, self._listener.getsockname()[1])}"
        up: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(up,), name=f"relay {self.url}", daemon=True)
        try:
            self._loop = asyncio.new_event_loop()
            try:
                self._thread.start()
            except BaseException:
                self._loop.close()
                raise
            up.result(_OPEN_S)
        except Exception as error:  # too many files or threads; a time-out
            self._listener.close()
            raise _closed(address, error) from error

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

    def _run(self, up: Future[None]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                server = runner.run(asyncio.start_server(self._accept, sock=self._listener, backlog=BACKLOG))
            except BaseException as error:
                up.set_exception(error)
                return
            up.set_result(None)
            self._loop.run_forever()
            server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._open.add(connection)
        try:
            await self._pass_on(reader, writer)
        except* (OSError, asyncio.CancelledError):  # one end has broken; it leads to another server now, or is closed
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
            for end in (writer, requests):
                end.close()
                await end.wait_closed()  # it has sent all
        except BaseException:
            _reset(writer)
            raise
        finally:
            _reset(requests)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copies until the source ends, and ends this direction of the sink then; raises OSError if one of them breaks."""
    while piece := await source.read(_PIECE_BYTES):
        sink.write(piece)
        await sink.drain()
    sink.write_eof()


def _reset(end: asyncio.StreamWriter) -> None:
    """Breaks a connection unless it has ended, so that a reply that is not whole does not pass for one that is."""
    with suppress(OSError):
        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.transport.abort()


def _closed(address: str, error: Exception) -> RunError:
    why = str(error) or type(error).__name__
    return RunError(
        f"reward models: no relay to their servers can listen at {address} ({why}); mend that, and run again."
    )
