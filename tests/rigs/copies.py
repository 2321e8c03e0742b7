"""The processes that Ray's workers are copies of, kept from one Ray to the next: each takes seconds to import torch."""

from __future__ import annotations

from collections.abc import Sequence

from dataflow.cluster.fork_server import ForkServer


class Kept(ForkServer):
    """One that stays when a run has ended."""

    def close(self) -> None:
        """See :meth:`ForkServer.close`; does nothing."""


class Copies:
    """The processes of one pytest worker, one for each list of modules."""

    def __init__(self) -> None:
        self._servers: dict[tuple[tuple[str, ...], int], Kept] = {}

    def of(self, modules: Sequence[str], threads: int = 1) -> ForkServer:
        """Returns the process that has imported these modules; starts it if there is none."""
        key = (tuple(modules), threads)
        if key not in self._servers:
            self._servers[key] = Kept(modules, threads)
        return self._servers[key]

    def close(self) -> None:
        """Ends them all."""
        for server in self._servers.values():
            ForkServer.close(server)
