"""The worker's side of the Ray executor: builds a hosted tool in an actor's process and runs its stages beside it."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from dataflow.batch import Batch
from dataflow.cluster.answer import answer_to, answering
from dataflow.cluster.gpus import see
from dataflow.cluster.log import KEPT, keep_lines
from dataflow.executors.base import Call, Part, Report, answer, part, prepare
from dataflow.graph import Hosted, Stage, TaskInfo
from dataflow.system import clock
from dataflow.system.children import restore_path
from dataflow.usercode.failures import Contained

LAST_WORDS = "DATAFLOW_LAST_WORDS"
"""The environment variable that names the file in which a process that ends a tool's process writes why."""


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


def settle_memory() -> None:
    """Spares the garbage collector what was imported and built, which stays, and has it look less often.

    An agent with thousands of calls in flight holds hundreds of thousands of objects that are no garbage; walking them
    after each 700 new ones took a fifth of its CPU time. 4,096 calls in flight are 140,000 objects, none of which is
    garbage when its call is over.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


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


def pickled(spec: Hosted, stages: Mapping[str, Stage]) -> bytes:
    """Pickles a host and its stages; functions whose module only this process can import travel whole.

    That is a pipeline file loaded from its path, under a name that a worker would not find.
    """
    import sys

    import cloudpickle

    names = {getattr(f, "__module__", None) for f in (spec.factory, *(s.fn for s in stages.values()))}
    mine = [sys.modules[name] for name in sorted(filter(None, names)) if name in sys.modules]
    registered = cloudpickle.list_registry_pickle_by_value()
    loose = [m for m in mine if not _importable(m) and m.__name__ not in registered]
    for module in loose:
        cloudpickle.register_pickle_by_value(module)
    try:
        blob: bytes = cloudpickle.dumps((spec, stages))
    finally:
        for module in loose:
            cloudpickle.unregister_pickle_by_value(module)
    return blob


def _importable(module: ModuleType) -> bool:
    """Whether an import by the module's name finds its file; cloudpickle sends ``__main__`` whole by itself."""
    from importlib.machinery import PathFinder

    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__":
        return True
    where: Sequence[str] | None = None
    found = None
    parts = module.__name__.split(".")
    for n in range(1, len(parts) + 1):
        found = PathFinder.find_spec(".".join(parts[:n]), where)
        if found is None:
            return False
        where = list(found.submodule_search_locations or ())
    return found is not None and found.origin == file
