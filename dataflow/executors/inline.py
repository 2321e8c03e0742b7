"""The inline executor: everything in this process, for debugging. Tools are built here, once.

Functions of tools that wait (the reward agent) run side by side on the event loop, so rewards come back while
other tasks compute; everything else runs one task at a time, in the order in which it was started.

As on Ray, where values are pickled, a task reads copies and leaves copies: what a function changes in place, then or
later, no other task sees.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dataflow.errors import DataflowError, PipelineError, RunError
from dataflow.executors.base import Call, Done, Part, answer, part, prepare
from dataflow.graph import Pipeline, Stage, Task, TaskId, TaskInfo
from dataflow.system import clock
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import is_ours, message_of


class InlineExecutor:
    """Runs stages in this process and on its event loop."""

    def __init__(self) -> None:
        self._tools: dict[str, Any] = {}
        self._queue: deque[tuple[Task, Call, Sequence[Any]]] = deque()
        self._waits: dict[TaskId, asyncio.Task[None]] = {}
        self._ended: asyncio.Queue[Done | Part] = asyncio.Queue()

    async def open(self, pipeline: Pipeline) -> None:
        for s in pipeline.stages:
            s.load()
        for host in pipeline.hosts().values():
            if host.ranks > 1:
                raise PipelineError(f"'{host.name}' wants {host.ranks} processes; executor=inline has one, use ray.")
            if host.name in self._tools:
                continue
            try:
                self._tools[host.name] = host.build()
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

    def start(self, task: Task, call: Call, values: Sequence[Any]) -> None:
        if asyncio.iscoroutinefunction(task.stage.fn):
            self._waits[task.id] = asyncio.create_task(self._wait(task, call, values))
        else:
            self._queue.append((task, call, values))

    async def events(self) -> AsyncIterator[Done | Part]:
        while True:
            if self._queue:
                # Let what waits on the loop go on between two tasks that compute.
                await asyncio.sleep(0)
                if self._ended.empty():
                    task, call, values = self._queue.popleft()
                    self._compute(task, call, values)
            yield await self._ended.get()

    def _bound(self, stage: Stage) -> dict[str, Any]:
        host = stage.host
        return {name: self._tools[host.name] for name, tool in stage.tools.items() if tool is host} if host else {}

    def _prepare(self, task: Task, call: Call, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any], TaskInfo]:
        def emit(number: int, emitted: tuple[Any, ...]) -> None:
            self._ended.put_nowait(part(task.stage, call.info, number, own_copy(emitted), self.now()))

        streams = emit if task.emits > 1 else None
        arguments, keywords, info = prepare(task.stage, call, values, self._bound(task.stage), streams)
        info.handed = own_copy(info.handed)
        return own_copy(arguments), keywords, info

    def _compute(self, task: Task, call: Call, values: Sequence[Any]) -> None:
        begin = self.now()
        try:
            arguments, keywords, info = self._prepare(task, call, values)
            result = own_copy(task.stage.fn(*arguments, **keywords))
            done = Done(task.id, *answer(task.stage, call, info, arguments, result, begin, self.now()))
        except BaseException as error:
            if is_ours(error):
                raise
            done = Done(task.id, error=error)
        self._ended.put_nowait(done)

    async def _wait(self, task: Task, call: Call, values: Sequence[Any]) -> None:
        begin = self.now()
        try:
            arguments, keywords, info = self._prepare(task, call, values)
            result = own_copy(await task.stage.fn(*arguments, **keywords))
            done = Done(task.id, *answer(task.stage, call, info, arguments, result, begin, self.now()))
        except BaseException as error:
            if is_ours(error):
                raise
            done = Done(task.id, error=error)
        self._waits.pop(task.id, None)
        self._ended.put_nowait(done)

    def cancel(self, task: TaskId) -> None:
        if wait := self._waits.pop(task, None):
            wait.cancel()
        self._queue = deque(item for item in self._queue if item[0].id != task)

    async def ask(self, host: str, method: str) -> Any:
        answer = getattr(self._tools[host], method)()
        return await answer if asyncio.iscoroutine(answer) else answer

    async def close(self) -> None:
        for wait in self._waits.values():
            wait.cancel()
        await asyncio.gather(*self._waits.values(), return_exceptions=True)
        self._waits.clear()
        for tool in self._tools.values():
            if hasattr(tool, "close"):
                closed = tool.close()
                if asyncio.iscoroutine(closed):
                    await closed
        self._tools.clear()
