"""The actors of a service: one per rank, with their nodes, GPUs, addresses and environment."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.executors.ray.answers import died, fetch, first_failure, peer_lost, unreachable
from dataflow.executors.ray.host import WORKING_DIRECTORY, Host, Place
from dataflow.executors.ray.nodes import NODE_ID, NodeRule, Places, alive, lacking
from dataflow.executors.ray.paths import SharedPaths
from dataflow.graph import Hosted
from dataflow.system.frozen import DEATH_REASON
from dataflow.system.loopback import NODE_ADDRESS
from dataflow.system.supervisor import report

_SETTLED_S = 90.0
"""Seconds after which a node that does not answer counts as lost; by default Ray decides within a minute."""
_LAST_WORDS_S = 20.0
"""Seconds that fetching the reason of a death from another node may take."""


@dataclass(frozen=True)
class Membership:
    """A cluster that the run has joined.

    Attributes:
        here: id of the node of the run's own process; None for a remote client, which is on none.
        rules: for the nodes of services, by service.
        directory: of the run; None if it has none.
    """

    here: str | None = None
    rules: Mapping[str, NodeRule] = field(default_factory=dict)
    directory: str | None = None

    def rule(self, spec: Hosted) -> NodeRule:
        """Returns the rule for a service: the user's, or that it stays on this node if it has to."""
        if spec.name in self.rules or not spec.here or self.here is None:
            return self.rules.get(spec.name, NodeRule())
        return NodeRule({NODE_ID: self.here})


