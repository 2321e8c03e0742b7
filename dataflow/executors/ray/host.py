"""The actor of a service: builds the service in its process and runs the stages that use it.

All calls share one event loop. An async stage runs on it, beside others; a plain one runs in the service's thread, one
at a time, in the order of arrival, so that the loop stays free (:func:`dataflow.executors.calling.run_stage`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from loguru import logger

from dataflow.executors.base import Chunk, Report, StageCall
from dataflow.executors.calling import OnChunk, method_of, run_stage
from dataflow.executors.ray import tensors
from dataflow.executors.ray.answers import answer_to, answering
from dataflow.executors.ray.nodes import see
from dataflow.graph import Hosted
from dataflow.system import clock
from dataflow.system.address import family_of
from dataflow.system.secrets import redact, redact_logs
from dataflow.usercode.failures import contained

WORKING_DIRECTORY = "DATAFLOW_WORKING_DIRECTORY"
"""The environment variable with the run's working directory, to which the user's relative paths refer."""

KEPT: deque[tuple[str, str]] = deque(maxlen=100)
"""Level and text of the warnings of this process since its last report; Ray's log files have them, too."""


def log_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Logs lines of another process in this one."""
    for level, text in lines:
        logger.log(level, "{}", text)


def _taken() -> tuple[tuple[str, str], ...]:
    """Returns the kept lines and forgets them."""
    return tuple(KEPT.popleft() for _ in range(len(KEPT)))


class Place(NamedTuple):
    """The node of a process, by its id and its address, and a port there that was free."""

    node: str
    address: str
    port: int


class Host:
    """One process of a service, in its own actor."""

    async def place(self) -> Place:
        """Returns where this process is, with a free port there, where the ranks can meet."""
        import ray

        address = str(ray.util.get_node_ip_address())
        with socket.socket(family_of(address)) as s:
            s.bind(("", 0))
            return Place(ray.get_runtime_context().get_node_id(), address, s.getsockname()[1])

    async def sees(self, path: str) -> bool:
        """Whether this process's node has a file."""
        return os.path.exists(path)

    @answering
    async def build(self, blob: bytes, environment: Mapping[str, str], *gpus: str) -> None:
        """Builds the pickled service with its stages, on these GPUs, or those that Ray assigned if none is given."""
        redact_logs()
        logger.add(
            lambda message: KEPT.append((message.record["level"].name, redact(str(message.record["message"])))),
            level="WARNING",
        )
        os.environ.update(environment)
        with contextlib.suppress(OSError):  # Ray starts the workers of a cluster elsewhere; a node may lack it
            os.chdir(environment[WORKING_DIRECTORY])
        see(gpus)
        self.spec, self.stages = pickle.loads(blob)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self._last: asyncio.Future[None] | None = None  # ends after the functions of cancelled calls
        self.service = self.spec.build()
        tensors.register()
        settle_memory()

    async def preload(self) -> None:
        """Imports what stages import at their first call, while they wait for inputs."""
        # In their thread, as two threads that import verl at once deadlock.
        modules = [sys.modules.get(stage.fn.__module__) for stage in self.stages.values()]
        for name in dict.fromkeys(name for module in modules for name in getattr(module, "PRELOAD", ())):
            self._thread.submit(importlib.import_module, name)

    async def add(self, blob: bytes) -> None:
        """Adds pickled stages."""
        self.stages |= pickle.loads(blob)

    @answering
    async def run(self, call: StageCall, keep: bool, *values: Any) -> Any:
        """Runs a stage function; returns the report and then, with ``keep``, a value per field."""
        report, written = await self._call(call, values)
        return (report, *written) if written and keep else report

    async def stream(self, call: StageCall, *values: Any) -> AsyncIterator[Any]:
        """Runs a stage function that streams.

        Yields each :class:`Chunk` without its values, and at the end the report; after either a value per field, each
        an object of its own to Ray.
        """
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emitted(chunk: Chunk) -> None:  # a plain function emits in the service's thread
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        running = asyncio.ensure_future(contained(self._call(call, values, emitted)))
        running.add_done_callback(lambda _running: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                found, chunk.values = chunk.values, ()
                for item in (chunk, *found):
                    yield item
            report, written = await running
            for item in (report, *written):
                yield item
            return
        except GeneratorExit:
            raise
        except BaseException as error:
            instead = answer_to(error)
        finally:
            running.cancel()
        raise instead

    @answering
    async def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the service."""
        await self._rested()
        answer = method_of(self.service, method)(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer

    @answering
    async def close(self) -> tuple[tuple[str, str], ...]:
        """Closes the service; returns the lines that it logged since its last report."""
        if hasattr(self.service, "close"):
            closed = self.service.close()
            if asyncio.iscoroutine(closed):
                await closed
        return _taken()

    async def _call(
        self, call: StageCall, values: Sequence[Any], on_chunk: OnChunk | None = None
    ) -> tuple[Report, tuple[Any, ...]]:
        stage, name = self.stages[call.stage], self.spec.name
        bound = {n: self.service for n, s in stage.services.items() if isinstance(s, Hosted) and s.name == name}
        await self._rested()
        try:
            report, written = await run_stage(stage, call, values, bound, clock.now, on_chunk, self._thread)
        except asyncio.CancelledError:
            self._last = asyncio.get_running_loop().run_in_executor(self._thread, lambda: None)
            raise
        report.logged = _taken()
        return report, written

    async def _rested(self) -> None:
        """Waits until no function of a cancelled call runs: its thread cannot be stopped.

        An interrupted run saves a checkpoint after it has cancelled a task that may compute with the weights.
        """
        if self._last is not None:
            await asyncio.wait([self._last])


def settle_memory() -> None:
    """Excludes what was imported and built from garbage collection, and makes collections rarer.

    An agent with 4,096 calls in flight holds 140,000 live objects. Walking them after each 700 new ones, as by default,
    takes a fifth of its CPU time; reference counting frees them when their call ends.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
