"""The Ray executor: each service in an actor per rank, each stage function in the process of its service.

Values between stages are object refs, which the controller passes on without fetching them. It reads one small pickled
report per task; ``bytes_read`` and ``bytes_put`` count all bytes that pass through it. The actors of a service and
their restarts are in ``worker_group``; the code that runs in the actors is in ``host``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from dataflow.cluster.answer import cause, fetch
from dataflow.cluster.console import console_kept
from dataflow.cluster.fork_server import ForkServer
from dataflow.cluster.gpus import check_count
from dataflow.cluster.local import LocalRay
from dataflow.cluster.log import log_lines
from dataflow.errors import ConfigError
from dataflow.executors.base import Chunk, Done, StageCall
from dataflow.executors.ray.worker_group import Running, WorkerGroup
from dataflow.graph import Hosted, Pipeline, Stage, Task, TaskId
from dataflow.system import clock
from dataflow.system.children import working_directory_imported
from dataflow.system.supervisor import report

# Stages without a service run here, off the controller's process; async ones run concurrently.
HELPER = Hosted("controller", dict, concurrent=True)
BUILD_DEADLINE_S = 600.0


class RayExecutor:
    """Runs stages on Ray actors.

    Args:
        address: None starts a local Ray that ends with this run; ``auto`` or ``host:port`` joins a cluster.
        num_cpus: CPUs of the local Ray; None for this machine's.
        threads: OMP threads in each worker.
        imports: modules that each worker imports before it builds its service, so that the first task does not wait
            for them.
        on_up: called with what is up: Ray, then the name of each service.
        server: of which the workers of a local Ray are copies; None starts each on its own.
    """

    def __init__(
        self,
        address: str | None = None,
        num_cpus: int | None = None,
        threads: int = 1,
        imports: Sequence[str] = (),
        on_up: Callable[[str], None] = lambda name: None,
        server: ForkServer | None = None,
    ) -> None:
        self.address = address
        self.num_cpus = num_cpus
        self.threads = threads
        self.imports = tuple(imports)
        self._on_up = on_up
        self._server = server
        self.bytes_read = 0
        self.bytes_put = 0
        self._hosts: dict[str, WorkerGroup] = {}
        self._events: asyncio.Queue[Done | Chunk] = asyncio.Queue()
        self._waiters: dict[TaskId, asyncio.Task[None]] = {}
        self._started = False
        self._local: LocalRay | None = None

    async def open(self, pipeline: Pipeline) -> None:
        """Starts or joins Ray and builds the pipeline's services concurrently.

        Raises:
            ConfigError: the cluster cannot be reached.
            RunError: a service cannot be built.
        """
        if not self._hosts:
            with console_kept():
                self._connect()
            self._on_up("Ray")
        staged: dict[str, dict[str, Stage]] = {}
        for s in pipeline.stages:
            staged.setdefault((s.host or HELPER).name, {})[s.name] = s
        hosts = {HELPER.name: HELPER, **pipeline.hosts()}
        specs = {name: hosts[name] for name in staged}
        self._check_gpus(specs.values())
        # The largest share of a GPU first: two small ones on one GPU could leave no GPU with room for a large one.
        for spec in sorted(specs.values(), key=lambda spec: -spec.gpus):
            if spec.gpus and spec.name not in self._hosts:
                await self._group(spec).place()
        await self._build(specs, staged)
        for workers in self._hosts.values():
            workers.learn(pipeline)

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
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        # Otherwise Ray prints a traceback for each value of a dead service that is not awaited.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        import logging

        import ray

        if ray.is_initialized():
            return
        logging.getLogger("ray").setLevel(logging.ERROR)
        options: dict[str, Any] = {
            "logging_level": "ERROR",
            "log_to_driver": False,
            "configure_logging": False,
        }
        if "://" not in (self.address or ""):  # for a remote client, the server creates the job
            options["job_config"] = _job()
        if self.address is None:
            self._local = LocalRay(self.num_cpus or os.cpu_count() or 1, self._server)
            self._local.open(**options)
        else:
            try:
                _probe(self.address)
                ray.init(address=self.address, **options)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"ray.address={self.address}: no Ray cluster answers there; start one with 'ray start --head' "
                    "or leave ray.address out."
                ) from error
        self._started = True

    def _check_gpus(self, specs: Iterable[Hosted]) -> None:
        """Checks that a local Ray has the GPUs that the run needs; it would wait for them forever.

        Raises:
            ConfigError: it has too few.
        """
        import ray

        wanted = sum(spec.gpus * spec.ranks * spec.devices for spec in specs)
        if wanted and self._started and self.address is None:
            check_count(wanted, ray.cluster_resources().get("GPU", 0))

    async def _host(self, spec: Hosted, stages: dict[str, Stage]) -> None:
        workers = self._hosts.get(spec.name)
        if workers is not None and workers.opened:
            await workers.add(stages)
        else:
            await (workers or self._group(spec)).open(stages)
            self._on_up(spec.name)

    def _group(self, spec: Hosted) -> WorkerGroup:
        workers = WorkerGroup(
            spec, self.threads, self.imports, BUILD_DEADLINE_S, self._count_bytes, self._events.put_nowait
        )
        self._hosts[spec.name] = workers
        return workers

    def _count_bytes(self, size: int) -> None:
        self.bytes_read += size

    def now(self) -> float:
        return clock.now()

    def put(self, value: Any) -> Any:
        import ray
        from ray.experimental import get_local_object_locations

        ref = ray.put(value)
        self.bytes_put += get_local_object_locations([ref])[ref]["object_size"]
        return ref

    def start(self, task: Task, call: StageCall, values: Sequence[Any]) -> None:
        workers = self._hosts[(task.stage.host or HELPER).name]
        running = workers.start(task, call, values, self.now())
        self._waiters[task.id] = asyncio.create_task(self._wait(workers, running))

    async def _wait(self, workers: WorkerGroup, running: Running) -> None:
        i = running.task.id
        try:
            done = await workers.end_of(running)
        except Exception as error:
            done = Done(i, error=cause(error))
        self._waiters.pop(i, None)
        self._events.put_nowait(done)

    async def events(self) -> AsyncIterator[Done | Chunk]:
        while True:
            yield await self._events.get()

    def cancel(self, task: TaskId) -> None:
        if wait := self._waiters.pop(task, None):
            wait.cancel()
        for workers in self._hosts.values():
            workers.drop(task)

    async def ask(self, host: str, method: str, *arguments: Any) -> Any:
        return await self._hosts[host].ask(method, *arguments)

    async def close(self) -> None:
        """Ends the actors and a local Ray. A service that does not close within ``Hosted.close_s`` is killed."""
        import ray

        report(ray="closing")
        for wait in self._waiters.values():
            wait.cancel()
        self._waiters.clear()
        for workers in self._hosts.values():
            workers.end()
        if not ray.is_initialized():
            self._disconnect()
            return
        closing = [
            asyncio.wait_for(fetch(actor.close.remote()), workers.spec.close_s)
            for workers in self._hosts.values()
            for actor in workers
        ]
        for answer in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(answer, tuple):
                log_lines(answer)
        for workers in self._hosts.values():
            workers.actors.kill()
        self._hosts.clear()
        self._disconnect()

    def _disconnect(self) -> None:
        """Stops the local Ray, or disconnects from the cluster."""
        import ray

        if self._local is not None:
            self._local.close()
            self._local = None
        elif self._started:
            ray.shutdown()
        self._started = False


def _job() -> Any:
    """Returns Ray's job settings: workers import from the working directory only if this process does."""
    from ray.job_config import JobConfig

    # A submitted job brings its own working directory, which Ray unpacks.
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ or "RAY_RUNTIME_ENV_HOOK" in os.environ:
        return JobConfig()
    # Ray puts the driver's working directory first on the path of every worker, unless the driver is a remote client.
    return JobConfig(_client_job=True, _py_driver_sys_path=[os.getcwd()] if working_directory_imported() else [])


def _probe(address: str) -> None:
    """Connects once, to fail at once if nothing listens; Ray itself retries for minutes."""
    import socket

    host, _, port = address.rpartition(":")
    if host and "/" not in address:
        socket.create_connection((host, int(port)), timeout=5.0).close()
