"""The Ray executor: each service in an actor per rank, each stage function in the process of its service.

Values between stages are object refs, which the run's process passes on without fetching them; it reads a small report
of each task. The actors of a service and their restarts are in ``worker_group``; the code that runs in the actors is in
``host``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dataflow.errors import RunError
from dataflow.executors.base import ALONE, Chunk, Done, StageCall
from dataflow.executors.ray.answers import cause, last_words
from dataflow.executors.ray.connection import join_ray, running, start_ray
from dataflow.executors.ray.host import log_lines
from dataflow.executors.ray.nodes import Cluster, Labels, check_count
from dataflow.executors.ray.worker_group import WorkerGroup
from dataflow.graph import Hosted, Pipeline, Stage, Task, TaskId
from dataflow.system import clock
from dataflow.system.supervisor import report

# Stages without a service run here, off the run's process; async ones run concurrently.
# They write files of the run, such as its samples.
HELPER = Hosted("controller", dict, concurrent=True, here=True, run_directory=True)
BUILD_DEADLINE_S = 600.0


class RayExecutor:
    """Runs stages on Ray actors.

    Args:
        address: None starts a local Ray that ends with this run; ``auto`` or ``host:port`` joins a cluster.
        num_cpus: CPUs of the local Ray; None for this machine's.
        threads: OMP threads in each worker.
        on_up: called with what is up: Ray, then the name of each service.
        nodes: labels that the nodes of a service on a cluster must have, by service.
        directory: of the run, which services with files in it must see; None if there is none.
        deadline_s: seconds that a service may take to get its nodes and GPUs, and to be built; None for
            ``BUILD_DEADLINE_S``.
    """

    def __init__(
        self,
        address: str | None = None,
        num_cpus: int | None = None,
        threads: int = 1,
        on_up: Callable[[str], None] = lambda name: None,
        nodes: Mapping[str, Labels] | None = None,
        directory: str | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.address = address
        self.num_cpus = num_cpus
        self.threads = threads
        self._on_up = on_up
        self._hosts: dict[str, WorkerGroup] = {}
        self._events: asyncio.Queue[Done | Chunk] = asyncio.Queue()
        self._running: dict[TaskId, asyncio.Task[None]] = {}
        self._nodes = dict(nodes or {})
        self._directory = directory
        self._deadline_s = deadline_s
        self._connected = False
        self._cluster: Cluster | None = None

    async def open(self, pipeline: Pipeline, hosts: Mapping[str, Hosted] = ALONE) -> None:
        """Starts or joins Ray and builds the services concurrently."""
        if not self._hosts:
            self._connect()
            self._on_up("Ray")
        staged: dict[str, dict[str, Stage]] = {name: {} for name in hosts}
        for s in pipeline.stages:
            staged.setdefault((s.host or HELPER).name, {})[s.name] = s
        saving = {s.host.name for s in pipeline.with_role("saves") if s.host is not None}
        own = {name: replace(spec, run_directory=True) for name, spec in pipeline.hosts().items() if name in saving}
        known = {HELPER.name: HELPER, **hosts, **pipeline.hosts(), **own}
        specs = {name: known[name] for name in staged}
        self._check_gpus(specs.values())
        # The largest share of a GPU first: two small ones on one GPU could leave no GPU with room for a large one.
        for spec in sorted(specs.values(), key=lambda spec: -spec.gpus):
            if spec.gpus and spec.name not in self._hosts:
                await self._group(spec).place()
        await self._build(specs, staged)
        for workers in self._hosts.values():
            workers.learn(pipeline)
            workers.preload()  # not before: it would delay the services that the first task waits for

    async def _build(self, specs: Mapping[str, Hosted], staged: Mapping[str, dict[str, Stage]]) -> None:
        """Builds all services concurrently, but those marked ``alone`` before all others on GPUs."""

        async def on_gpus() -> None:
            for name, spec in specs.items():
                if spec.alone:
                    await self._host(spec, staged[name])
            await build(name for name, spec in specs.items() if spec.gpus and not spec.alone)

        async def build(names: Iterable[str]) -> None:
            await asyncio.gather(*(self._host(specs[name], staged[name]) for name in names))

        await asyncio.gather(on_gpus(), build(name for name, spec in specs.items() if not (spec.gpus or spec.alone)))

    def _connect(self) -> None:
        if running():
            self._cluster = self._joined()
            return
        if self.address is None:
            start_ray(self.num_cpus or os.cpu_count() or 1)
        else:
            join_ray(self.address)
            self._cluster = self._joined()
        self._connected = True

    def _joined(self) -> Cluster:
        """Returns what the services have to know of a cluster with, perhaps, several nodes."""
        import ray

        return Cluster(ray.get_runtime_context().get_node_id(), self._nodes, self._directory)

    def _check_gpus(self, specs: Iterable[Hosted]) -> None:
        """Checks that a local Ray has the GPUs that the run needs; it would wait for them forever."""
        import ray

        wanted = sum(spec.gpus * spec.ranks * spec.devices for spec in specs)
        if wanted and self._cluster is None:
            check_count(wanted, ray.cluster_resources().get("GPU", 0))

    async def _host(self, spec: Hosted, stages: dict[str, Stage]) -> None:
        workers = self._hosts.get(spec.name) or self._group(spec)
        was_up = workers.built
        await workers.open(stages)
        if not was_up:
            self._on_up(spec.name)

    def _group(self, spec: Hosted) -> WorkerGroup:
        deadline_s = self._deadline_s or BUILD_DEADLINE_S
        workers = WorkerGroup(spec, self.threads, deadline_s, self._events.put_nowait, self._cluster)
        self._hosts[spec.name] = workers
        return workers

    def now(self) -> float:
        return clock.now()

    def put(self, value: Any) -> Any:
        import ray

        try:
            return ray.put(value)
        except ray.exceptions.RayError as error:
            raise RunError(f"Ray's object store does not take the run's inputs: {last_words(error)}") from error

    def start(self, task: Task, call: StageCall, values: Sequence[Any]) -> None:
        self._running[task.id] = asyncio.create_task(self._run(task, call, values))

    async def _run(self, task: Task, call: StageCall, values: Sequence[Any]) -> None:
        workers = self._hosts[(task.stage.host or HELPER).name]
        try:
            done = await workers.run(task, call, values, self.now())
        except Exception as error:
            done = Done(task.id, error=cause(error))
        self._running.pop(task.id, None)
        self._events.put_nowait(done)

    async def events(self) -> AsyncIterator[Done | Chunk]:
        while True:
            yield await self._events.get()

    def cancel(self, task: TaskId) -> None:
        if call := self._running.get(task):  # awaited by close()
            call.cancel()

    async def ask(self, host: str, method: str, *arguments: Any) -> Any:
        return await self._hosts[host].ask(method, *arguments)

    async def close(self) -> None:
        """Ends the actors and a local Ray. A service that does not close within ``Hosted.close_s`` is killed."""
        report(ray="closing")
        for task in self._running.values():
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()
        for workers in self._hosts.values():
            workers.end()
        closing = [
            asyncio.wait_for(actor.close.remote(), workers.spec.close_s)
            for workers in self._hosts.values()
            for actor in workers.actors.handles
        ]
        for answer in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(answer, tuple):
                log_lines(answer)
        for workers in self._hosts.values():
            workers.actors.kill()
        self._hosts.clear()
        if self._connected:
            import ray

            ray.shutdown()
            self._connected = False
