"""Least load: which of several equal engines or servers draws the next sample."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

_HOMES = 10_000
"""Groups whose server is remembered."""
S = TypeVar("S", bound=Hashable)


class LeastLoad(Generic[S]):
    """Gives servers to samples, in the order in which these ask; a server with ``slots`` samples gets no more.

    A group goes to the server with the fewest samples, the first one among equals, and all of it there, later turns of
    its conversations too, as they share the beginning of their prompt in that server's prefix cache. When that server
    is full, they take a slot of another one that no other samples take. ``open`` has the servers in use, at first all;
    samples that wait ``wait_s`` seconds while there is none end with the error that ``lost`` makes.
    """

    def __init__(
        self, servers: Sequence[S], slots: int, wait_s: float = 0.0, lost: Callable[[], Exception] = RuntimeError
    ) -> None:
        self.open = list(servers)
        self._servers, self._loads, self._slots = list(servers), dict.fromkeys(servers, 0), slots
        self._homes: dict[Hashable, S] = {}
        self._waiting: dict[asyncio.Future[S], Hashable] = {}  # the group of each
        self._wait_s, self._lost = wait_s, lost
        self._limit: asyncio.TimerHandle | None = None

    async def take(self, group: Hashable) -> S:
        """Returns the server for a sample of a group, which must be given back; waits until one has a slot."""
        coming: asyncio.Future[S] = asyncio.get_running_loop().create_future()
        self._waiting[coming] = group
        self._assign()
        try:
            return await coming
        except asyncio.CancelledError:
            if not coming.cancelled() and coming.exception() is None:
                self.give_back(coming.result())
            raise
        finally:
            self._waiting.pop(coming, None)

    def give_back(self, server: S) -> None:
        """Ends a sample of a server."""
        self._loads[server] -= 1
        self._assign()

    def set_open(self, server: S, is_open: bool) -> None:
        """Takes a server into use, or out of it; its samples stay there."""
        self.open = [each for each in self._servers if (is_open if each is server else each in self.open)]
        self._assign()

    def _assign(self) -> None:
        if self._limit is not None and (self.open or not self._waiting):
            self._limit.cancel()
            self._limit = None
        elif self._limit is None and self._waiting and not self.open:
            self._limit = asyncio.get_running_loop().call_later(self._wait_s, self._end)
        for moves in (False, True):  # from a home that is full, to slots that no other sample takes
            while free := self._free():
                waiting = (each for each, group in self._waiting.items() if moves or self._goes(group, free))
                coming = next((each for each in waiting if not each.done()), None)
                if coming is None:
                    break
                group = self._waiting.pop(coming)
                home = self._homes.get(group)
                server = home if home is not None and home in free else min(free, key=self._loads.__getitem__)
                self._loads[server] += 1
                self._homes[group] = server
                coming.set_result(server)
        while len(self._homes) > _HOMES:
            del self._homes[next(iter(self._homes))]

    def _free(self) -> list[S]:
        return [server for server in self.open if self._loads[server] < self._slots]

    def _goes(self, group: Hashable, free: Sequence[S]) -> bool:
        """Whether a group has no server, or one that is out of use or has a slot."""
        home = self._homes.get(group)
        return home in free or home not in self.open

    def _end(self) -> None:
        self._limit = None
        waiting, self._waiting = self._waiting, {}
        for coming in waiting:
            with suppress(asyncio.InvalidStateError):  # its caller was cancelled
                coming.set_exception(self._lost())
