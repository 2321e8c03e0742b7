"""Where one server of a reward model runs, and how it is started there: on this machine, or on a node of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from dataflow.rewards.models.gpus import VISIBLE
from dataflow.rewards.models.server import ModelServer, Port, server_environment
from dataflow.system.address import host_port
from dataflow.system.kept import Process
from dataflow.system.loopback import ADDRESS


class ServerProcess(Process, Protocol):
    """The process of a server."""

    @property
    def killed(self) -> bool:
        """Whether nothing that a new one would meet again has ended it."""

    def reason(self) -> str:
        """Returns why it ended or did not start.

        Raises:
            RunError: another one cannot start either.
        """


class Site(Protocol):
    """The place of one server."""

    @property
    def url(self) -> str:
        """Address of the server, which does not change."""

    def start(self, log: Path, start_s: float, on_ready: Callable[[], None], hang_s: float) -> ServerProcess:
        """Starts the server, which is waited for later.

        Args:
            log, start_s, on_ready, hang_s: see :class:`~dataflow.rewards.models.server.ModelServer`.
        """

    def close(self) -> None:
        """Gives the place back, after the server has ended."""


class LocalSite:
    """A place on this machine.

    Args:
        command: returns the command line of a server at a port.
        environment: all variables of the server.
        address: where it listens.
    """

    def __init__(
        self, command: Callable[[int], Sequence[str]], environment: Mapping[str, str], address: str = ADDRESS
    ) -> None:
        self._command, self._environment, self._address = command, environment, address
        self._port = Port(address)
        self.port = self._port.number
        self.url = f"http://{host_port(address, self.port)}"

    def start(self, log: Path, start_s: float, on_ready: Callable[[], None], hang_s: float) -> ModelServer:
        """See :class:`Site`."""
        words, address = self._command(self.port), self._address
        return ModelServer(words, self.port, log, self._environment, start_s, on_ready, hang_s, address)

    def close(self) -> None:
        """See :class:`Site`."""
        self._port.close()


@dataclass(frozen=True)
class ServerPlan:
    """What the servers of one model run, wherever they are.

    Attributes:
        command: returns the command line of a server at a port, with the keyword ``host`` its address.
        device: ``cpu`` or ``cuda``.
        threads: CPU threads of a server on a CPU.
        sleeps: whether it must be able to free its GPU's memory.
        directory: working directory, to which relative paths refer.
    """

    command: Callable[..., Sequence[str]]
    device: str
    threads: int = 1
    sleeps: bool = False
    directory: str = "."

    def site(self, address: str, gpus: str | None = None) -> LocalSite:
        """Returns a place for it on this machine.

        Args:
            address: where it listens.
            gpus: its CUDA_VISIBLE_DEVICES; None for those of this process.
        """
        environment = server_environment(self.device, self.threads, self.sleeps)
        if gpus is not None:
            environment[VISIBLE] = gpus
        return LocalSite(partial(self.command, host=address), environment, address)
