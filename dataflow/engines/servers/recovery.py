"""Recovery: takes servers out of use that fail, brings them back with the current weights, and replaces the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from dataflow.engines.servers.client import ServerError
from dataflow.engines.servers.connect import Wanted, check, connect
from dataflow.engines.servers.server import FREE_FAILURES, Server
from dataflow.errors import ConfigError, RunError, counted

QUIET_S = 30.0
"""Seconds without an answer of a server with requests in flight after which it is probed."""
PROBE_S = 30.0
"""Seconds for the answer to a probe: vLLM answers it between two of its steps."""
_FAILED = 500
_LOADS = 3
"""Tries of a load that fails with status 500, by which vLLM refuses weights, after which it counts as a refusal."""


@dataclass(frozen=True)
class Callbacks:
    """What the pool does about its samples.

    Attributes:
        on_out: called when a server is out of use; its samples that wait for a slot of it go elsewhere.
        on_given_up: called with the reason if it does not answer; its samples in flight go elsewhere. Returns how many.
        on_up: called when a server is in use again.
        on_none: called with an error if no server was in use for too long; the waiting samples end with it.
    """

    on_out: Callable[[Server], None]
    on_given_up: Callable[[Server, ServerError], int]
    on_up: Callable[[], None]
    on_none: Callable[[RunError], None]


class Recovery:
    """The state of the servers, and the weights that they must hold.

    Args:
        servers: none of them connected yet.
        wanted: what each must be.
        wait_s: seconds that samples may wait while no server takes them.
        callbacks: of the pool.
    """

    def __init__(self, servers: Sequence[Server], wanted: Wanted, wait_s: float, callbacks: Callbacks) -> None:
        self._servers, self._wanted, self._wait_s, self._pool = servers, wanted, wait_s, callbacks
        self._awaiting: list[asyncio.Future[None]] = []
        self._limit: asyncio.TimerHandle | None = None
        self._weights: tuple[Path, str] | None = None
        self._task: asyncio.Task[None] | None = None
        """Of the sync that is going on."""
        self._last = servers[0]
        """The last one that has failed."""

    @property
    def label(self) -> str:
        """Of the weights that the servers must hold."""
        return self._weights[1] if self._weights else ""

    def stale(self, version: str) -> ServerError:
        """Returns the error of a server with other weights."""
        return ServerError(
            f"it holds weights '{version}' in place of '{self.label}': it was restarted, or another client changed them"
        )

    # --- servers out of use -------------------------------------------------------------------------------------

    def suspend(self, server: Server, error: ServerError) -> None:
        """Takes a server out of use until a probe finds that it holds the current weights."""
        self.note(server, error)
        if server.watch is not None:
            return
        server.failures += 1
        server.up = False
        server.stop_timers()
        self._pool.on_out(server)
        server.watch = asyncio.get_running_loop().create_task(self._revive(server, error))
        self.limit_wait()

    def note(self, server: Server, error: Exception) -> None:
        """Keeps a failure for messages."""
        server.failure = str(error)
        self._last = server

    async def _revive(self, server: Server, error: Exception) -> None:
        """Probes a server until it holds the current weights, which it gets if it answers with others."""
        given_up = False
        while True:
            await asyncio.sleep(server.wait_s(server.failures - FREE_FAILURES))
            try:
                if connected := given_up or server.protocol is None:  # it may be another one by now
                    await self._connect(server)
                version = await server.spoken().version(PROBE_S)
                if version != self.label:
                    error = self.stale(version)
                    given_up = given_up or self._give_up(server, error)
                    if not connected:
                        await self._connect(server)
                    await self._load(server)
                break
            except Exception as failure:  # whatever it is, the server is out of use until it passes
                error = failure
                self.note(server, error)
                server.failures += 1
                given_up = given_up or self._give_up(server, error)
        if given_up:
            logger.info(f"rollout: server {server.url} is in use again, with the current weights.")
        server.watch = None
        self._take_up(server)

    def _give_up(self, server: Server, error: Exception) -> bool:
        """Sends a server's samples in flight to the others; returns True."""
        number = self._pool.on_given_up(server, error if isinstance(error, ServerError) else ServerError(str(error)))
        logger.warning(
            f"rollout: server {server.url} gets no samples until it answers with the current weights: {error}; "
            f"{counted(number, 'sample')} in flight moved to other servers."
        )
        return True

    def _take_up(self, server: Server) -> None:
        server.up = True
        self.end_limit()
        for future in self._awaiting:
            if not future.done():
                future.set_result(None)
        self._awaiting.clear()
        if server.calls:
            self.listen(server)
        self._pool.on_up()

    def listen(self, server: Server) -> None:
        """Starts the time anew after which a server with requests in flight is probed."""
        if server.quiet is not None:
            server.quiet.cancel()

        def probe() -> None:
            server.quiet = None
            if server.calls and server.up:
                self.suspend(server, ServerError(f"it answered no request for {QUIET_S:g} s"))
                server.failures -= 1  # long samples are no failure

        server.quiet = asyncio.get_running_loop().call_later(QUIET_S, probe)

    def limit_wait(self) -> None:
        """Ends the waiting samples with an error if no server takes any for too long."""
        if self._limit is None and not any(server.available for server in self._servers):
            self._limit = asyncio.get_running_loop().call_later(self._wait_s, self._end_wait)

    def end_limit(self) -> None:
        """Stops the time for which samples may wait: a server takes them again."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _end_wait(self) -> None:
        self._limit = None
        self._pool.on_none(self._none())
        for future in self._awaiting:
            if not future.done():
                future.set_exception(self._none())
        self._awaiting.clear()

    def _none(self) -> RunError:
        number = len(self._servers)
        return RunError(
            f"rollout: none of the {number} servers of engine.urls took a sample for {self._wait_s:g} s "
            f"(engine.server_wait), the last with {self._last.url}: "
            f"{self._last.failure}; start them, then resume the run."
        )

    # --- weights ------------------------------------------------------------------------------------------------

    async def sync(self, directory: Path, label: str) -> None:
        """Makes all servers load weights, in which nothing may be in flight; returns once one of them has.

        Those that are out of use, or fail, follow when they can.

        Args:
            directory: with the weights; it must stay until the next sync.
            label: of the weights, which no other weights have.

        Raises:
            RunError: all servers refuse the weights, or none answers for ``wait_s``. The servers must hold the weights
                of before then, which they get again.
            ConfigError: a server cannot serve the run, at the first sync; later such a server is out of use.
        """
        before = self._weights
        await self._end_watches()
        self._weights = (directory, label)
        self._task = asyncio.current_task()
        try:
            await self._spread(before)
        except (RunError, ConfigError):
            await self._end_watches()
            self._weights = before
            for server in self._servers if before is not None else ():
                if not server.up:
                    server.failures = 0  # with the new weights, not those that it gets again
                    self.suspend(server, ServerError(server.failure))
            raise
        finally:
            self._task = None

    async def _spread(self, before: tuple[Path, str] | None) -> None:
        assert self._weights is not None
        directory, _label = self._weights
        taking = [server for server in self._servers if server.up or before is None]
        answers = await asyncio.gather(*(self._give(server, before) for server in taking), return_exceptions=True)
        failed = dict(zip(taking, answers, strict=True))
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ServerError):
                raise answer
        for server in self._servers:
            answer = failed.get(server, ServerError(server.failure))
            if answer is None:
                self._take_up(server)
            else:
                assert isinstance(answer, ServerError)
                server.up = False
                self.suspend(server, answer)
        refusals = [answer for answer in answers if isinstance(answer, ServerError) and answer.refused]
        if refusals and len(refusals) == len(self._servers):
            where, why = next((server.url, answer) for server, answer in failed.items())
            raise RunError(
                f"weight sync: {where} does not take the weights: {why}; it must serve the model of model.path, and "
                f"read {directory.parent} (engine.weights_dir)."
            )
        if not any(server.up for server in self._servers):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._awaiting.append(future)
            await future

    async def _end_watches(self) -> None:
        tasks = [server.watch for server in self._servers if server.watch is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            server.watch = None

    async def _give(self, server: Server, before: tuple[Path, str] | None) -> None:
        """Loads the weights into a server that held those of ``before``, and checks it first if it is another now."""
        if before is None:
            await self._connect(server)
        elif server.protocol is None or await server.spoken().version(PROBE_S) != before[1]:
            try:
                await self._connect(server)
            except ConfigError as error:  # the others go on
                raise ServerError(str(error)) from error
        for number in range(1, _LOADS):
            try:
                await self._load(server)
                return
            except ServerError as error:
                if error.status != _FAILED:
                    raise
            await asyncio.sleep(server.wait_s(number))
        try:
            await self._load(server)
        except ServerError as error:
            raise ServerError(str(error), status=400 if error.status == _FAILED else error.status) from error

    async def _connect(self, server: Server) -> None:
        server.protocol = None
        await server.client.close()  # its connections may be those of a process that is gone
        protocol = await connect(server.client, PROBE_S)
        await check(protocol, self._wanted)
        server.protocol = protocol

    async def _load(self, server: Server) -> None:
        assert self._weights is not None
        directory, label = self._weights
        await server.spoken().load(directory, label)
        version = await server.spoken().version(PROBE_S)
        if version != label:
            raise ServerError(f"it says that it holds weights '{version}' right after it loaded '{label}'", status=400)

    async def close(self) -> None:
        """Ends all probes, and a sync, once its servers are as others can use them."""
        self.end_limit()
        for server in self._servers:
            server.stop_timers()
        if (task := self._task) is not None and task is not asyncio.current_task():
            if not task.cancelling():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._end_watches()
        self.end_limit()
