"""The inline executor: runs everything in this process, for debugging. Each service is built here once.

Async stage functions (those of the reward agent) run concurrently on the event loop, so rewards arrive while other
tasks compute. Plain ones run on it too, where a debugger finds them: one at a time, in the order in which they were
started.

As on Ray, where values are pickled, a task reads copies and returns copies: other tasks never see changes that a
function makes in place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from dataflow.errors import DataflowError, PipelineError, RunError
from dataflow.executors.base import ALONE, Chunk, Done, StageCall
from dataflow.executors.calling import is_async, method_of, run_stage
from dataflow.graph import Hosted, Pipeline, Task, TaskId
from dataflow.system import clock
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import is_ours, message_of


class InlineExecutor:
    """Runs stages in this process and on its event loop."""

    def __init__(self) -> None:
        self._services: dict[str, Any] = {}
        self._running: dict[TaskId, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()  # of plain functions; it wakes its waiters in their order
        self._events: asyncio.Queue[Done | Chunk] = asyncio.Queue()

    async def open(self, pipeline: Pipeline, hosts: Mapping[str, Hosted] = ALONE) -> None:
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
        self._running[task.id] = asyncio.create_task(self._run(task, call, values))

    async def _run(self, task: Task, call: StageCall, values: Sequence[Any]) -> None:
        stage, emit = task.stage, self._events.put_nowait
        bound = {
            name: self._services[service.name]
            for name, service in stage.services.items()
            if isinstance(service, Hosted)
        }
        try:
            if is_async(stage):
                done = Done(task.id, *await run_stage(stage, call, values, bound, self.now, emit, own=own_copy))
            else:
                async with self._turn:
                    await asyncio.sleep(0)  # the async tasks go on between two that compute
                    done = Done(task.id, *await run_stage(stage, call, values, bound, self.now, emit, own=own_copy))
        except BaseException as error:
            if is_ours(error):
                raise
            done = Done(task.id, error=error)
        self._running.pop(task.id, None)
        self._events.put_nowait(done)

    async def events(self) -> AsyncIterator[Done | Chunk]:
        while True:
            yield await self._events.get()

    def cancel(self, task: TaskId) -> None:
        if running := self._running.get(task):  # awaited by close()
            running.cancel()

    async def ask(self, host: str, method: str, *arguments: Any) -> Any:
        answer = method_of(self._services[host], method)(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def close(self) -> None:
        for running in self._running.values():
            if not running.cancelling():  # a second one would break off how it ends
                running.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()
        for service in self._services.values():
            if hasattr(service, "close"):
                closed = service.close()
                if asyncio.iscoroutine(closed):
                    await closed
        self._services.clear()
