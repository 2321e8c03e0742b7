"""The actors of a service: one per rank, with their GPUs, addresses and environment."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dataflow.cluster.answer import first_failure
from dataflow.cluster.gpus import Gpus
from dataflow.cluster.process import DEATH_REASON
from dataflow.executors.ray.host import Host, WaitingHost
from dataflow.graph import Hosted
from dataflow.system import clock
from dataflow.system.supervisor import report


class Actors:
    """The actors of one service, in order of rank; empty until they are placed.

    Args:
        spec: the service.
        threads: OMP threads in each process.
        imports: modules that each process imports before it builds the service.
    """

    def __init__(self, spec: Hosted, threads: int, imports: Sequence[str] = ()) -> None:
        self._spec = spec
        self._threads = threads
        self._imports = tuple(imports)
        self._actors: list[Any] = []
        self._gpus: list[Gpus] = []
        self._addresses: list[tuple[str, int]] = []
        self._reasons = tempfile.TemporaryDirectory(prefix="dataflow-")
        report(temporary=self._reasons.name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._actors)

    @property
    def first(self) -> Any:
        """Rank 0."""
        return self._actors[0]

    async def place(self) -> None:
        """Starts the actors and waits until they are up, with their GPUs."""
        import ray

        spec = self._spec
        # Ray names a process after its class, so 'ps' and 'top' show the service that it hosts.
        base = WaitingHost if spec.concurrent else Host
        kind = ray.remote(type(spec.name, (base,), {"__module__": __name__}))
        how = {"max_concurrency": 1000} if spec.concurrent else {}
        self._gpus = [Gpus(spec.gpus, spec.devices) for _ in range(spec.ranks)]
        self._actors = [kind.options(**gpus.options, **how).remote() for gpus in self._gpus]
        self._addresses = await first_failure([actor.address.remote() for actor in self])

    async def build(self, blobs: Sequence[bytes]) -> None:
        """Builds the service with its stages in every actor; starts the actors first unless they are placed.

        Args:
            blobs: service and stages, as :func:`~dataflow.cluster.pickling.pickled` returns them; of all but the first
                only the stages are added.
        """
        if not self._actors:
            await self.place()
        first, *further = blobs
        await first_failure(
            [
                actor.build.remote(first, self._environment(rank), clock.anchor(), self._imports, *gpus.seen)
                for rank, (actor, gpus) in enumerate(zip(self._actors, self._gpus, strict=True))
            ]
        )
        for blob in further:
            await first_failure([actor.add.remote(blob) for actor in self])

    def _environment(self, rank: int) -> dict[str, str]:
        address, port = self._addresses[0]
        return {
            "OMP_NUM_THREADS": str(self._threads),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self._spec.ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TOKENIZERS_PARALLELISM": "false",
            DEATH_REASON: str(Path(self._reasons.name) / str(rank)),
        }

    def death_reason(self) -> str:
        """Returns, once, why processes of the service were ended on purpose; empty if no reason was recorded."""
        files = sorted(Path(self._reasons.name).glob("*"))
        reasons = [file.read_text() for file in files]
        for file in files:
            file.unlink()
        return " ".join(reasons)

    def kill(self) -> None:
        """Kills the actors and releases their GPUs."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        for gpus in self._gpus:
            gpus.release()
        self._actors, self._gpus = [], []