class Actors:
    """The actors of one service, in order of rank; empty until they are placed.

    Args:
        spec: the service.
        threads: OMP threads in each process.
        cluster: that the run has joined; None if the run has started its own Ray, on this machine.
    """

    def __init__(self, spec: Hosted, threads: int, cluster: Membership | None = None) -> None:
        self._spec = spec
        self._threads = threads
        self._cluster = cluster
        self._rule = None if cluster is None else cluster.rule(spec)
        self._actors: list[Any] = []
        self._reserved: Places | None = None
        self._places: list[Place] = []
        self._reasons = tempfile.TemporaryDirectory(prefix="dataflow-")
        self._nonce = secrets.token_hex(8)
        self.freezes = 0
        report(temporary=self._reasons.name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._actors)

    @property
    def first(self) -> Any:
        """Rank 0."""
        return self._actors[0]

    async def place(self) -> None:
        """Starts the actors and waits until they are up, with their GPUs, on nodes that see the service's paths.

        Raises:
            ConfigError: a node does not see a path, or has another version of this package.
        """
        import ray

        spec = self._spec
        # Ray names a process after its class, so 'ps' and 'top' show the service that it hosts.
        kind = ray.remote(type(spec.name, (Host,), {"__module__": __name__}))
        how = {"max_concurrency": 1000 if spec.concurrent else 1}
        self._reserved = Places(spec.ranks, spec.gpus, spec.devices, self._rule)
        if shortage := self.lacking():
            logger.warning("'{}' waits for nodes: {}.", spec.name, shortage)
        self._actors = [kind.options(**options, **how).remote() for options in self._reserved.options]
        self._places = await first_failure([actor.place.remote() for actor in self])
        if self._cluster is not None:
            where = [place.where for place in self._places]
            directory = self._cluster.directory if spec.run_directory else None
            paths = SharedPaths(spec.name, spec.files, directory)
            await paths.check(self._actors, where, self._cluster.here)

    def lacking(self) -> str:
        """Returns what the nodes of a cluster lack for the service, as a clause; "" if nothing is known."""
        import ray

        if self._rule is None or self._reserved is None:
            return ""
        clause = lacking(self._rule, self._spec.ranks, self._reserved.bundle, alive(ray.nodes()))
        given = self._cluster is not None and self._spec.name in self._cluster.rules
        return f"{clause} (ray.nodes.{self._spec.name})" if clause and given else clause

    async def build(self, blobs: Sequence[bytes]) -> None:
        """Builds the service with its stages in every actor; starts the actors first unless they are placed.

        Args:
            blobs: service and stages, as :func:`~dataflow.executors.ray.pickling.pickled` returns them; of all but the
                first only the stages are added.
        """
        if not self._actors:
            await self.place()
        assert self._reserved is not None
        first, *further = blobs
        await first_failure(
            [
                actor.build.remote(first, self._environment(rank), *seen)
                for rank, (actor, seen) in enumerate(zip(self._actors, self._reserved.seen, strict=True))
            ]
        )
        for blob in further:
            await first_failure([actor.add.remote(blob) for actor in self])

    def _environment(self, rank: int) -> dict[str, str]:
        meeting, own = self._places[0], self._places[rank]
        return {
            "OMP_NUM_THREADS": str(self._threads),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self._spec.ranks),
            "MASTER_ADDR": meeting.where.address,
            "MASTER_PORT": str(meeting.port),
            NODE_ADDRESS: own.where.address,
            WORKING_DIRECTORY: os.getcwd(),
            "TOKENIZERS_PARALLELISM": "false",
            DEATH_REASON: self._reason_of(rank),
        }

    def _reason_of(self, rank: int) -> str:
        """Returns the file for the reason of a rank's death, on its node."""
        return f"{self._reasons.name}/{rank}" if self._is_here(rank) else f"/tmp/dataflow-{self._nonce}-{rank}"

    def _is_here(self, rank: int) -> bool:
        return self._cluster is None or self._places[rank].where.node == self._cluster.here

    async def death_reason(self, error: BaseException | None = None) -> str:
        """Returns, once, why processes of the service ended; empty if no reason is known.

        Either user code froze them (:mod:`dataflow.system.frozen`), and a file on their node has why; or their node is
        gone.

        Args:
            error: of a call that failed when they ended.
        """
        if unreachable(error):
            await self._death()
        import ray

        reasons: list[str] = []
        left = {node["NodeID"] for node in alive(ray.nodes())}
        for rank, (where, _port) in enumerate(self._places):
            path = self._reason_of(rank)
            if self._is_here(rank):
                reasons.append(self._frozen(_taken(path)))
            elif where.node not in left:
                reasons.append(f"node {where.address}, where it ran, is gone.")
            else:
                with suppress(Exception):  # the node may be going; the death is reported without a reason
                    async with asyncio.timeout(_LAST_WORDS_S):
                        taken = ray.remote(num_cpus=0, max_retries=0, label_selector={NODE_ID: where.node})(_taken)
                        reasons.append(self._frozen(await fetch(taken.remote(path))))
        return " ".join(dict.fromkeys(filter(None, reasons)))

    def _frozen(self, text: str) -> str:
        """Returns why user code froze a process, and logs its stacks; "" if it ended in another way."""
        why, _, stacks = text.partition("\n")
        if not stacks:
            return ""
        self.freezes += 1
        logger.error("'{}' froze; its threads were at:\n{}", self._spec.name, stacks.rstrip())
        return why

    async def outcome(self, refs: Sequence[Any]) -> list[Any]:
        """Waits for a call of all ranks, or for the first failure.

        Raises:
            Exception: the failure; if another rank has died, that death and not the connection that broke with it.
        """
        try:
            return await first_failure(refs)
        except Exception as error:
            if len(self._actors) > 1 and peer_lost(error) and (death := await self._death()) is not None:
                raise death from error
            raise

    async def _death(self) -> Exception | None:
        """Waits until a process is known to be dead, and returns its error; None if all answer, or time is over.

        Ray knows at once of a process that ended, and after some seconds of a node that is gone.
        """
        asked = [asyncio.ensure_future(_outcome(actor.place.options(max_task_retries=-1).remote())) for actor in self]
        try:
            async with asyncio.timeout(_SETTLED_S):
                for outcome in asyncio.as_completed(asked):
                    if died(error := await outcome):
                        return error
        except TimeoutError:
            logger.warning("'{}' does not answer, and Ray knows of no process that died.", self._spec.name)
        finally:
            for answer in asked:
                answer.cancel()
        return None

    def kill(self) -> None:
        """Kills the actors and releases their nodes and GPUs."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        if self._reserved is not None:
            self._reserved.release()
        self._actors, self._reserved, self._places = [], None, []


async def _outcome(answer: Any) -> Exception | None:
    """Returns the error of a call; None if it answered."""
    try:
        await answer
    except Exception as error:
        return error
    return None


def _taken(path: str) -> str:
    """Returns what a file holds and removes it; "" if there is none."""
    with suppress(FileNotFoundError):
        text = Path(path).read_text()
        os.unlink(path)
        return text
    return ""
