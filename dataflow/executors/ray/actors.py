"""The processes of a hosted tool: an actor per rank, where they are and what they see of the machine."""

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
    """The actors of one tool, in order of their ranks; none until they are placed.

    Args:
        spec: the tool.
        threads: OMP threads in each process.
    """

    def __init__(self, spec: Hosted, threads: int) -> None:
        self._spec = spec
        self._threads = threads
        self._actors: list[Any] = []
        self._gpus: list[Gpus] = []
        self._addresses: list[tuple[str, int]] = []
        self._words = tempfile.TemporaryDirectory(prefix="dataflow-")
        report(temporary=self._words.name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._actors)

    @property
    def first(self) -> Any:
        """Rank 0."""
        return self._actors[0]

    async def place(self) -> None:
        """Starts them, and waits until they have their GPUs and are up."""
        import ray

        spec = self._spec
        # Ray calls a process by its class: 'ps' and 'top' then show which tool it hosts.
        base = WaitingHost if spec.concurrent else Host
        kind = ray.remote(type(spec.name, (base,), {"__module__": __name__}))
        how = {"max_concurrency": 1000} if spec.concurrent else {}
        self._gpus = [Gpus(spec.gpus, spec.devices) for _ in range(spec.ranks)]
        self._actors = [kind.options(**gpus.options, **how).remote() for gpus in self._gpus]
        self._addresses = await first_failure([actor.address.remote() for actor in self])

    async def build(self, blobs: Sequence[bytes]) -> None:
        """Builds the tool in each, with its stages; starts those that are not placed.

        Args:
            blobs: tool and stages as :func:`~dataflow.cluster.pickling.pickled`, further ones for their stages.
        """
        if not self._actors:
            await self.place()
        first, *further = blobs
        await first_failure(
            [
                actor.build.remote(first, self._environment(rank), clock.anchor(), *gpus.seen)
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
            DEATH_REASON: str(Path(self._words.name) / str(rank)),
        }

    def last_words(self) -> str:
        """Returns, once, why a process of the tool was ended from outside; nothing if it left no word of that."""
        files = sorted(Path(self._words.name).glob("*"))
        words = [file.read_text() for file in files]
        for file in files:
            file.unlink()
        return " ".join(words)

    def kill(self) -> None:
        """Ends them, and gives their GPUs back."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        for gpus in self._gpus:
            gpus.release()
        self._actors, self._gpus = [], []
