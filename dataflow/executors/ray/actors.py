"""The actors of a service: one per process, with their nodes, GPUs, addresses and environment."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.errors import ConfigError
from dataflow.executors.ray.answers import first_failure
from dataflow.executors.ray.host import WORKING_DIRECTORY, Host, Place
from dataflow.executors.ray.nodes import NODE_ID, Cluster, Labels, Places, lacking
from dataflow.graph import Hosted
from dataflow.system.frozen import DEATH_REASON
from dataflow.system.loopback import NODE_ADDRESS
from dataflow.system.supervisor import report


class Actors:
    """The actors of one service, in order of rank; none until they are placed.

    ``cluster`` is None if the run has started its own Ray, on this machine. Processes that are ``apart`` know nothing
    of each other, as the replicas of an engine.
    """

    def __init__(self, spec: Hosted, threads: int, cluster: Cluster | None = None, apart: bool = False) -> None:
        self._spec, self._threads, self._cluster, self._apart = spec, threads, cluster, apart
        self._labels: Labels | None = None
        if cluster is not None:
            own = {NODE_ID: cluster.here} if spec.here else {}
            self._labels = cluster.labels.get(spec.name, own)
        self.handles: list[Any] = []
        self._reserved: Places | None = None
        self._places: list[Place] = []
        # In the run's directory, which all nodes of such a service see: why one froze is read here.
        self._shared = None if cluster is None or not spec.run_directory else cluster.directory
        stem = f"{self._shared or '/tmp'}/dataflow-{secrets.token_hex(8)}"
        self._reasons = [f"{stem}-{rank}" for rank in range(spec.ranks)]
        self.freezes = 0
        for path in self._reasons:
            report(temporary=path)

    async def place(self) -> None:
        """Starts the actors and waits until they are up, with their GPUs, on nodes that see the run's directory."""
        import ray

        spec = self._spec
        # Ray names a process after its class, so 'ps' and 'top' show the service that it hosts.
        kind = ray.remote(type(spec.name, (Host,), {"__module__": __name__}))
        how = {"max_concurrency": 1000 if spec.concurrent else 1}
        self._reserved = Places(spec.ranks, spec.gpus, spec.devices, self._labels)
        if shortage := self.lacking():
            logger.warning("'{}' waits for nodes: {}.", spec.name, shortage)
        self.handles = [kind.options(**options, **how).remote() for options in self._reserved.options]
        self._places = await first_failure([actor.place.remote() for actor in self.handles])
        if self._cluster is not None and len(ray.nodes()) > 1:
            found = Counter(place.address for place in self._places)
            where = "; ".join(f"{address} x {number}" for address, number in found.items())
            logger.info("'{}' runs on {}", spec.name, where)
            if spec.run_directory and self._cluster.directory is not None:
                await self._check_directory(self._cluster.directory)

    async def _check_directory(self, directory: str) -> None:
        """Checks that all nodes see a file that is made in the run's directory: theirs may be another one."""
        marker = Path(directory) / f".shared.{secrets.token_hex(8)}"
        marker.touch()
        try:
            for place, actor in zip(self._places, self.handles, strict=True):
                if not self._is_here(place) and not await actor.sees.remote(str(marker)):
                    name = self._spec.name
                    raise ConfigError(
                        f"runs={directory}: node {place.address}, where '{name}' runs, does not see this directory of "
                        f"this machine; give runs= on a disk that all nodes share, or ray.nodes.{name} labels of this "
                        "machine's node."
                    )
        finally:
            marker.unlink(missing_ok=True)

    def _is_here(self, place: Place) -> bool:
        return self._cluster is None or place.node == self._cluster.here

    def lacking(self) -> str:
        """Returns what the nodes of a cluster lack for the service, as a clause; "" if nothing is known."""
        import ray

        if self._labels is None or self._reserved is None:
            return ""
        return lacking(self._labels, self._spec.ranks, self._reserved.bundle, ray.nodes())

    async def build(self, blob: bytes) -> None:
        """Builds the pickled service with its stages in every actor; starts the actors first unless they are placed."""
        if not self.handles:
            await self.place()
        assert self._reserved is not None
        ranks = enumerate(zip(self.handles, self._reserved.seen, strict=True))
        await first_failure([actor.build.remote(blob, self._environment(rank), *seen) for rank, (actor, seen) in ranks])

    def _environment(self, rank: int) -> dict[str, str]:
        own = self._places[rank]
        meeting = own if self._apart else self._places[0]
        return {
            "OMP_NUM_THREADS": str(self._threads),
            "RANK": "0" if self._apart else str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1" if self._apart else str(self._spec.ranks),
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": str(meeting.port),
            NODE_ADDRESS: own.address,
            WORKING_DIRECTORY: os.getcwd(),
            "TOKENIZERS_PARALLELISM": "false",
            DEATH_REASON: self._reasons[rank],
        }

    def death_reason(self) -> str:
        """Returns, once, why user code froze a process, and logs its stacks; "" if it is not known that one froze."""
        for place, path in zip(self._places, self._reasons, strict=False):
            if self._shared is not None or self._is_here(place):
                with suppress(FileNotFoundError):
                    why, _, stacks = Path(path).read_text().partition("\n")
                    os.unlink(path)
                    if stacks:
                        self.freezes += 1
                        logger.error("'{}' froze; its threads were at:\n{}", self._spec.name, stacks.rstrip())
                        return why
        return ""

    def kill(self) -> None:
        """Kills the actors and releases their nodes and GPUs."""
        import ray

        for actor in self.handles:
            ray.kill(actor)
        if self._reserved is not None:
            self._reserved.release()
        self.handles, self._reserved, self._places = [], None, []
