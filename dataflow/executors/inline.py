"""The inline executor: runs everything in this process, for debugging. Each service is built here once.

Async stage functions (those of the reward agent) run concurrently on the event loop, so rewards arrive while other
tasks compute. Other tasks run one at a time, in the order in which they were started.

As on Ray, where values are pickled, a task reads copies and returns copies: other tasks never see changes that a
function makes in place.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from dataflow.errors import DataflowError, PipelineError, RunError
from dataflow.executors.base import ALONE, Chunk, Done, StageCall
from dataflow.executors.calling import answer, around, make_chunk, method_of, prepare
from dataflow.graph import Hosted, Pipeline, Stage, Task, TaskId, TaskInfo
from dataflow.system import clock
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import is_ours, message_of


class InlineExecutor:
    """Runs stages in this process and on its event loop."""

    def __init__(self) -> None:
        self._services: dict[str, Any] = {}
        self._queue: deque[tuple[Task, StageCall, Sequence[Any]]] = deque()
        self._waiters: dict[TaskId, asyncio.Task[None]] = {}
        self._events: asyncio.Queue[Done | Chunk] = asyncio.Queue()

    async def open(self, pipeline: Pipeline, hosts: Mapping[str, Hosted] = ALONE) -> None:
        for s in pipeline.stages:
            s.load()
        for host in [*hosts.values(), *pipeline.hosts().values()]:
            if host.ranks > 1:
                raise PipelineError(
                    f"'{host.name}' needs {host.ranks} processes, but executor=inline has one; use executor=ray."
                )
            if host.name in self._services:
                continue
            try:
                self._services[host.name] = host.build()
            except DataflowError:
                raise
            except BaseException as error:
                if is_ours(error):
                    raise
                what = f"{type(error).__name__}: {message_of(error)}"
                raise RunError(f"'{host.name}' could not be built: {what}") from error

    def now(self) -> float:
        return clock.now()

    def put(self, value: Any) -> Any:
        return own_copy(value)

    def start(self, task: Task, call: StageCall, values: Sequence[Any]) -> None:
        if asyncio.iscoroutinefunction(inspect.unwrap(task.stage.fn)):  # a decorator may be a plain function
            self._waiters[task.id] = asyncio.create_task(self._wait(task, call, values))
        else:
            self._queue.append((task, call, values))

    async def events(self) -> AsyncIterator[Done | Chunk]:
        while True:
            if self._queue:
                # Let async tasks make progress between two tasks that compute.
                await asyncio.sleep(0)
                if self._events.empty():
                    task, call, values = self._queue.popleft()
                    self._compute(task, call, values)
            yield await self._events.get()

    def _bound(self, stage: Stage) -> dict[str, Any]:
        host = stage.host
        return (
            {name: self._services[host.name] for name, service in stage.services.items() if service is host}
            if host
            else {}
        )

    def _prepare(
        self, task: Task, call: StageCall, values: Sequence[Any]
    ) -> tuple[list[Any], dict[str, Any], TaskInfo]:
        def emit(number: int, emitted: tuple[Any, ...]) -> None:
            self._events.put_nowait(make_chunk(task.stage, call.info, number, own_copy(emitted), self.now()))

        streams = emit if task.emits > 1 else None
        arguments, keywords, info = prepare(task.stage, call, values, self._bound(task.stage), streams)
        info.emitted = own_copy(info.emitted)
        return own_copy(arguments), keywords, info

    def _compute(self, task: Task, call: StageCall, values: Sequence[Any]) -> None:
        begin = self.now()
        try:
            arguments, keywords, info = self._prepare(task, call, values)
            with around(task.stage, info):
                result = own_copy(task.stage.fn(*arguments, **keywords))
            done = Done(task.id, *answer(task.stage, call, info, arguments, result, begin, self.now()))
        except BaseException as error:
            if is_ours(error):
                raise
            done = Done(task.id, error=error)
        self._events.put_nowait(done)

    async def _wait(self, task: Task, call: StageCall, values: Sequence[Any]) -> None:
        begin = self.now()
        try:
            arguments, keywords, info = self._prepare(task, call, values)
            with around(task.stage, info):
                result = task.stage.fn(*arguments, **keywords)
                result = own_copy(await result if asyncio.iscoroutine(result) else result)
            done = Done(task.id, *answer(task.stage, call, info, arguments, result, begin, self.now()))
        except BaseException as error:
            if is_ours(error):
                raise
            done = Done(task.id, error=error)
        self._waiters.pop(task.id, None)
        self._events.put_nowait(done)

    def cancel(self, task: TaskId) -> None:
        if wait := self._waiters.pop(task, None):
            wait.cancel()
        self._queue = deque(item for item in self._queue if item[0].id != task)

    async def ask(self, host: str, method: str, *arguments: Any) -> Any:
        answer = method_of(self._services[host], method)(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def close(self) -> None:
        for wait in self._waiters.values():
            wait.cancel()
        await asyncio.gather(*self._waiters.values(), return_exceptions=True)
        self._waiters.clear()
        for service in self._services.values():
            if hasattr(service, "close"):
                closed = service.close()
                if asyncio.iscoroutine(closed):
                    await closed
        self._services.clear()
