"""The actor of a service: builds the service in its process and runs the stages that use it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import pickle
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dataflow.batch import Batch
from dataflow.cluster.answer import answer_to, answering
from dataflow.cluster.gpus import see
from dataflow.cluster.log import KEPT, keep_lines
from dataflow.cluster.paths import SeesPaths, Where
from dataflow.cluster.process import WORKING_DIRECTORY, settle_memory
from dataflow.errors import DataflowError
from dataflow.executors.base import Chunk, Report, StageCall
from dataflow.executors.calling import answer, around, make_chunk, method_of, prepare
from dataflow.executors.ray import tensors
from dataflow.graph import Hosted, Stage, TaskInfo
from dataflow.system import clock
from dataflow.system.address import family_of
from dataflow.system.children import restore_path
from dataflow.system.secrets import redact_logs
from dataflow.usercode.copies import is_immutable
from dataflow.usercode.failures import contained
from dataflow.usercode.pickling import why_not_pickled


class Place(NamedTuple):
    """Where a process is, and a port there that was free."""

    where: Where
    port: int


class Host(SeesPaths):
    """One rank of a service, in its own actor."""

    def place(self) -> Place:
        """Returns where this process is, with a free port there, where the ranks can meet."""
        import socket

        where = self.where()
        with socket.socket(family_of(where.address)) as s:
            s.bind(("", 0))
            return Place(where, s.getsockname()[1])

    @answering
    def build(
        self, blob: bytes, environment: Mapping[str, str], anchor: clock.Anchor, imports: Sequence[str], *gpus: str
    ) -> int:
        """Builds the service and returns the process id.

        Args:
            blob: service and stages, as :func:`~dataflow.cluster.pickling.pickled` returns them.
            environment: variables to set before.
            anchor: of the run's clock.
            imports: modules to import before.
            gpus: ids of the GPUs that the service may use; those that Ray assigned to the actor if none is given.
        """
        restore_path()
        redact_logs()
        keep_lines()
        clock.adopt(anchor)
        os.environ.update(environment)
        with contextlib.suppress(OSError):  # Ray starts the workers of a cluster elsewhere; a node may lack it
            os.chdir(environment[WORKING_DIRECTORY])
        see(gpus)
        for module in imports:
            importlib.import_module(module)
        spec, self.stages = pickle.loads(blob)
        for s in self.stages.values():
            s.load()
        self.name, self.service = spec.name, spec.build()
        tensors.register()
        settle_memory()
        return os.getpid()

    def add(self, blob: bytes) -> None:
        """Adds stages."""
        _spec, stages = pickle.loads(blob)
        self.stages |= stages

    @answering
    def run(self, sent: bytes, keep: bool, *values: Any) -> Any:
        """Runs a stage function.

        Args:
            sent: the pickled :class:`StageCall`.
            keep: whether to return the values.
            *values: of the call.

        Returns:
            The pickled report with the groups that a stage that replays was given; then, with ``keep``, a value per
            field.
        """
        begin, call = clock.now(), pickle.loads(sent)
        stage, arguments, keywords, info = self._prepare(call, values)
        held = _groups_of(stage, arguments)
        with around(stage, info):
            result = stage.fn(*arguments, **keywords)
            if asyncio.iscoroutine(result):
                result = asyncio.run(result)
        answered = answer(stage, call, info, arguments, result, begin, clock.now())
        return self._packed(stage, answered, keep, held)

    @answering
    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the service."""
        return method_of(self.service, method)(*arguments)

    @answering
    def close(self) -> tuple[tuple[str, str], ...]:
        """Closes the service; returns the lines that it logged since its last report."""
        if hasattr(self.service, "close"):
            closed = self.service.close()
            if asyncio.iscoroutine(closed):
                asyncio.run(closed)
        return KEPT.take()

    def _prepare(
        self, call: StageCall, values: Sequence[Any], on_emit: Callable[[int, tuple[Any, ...]], None] | None = None
    ) -> tuple[Stage, list[Any], dict[str, Any], TaskInfo]:
        stage = self.stages[call.stage]
        bound = {n: self.service for n, s in stage.services.items() if isinstance(s, Hosted) and s.name == self.name}
        return (stage, *prepare(stage, call, values, bound, on_emit))

    def _packed(
        self,
        stage: Stage,
        answered: tuple[Report, tuple[Any, ...]],
        keep: bool,
        held: tuple[int, ...] | None,
    ) -> tuple[Any, ...] | bytes:
        """Returns what :meth:`run` does."""
        report, values = answered
        if keep:
            _check_pickled(stage, values)
        report.logged = KEPT.take()
        small = pickle.dumps((report, held))
        return (small, *values) if values and keep else small


