"""Least load: which of several equal engines or servers draws the next samples."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

_HOMES = 10_000
"""Groups whose server is remembered."""
S = TypeVar("S", bound=Hashable)


@dataclass(eq=False)
class _Waiter(Generic[S]):
    group: Hashable
    avoided: Collection[S]
    samples: int
    server: asyncio.Future[S]


class LeastLoad(Generic[S]):
    """Gives servers to samples, in the order in which these ask; a server with ``slots`` samples gets no more.

    A group goes to the server with the fewest samples, the first one among equals, and all of it there, later turns of
    its conversations too, as they share the beginning of their prompt in that server's prefix cache. When that server
    is full, they take a slot of another one that no other samples take.

    Args:
        servers: all of them, each in use until it is closed.
        slots: samples at one server.
        wait_s: seconds that samples wait while no server is in use.
        lost: makes the error that they end with then.
    """

    def __init__(
        self, servers: Sequence[S], slots: int, wait_s: float = 0.0, lost: Callable[[], Exception] = RuntimeError
    ) -> None:
        self._loads, self._slots = dict.fromkeys(servers, 0), slots
        self._is_open = dict.fromkeys(servers, True)
        self._homes: dict[Hashable, S] = {}
        self._waiting: deque[_Waiter[S]] = deque()
        self._wait_s, self._lost = wait_s, lost
        self._limit: asyncio.TimerHandle | None = None
        self._held = False

    @property
    def open(self) -> list[S]:
        """The servers in use."""
        return [server for server, is_open in self._is_open.items() if is_open]

    async def take(self, group: Hashable, avoided: Collection[S] = (), samples: int = 1) -> S:
        """Returns the server for samples, which must be given back; waits until one has a slot.

        Args:
            group: of the samples.
            avoided: servers to take only if all in use are among them; such a sample goes before those that wait.
            samples: number of them; they may exceed the server's slots.

        Raises:
            Exception: ``lost()``, as no server was in use for too long.
        """
        waiter = _Waiter(group, avoided, samples, asyncio.get_running_loop().create_future())
        (self._waiting.appendleft if avoided else self._waiting.append)(waiter)
        self._assign()
        try:
            server: S = await waiter.server
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.server.cancelled() and waiter.server.exception() is None:
                self.give_back(waiter.server.result(), samples)
            self._assign()
            raise
        return server

    def give_back(self, server: S, samples: int = 1) -> None:
        """Ends samples of a server."""
        self._loads[server] -= samples
        self._assign()

    def set_open(self, server: S, is_open: bool) -> None:
        """Takes a server into use, or out of it; its samples stay there."""
        self._is_open[server] = is_open
        self._assign()

    @contextmanager
    def held(self, servers: Sequence[S]) -> Iterator[None]:
        """Takes servers out of use; in the block, samples wait as long as it takes."""
        self._held = True
        for server in servers:
            self.set_open(server, False)
        try:
            yield
        finally:
            self._held = False
            self._assign()

    def _assign(self) -> None:
        able = self.open
        if self._limit is not None and (able or self._held or not self._waiting):
            self._limit.cancel()
            self._limit = None
        elif self._limit is None and self._waiting and not (able or self._held):
            self._limit = asyncio.get_running_loop().call_later(self._wait_s, self._end)
        for moves in (False, True):  # from a home that is full, to slots that no other sample takes
            for waiter in list(self._waiting):
                if all(self._loads[server] >= self._slots for server in able):
                    break
                wanted = [server for server in able if server not in waiter.avoided] or able
                home = self._homes.get(waiter.group)
                stays = home in wanted and not (moves and self._loads[home] >= self._slots)
                server = home if stays else min(wanted, key=self._loads.__getitem__)
                if server is not None and self._loads[server] < self._slots and not waiter.server.done():
                    self._waiting.remove(waiter)
                    self._loads[server] += waiter.samples
                    self._homes[waiter.group] = server
                    waiter.server.set_result(server)
        while len(self._homes) > _HOMES:
            del self._homes[next(iter(self._homes))]

    def _end(self) -> None:
        self._limit = None
        waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if not waiter.server.done():
                waiter.server.set_exception(self._lost())
