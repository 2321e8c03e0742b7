"""The worker's side of the Ray executor: builds a hosted tool in an actor's process and runs its stages beside it."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dataflow.batch import Batch
from dataflow.cluster.answer import answer_to, answering
from dataflow.cluster.gpus import see
from dataflow.cluster.log import KEPT, keep_lines
from dataflow.cluster.process import settle_memory
from dataflow.executors.base import Call, Part, Report, answer, part, prepare
from dataflow.graph import Hosted, Stage, TaskInfo
from dataflow.system import clock
from dataflow.system.children import restore_path
from dataflow.usercode.failures import Contained


class Host:
    """One process of a hosted tool (in its own actor): builds it and runs the stages that use it."""

    def address(self) -> tuple[str, int]:
        """Returns an address and a free port of this process, where the ranks can meet."""
        import socket

        import ray

        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    @answering
    def build(self, blob: bytes, environment: Mapping[str, str], anchor: clock.Anchor, *gpus: str) -> int:
        """Builds the tool, which sees these GPUs, or those that Ray shows it; returns this process's id."""
        restore_path()
        keep_lines()
        clock.adopt(anchor)
        os.environ.update(environment)
        see(gpus)
        import cloudpickle  # type: ignore[import-untyped]

        # What the first Batch to arrive would import: seconds that belong to start-up, not to a task.
        import torch  # noqa: F401

        spec, self.stages = cloudpickle.loads(blob)
        for s in self.stages.values():
            s.load()
        self.name, self.tool = spec.name, spec.build()
        settle_memory()
        return os.getpid()

    def add(self, blob: bytes) -> None:
        """Takes further stages."""
        import cloudpickle

        _spec, stages = cloudpickle.loads(blob)
        self.stages |= stages

    @answering
    def run(self, call: Call, keep: bool, *values: Any) -> Any:
        """Runs a stage function; returns its pickled answer, then, if kept, a value per field.

        The answer is the report and, of a stage that replays, the groups that it was given.
        """
        begin = clock.now()
        stage, arguments, keywords, info = self._prepare(call, values)
        held = _groups_of(stage, arguments)
        result = stage.fn(*arguments, **keywords)
        if asyncio.iscoroutine(result):
            result = asyncio.run(result)
        return _packed(answer(stage, call, info, arguments, result, begin, clock.now()), keep, held)

    @answering
    def ask(self, method: str) -> Any:
        """Calls a method of the tool."""
        return getattr(self.tool, method)()

    @answering
    def close(self) -> tuple[tuple[str, str], ...]:
        """Lets the tool end well, if it can; returns what it has logged since its last report."""
        if hasattr(self.tool, "close"):
            closed = self.tool.close()
            if asyncio.iscoroutine(closed):
                asyncio.run(closed)
        return KEPT.take()

    def _prepare(
        self, call: Call, values: Sequence[Any], on_emit: Callable[[int, tuple[Any, ...]], None] | None = None
    ) -> tuple[Stage, list[Any], dict[str, Any], TaskInfo]:
        stage = self.stages[call.stage]
        bound = {n: self.tool for n, t in stage.tools.items() if isinstance(t, Hosted) and t.name == self.name}
        return (stage, *prepare(stage, call, values, bound, on_emit))


class WaitingHost(Host):
    """A host whose calls run side by side on one event loop: for tools that wait."""

    @answering
    async def build(  # type: ignore[override]
        self, blob: bytes, environment: Mapping[str, str], anchor: clock.Anchor, *gpus: str
    ) -> int:
        return super().build(blob, environment, anchor, *gpus)

    @answering
    async def run(self, call: Call, keep: bool, *values: Any) -> Any:
        begin = clock.now()
        stage, arguments, keywords, info = self._prepare(call, values)
        held = _groups_of(stage, arguments)
        result = stage.fn(*arguments, **keywords)
        if asyncio.iscoroutine(result):
            result = await result
        return _packed(answer(stage, call, info, arguments, result, begin, clock.now()), keep, held)

    async def stream(self, call: Call, *values: Any) -> AsyncIterator[Any]:
        """Runs a stage function that streams.

        Yields for each set that it hands on, and at its end, a pickled answer, then a value per field: each an object
        of its own to Ray. The answer of a set is a :class:`Part` without its values.
        """
        begin = clock.now()
        handed: asyncio.Queue[Part | None] = asyncio.Queue()

        def emit(number: int, emitted: tuple[Any, ...]) -> None:
            handed.put_nowait(part(stage, call.info, number, emitted, clock.now()))

        stage, arguments, keywords, info = self._prepare(call, values, emit)
        running = asyncio.ensure_future(Contained(stage.fn(*arguments, **keywords)))
        running.add_done_callback(lambda _running: handed.put_nowait(None))
        try:
            while (event := await handed.get()) is not None:
                yield pickle.dumps(replace(event, values=()))
                for value in event.values:
                    yield value
            result = await running
            for item in _packed(answer(stage, call, info, arguments, result, begin, clock.now()), True, None):
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
    async def ask(self, method: str) -> Any:
        answer = getattr(self.tool, method)()
        return await answer if asyncio.iscoroutine(answer) else answer

    @answering
    async def close(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        if hasattr(self.tool, "close"):
            closed = self.tool.close()
            if asyncio.iscoroutine(closed):
                await closed
        return KEPT.take()


def _groups_of(stage: Stage, arguments: Sequence[Any]) -> tuple[int, ...] | None:
    """Returns the groups that a stage that replays leaves in its tool, none if it leaves a state.

    None of any other stage.
    """
    if not stage.replays:
        return None
    return next((a.ids for a in arguments if isinstance(a, Batch)), ())


def _packed(
    answered: tuple[Report, tuple[Any, ...]], keep: bool, held: tuple[int, ...] | None
) -> tuple[Any, ...] | bytes:
    report, values = answered
    report.logged = KEPT.take()
    small = pickle.dumps((report, held))
    return (small, *values) if values and keep else small