class WaitingHost(Host):
    """A host whose calls run concurrently on one event loop, for services that wait."""

    @answering
    async def build(  # type: ignore[override]
        self, blob: bytes, environment: Mapping[str, str], anchor: clock.Anchor, imports: Sequence[str], *gpus: str
    ) -> int:
        return super().build(blob, environment, anchor, imports, *gpus)

    @answering
    async def run(self, sent: bytes, keep: bool, *values: Any) -> Any:
        begin, call = clock.now(), pickle.loads(sent)
        stage, arguments, keywords, info = self._prepare(call, values)
        held = _groups_of(stage, arguments)
        with around(stage, info):
            result = stage.fn(*arguments, **keywords)
            if asyncio.iscoroutine(result):
                result = await result
        answered = answer(stage, call, info, arguments, result, begin, clock.now())
        return self._packed(stage, answered, keep, held)

    async def stream(self, sent: bytes, *values: Any) -> AsyncIterator[Any]:
        """Runs a stage function that streams.

        Yields:
            For each chunk, and at the end of the call, a pickled answer and then a value per field, each an object of
            its own to Ray. The answer of a chunk is a :class:`Chunk` without its values.
        """
        begin, call = clock.now(), pickle.loads(sent)
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()

        def emit(number: int, emitted: tuple[Any, ...]) -> None:
            chunks.put_nowait(make_chunk(stage, call.info, number, emitted, clock.now()))

        stage, arguments, keywords, info = self._prepare(call, values, emit)
        running = asyncio.ensure_future(contained(_within(stage, info, arguments, keywords)))
        running.add_done_callback(lambda _running: chunks.put_nowait(None))
        try:
            while (event := await chunks.get()) is not None:
                yield pickle.dumps(replace(event, values=()))
                for value in event.values:
                    yield value
            result = await running
            answered = answer(stage, call, info, arguments, result, begin, clock.now())
            for item in self._packed(stage, answered, True, None):
                yield item
            return
        except BaseException as error:
            if isinstance(error, GeneratorExit):
                raise
            instead = answer_to(error)
        finally:
            running.cancel()
        raise instead

    @answering
    async def ask(self, method: str, *arguments: Any) -> Any:
        answer = method_of(self.service, method)(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer

    @answering
    async def close(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        if hasattr(self.service, "close"):
            closed = self.service.close()
            if asyncio.iscoroutine(closed):
                await closed
        return KEPT.take()


async def _within(stage: Stage, info: TaskInfo, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    with around(stage, info):
        return await stage.fn(*arguments, **keywords)


def _check_pickled(stage: Stage, values: Sequence[Any]) -> None:
    """Checks that other processes can read what a stage returned; Ray would fail the task that reads it.

    Raises:
        DataflowError: a value cannot be pickled.
    """
    for field, value in zip(stage.writes, values, strict=True):
        if isinstance(value, Batch) or is_immutable(value):
            continue
        if why := why_not_pickled(value, (Batch,)):
            raise DataflowError(
                f"stage '{stage.name}' returned a {type(value).__name__} as field '{field}' that cannot be pickled for "
                f"other processes ({why[:200]}); return plain values, arrays or a Batch."
            )


def _groups_of(stage: Stage, arguments: Sequence[Any]) -> tuple[int, ...] | None:
    """Returns the groups that a stage that replays leaves in its service.

    Empty if it leaves a state; None for other stages.
    """
    if not stage.replays:
        return None
    return next((a.ids for a in arguments if isinstance(a, Batch)), ())
