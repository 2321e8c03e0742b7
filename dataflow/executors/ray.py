"""The Ray executor: each hosted tool in an actor (one per rank), each stage function beside its tool.

Values between stages are object refs: the controller hands them on and never fetches one. What it reads is one
small pickled report per task; ``bytes_read`` and ``bytes_put`` count all that passes through it.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from dataflow.errors import ConfigError, DataflowError, RunError
from dataflow.executors.base import Call, Done, prepare, report, results_of
from dataflow.graph import Hosted, Pipeline, Stage, Task, TaskId

# Stages without a tool of their own run here, off the controller; those that are async wait side by side.
HELPER = Hosted("controller", dict, concurrent=True)
BUILD_DEADLINE_S = 600.0
CLOSE_DEADLINE_S = 1.0


class Host:
    """One process of a hosted tool (in its own actor): builds it and runs the stages that use it."""

    def address(self) -> tuple[str, int]:
        """Returns an address and a free port of this process, where the ranks can meet."""
        import socket

        import ray

        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def build(self, blob: bytes, environment: Mapping[str, str]) -> int:
        """Builds the tool; returns this process's id."""
        os.environ.update(environment)
        import cloudpickle

        # What the first Batch to arrive would import: seconds that belong to start-up, not to a task.
        import tensordict  # noqa: F401

        spec, self.stages = cloudpickle.loads(blob)
        for s in self.stages.values():
            s.load()
        self.name, self.tool = spec.name, spec.build()
        return os.getpid()

    def add(self, blob: bytes) -> None:
        """Takes further stages."""
        import cloudpickle

        _spec, stages = cloudpickle.loads(blob)
        self.stages |= stages

    def run(self, call: Call, keep: bool, *values: Any) -> Any:
        """Runs a stage function; returns the pickled report, then, if kept, a value per field."""
        begin = time.time()
        stage, arguments, keywords, info = self._prepare(call, values)
        result = stage.fn(*arguments, **keywords)
        if asyncio.iscoroutine(result):
            result = asyncio.run(result)
        return self._answer(stage, info, result, begin, keep)

    def ask(self, method: str) -> Any:
        """Calls a method of the tool."""
        return getattr(self.tool, method)()

    def close(self) -> None:
        """Lets the tool end well, if it can."""
        if hasattr(self.tool, "close"):
            closed = self.tool.close()
            if asyncio.iscoroutine(closed):
                asyncio.run(closed)

    def _prepare(self, call: Call, values: Sequence[Any]) -> tuple[Stage, list[Any], dict[str, Any], Any]:
        stage = self.stages[call.stage]
        bound = {n: self.tool for n, t in stage.tools.items() if isinstance(t, Hosted) and t.name == self.name}
        return (stage, *prepare(stage, call, values, bound))

    def _answer(self, stage: Stage, info: Any, result: Any, begin: float, keep: bool) -> Any:
        values = results_of(stage, result)
        small = pickle.dumps(report(stage, info, values, begin, time.time()))
        return (small, *values) if values and keep else small


class WaitingHost(Host):
    """A host whose calls run side by side on one event loop: for tools that wait."""

    async def build(self, blob: bytes, environment: Mapping[str, str]) -> int:  # type: ignore[override]
        return super().build(blob, environment)

    async def run(self, call: Call, keep: bool, *values: Any) -> Any:
        begin = time.time()
        stage, arguments, keywords, info = self._prepare(call, values)
        result = stage.fn(*arguments, **keywords)
        if asyncio.iscoroutine(result):
            result = await result
        return self._answer(stage, info, result, begin, keep)

    async def ask(self, method: str) -> Any:
        answer = getattr(self.tool, method)()
        return await answer if asyncio.iscoroutine(answer) else answer

    async def close(self) -> None:  # type: ignore[override]
        if hasattr(self.tool, "close"):
            closed = self.tool.close()
            if asyncio.iscoroutine(closed):
                await closed


class RayExecutor:
    """Runs stages on Ray actors.

    Args:
        address: None starts a local Ray that ends with this run; ``auto`` or ``host:port`` joins a cluster.
        num_cpus: CPUs of the local Ray; None for this machine's.
        threads: OMP threads in each worker.
    """

    def __init__(self, address: str | None = None, num_cpus: int | None = None, threads: int = 1) -> None:
        self.address = address
        self.num_cpus = num_cpus
        self.threads = threads
        self.bytes_read = 0
        self.bytes_put = 0
        self._hosts: dict[str, list[Any]] = {}
        self._ended: asyncio.Queue[Done] = asyncio.Queue()
        self._waits: dict[TaskId, asyncio.Task[None]] = {}
        self._refs: dict[TaskId, list[Any]] = {}
        self._started = False

    async def open(self, pipeline: Pipeline) -> None:
        """Starts or joins Ray and builds the pipeline's hosts side by side.

        Raises:
            ConfigError: the cluster cannot be reached.
            RunError: a tool cannot be built.
        """
        self._init()
        specs = {HELPER.name: HELPER, **pipeline.hosts()}
        staged: dict[str, dict[str, Stage]] = {name: {} for name in specs}
        for s in pipeline.stages:
            staged[s.host.name if s.host else HELPER.name][s.name] = s
        await asyncio.gather(*(self._host(spec, staged[name]) for name, spec in specs.items()))

    def _init(self) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
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
        if self.address is None:
            cpus = self.num_cpus or os.cpu_count() or 1
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)
        else:
            try:
                _knock(self.address)
                ray.init(address=self.address, **options)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"ray.address={self.address}: no Ray cluster answers there; start one with 'ray start --head' "
                    "or leave ray.address out."
                ) from error
        self._started = True

    async def _host(self, spec: Hosted, stages: dict[str, Stage]) -> None:
        import ray

        if spec.name in self._hosts:
            blob = _pickled(spec, stages)
            await asyncio.gather(*(actor.add.remote(blob) for actor in self._hosts[spec.name]))
            return
        kind = WaitingHost if spec.concurrent else Host
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": spec.gpus}
        if spec.concurrent:
            options["max_concurrency"] = 1000
        actors = [ray.remote(kind).options(**options).remote() for _ in range(spec.ranks)]
        self._hosts[spec.name] = actors
        blob = _pickled(spec, stages)
        try:
            address, port = await asyncio.wait_for(actors[0].address.remote(), BUILD_DEADLINE_S)
            builds = [
                actor.build.remote(blob, self._environment(rank, spec.ranks, address, port))
                for rank, actor in enumerate(actors)
            ]
            await asyncio.wait_for(_first_failure(builds), BUILD_DEADLINE_S)
        except TimeoutError as error:
            asks = f"it asks for {spec.ranks} x {spec.gpus:g} GPUs: does the cluster have them ('ray status')?"
            busy = "is the machine out of memory, or busy with something else?"
            raise RunError(
                f"'{spec.name}' was not up after {BUILD_DEADLINE_S:.0f} s; {asks if spec.gpus else busy}"
            ) from error
        except ray.exceptions.RayError as error:
            cause = _cause(error)
            if isinstance(cause, DataflowError):
                raise cause from error
            raise RunError(f"'{spec.name}' could not be built: {type(cause).__name__}: {cause}") from cause

    def _environment(self, rank: int, ranks: int, address: str, port: int) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": str(self.threads),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TOKENIZERS_PARALLELISM": "false",
        }

    def now(self) -> float:
        return time.time()

    def put(self, value: Any) -> Any:
        import ray

        self.bytes_put += len(ray.cloudpickle.dumps(value))
        return ray.put(value)

    def start(self, task: Task, call: Call, values: Sequence[Any]) -> None:
        host = task.stage.host or HELPER
        refs: list[list[Any]] = []
        for rank, actor in enumerate(self._hosts[host.name]):
            # The first rank's values count; the others take part in the collectives and report.
            returns = 1 + len(task.stage.writes) if rank == 0 else 1
            answer = actor.run.options(num_returns=returns).remote(call, rank == 0, *values)
            refs.append(answer if isinstance(answer, list) else [answer])
        self._refs[task.id] = [first for first, *_rest in refs]
        self._waits[task.id] = asyncio.create_task(self._wait(task, refs))

    async def _wait(self, task: Task, refs: list[list[Any]]) -> None:
        try:
            small, *_others = await _first_failure([first for first, *_rest in refs])
            self.bytes_read += len(small)
            done = Done(task.id, pickle.loads(small), tuple(refs[0][1:]))
        except Exception as error:
            done = Done(task.id, error=_cause(error))
        self._waits.pop(task.id, None)
        self._refs.pop(task.id, None)
        self._ended.put_nowait(done)

    async def events(self) -> AsyncIterator[Done]:
        while True:
            yield await self._ended.get()

    def cancel(self, task: TaskId) -> None:
        import ray

        if wait := self._waits.pop(task, None):
            wait.cancel()
        for ref in self._refs.pop(task, ()):
            ray.cancel(ref, force=False)

    async def ask(self, host: str, method: str) -> Any:
        answers = await _first_failure([actor.ask.remote(method) for actor in self._hosts[host]])
        return answers[0]

    async def close(self) -> None:
        """Ends the actors, and the local Ray with them; a tool that is busy or slow to close is cut off."""
        import ray

        for wait in self._waits.values():
            wait.cancel()
        self._waits.clear()
        self._refs.clear()
        if not ray.is_initialized():
            return
        closing = [asyncio.ensure_future(_fetch(a.close.remote())) for actors in self._hosts.values() for a in actors]
        if closing:
            _ended, slow = await asyncio.wait(closing, timeout=CLOSE_DEADLINE_S)
            for task in slow:
                task.cancel()
            await asyncio.gather(*closing, return_exceptions=True)
        for actors in self._hosts.values():
            for actor in actors:
                ray.kill(actor)
        self._hosts.clear()
        if self._started:
            ray.shutdown()
            self._started = False


def _pickled(spec: Hosted, stages: Mapping[str, Stage]) -> bytes:
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
        return cloudpickle.dumps((spec, stages))
    finally:
        for module in loose:
            cloudpickle.unregister_pickle_by_value(module)


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


def _knock(address: str) -> None:
    """Fails at once where nobody listens; Ray itself goes on trying for minutes."""
    import socket

    host, _, port = address.rpartition(":")
    if host and "/" not in address:
        socket.create_connection((host, int(port)), timeout=5.0).close()


async def _first_failure(refs: Sequence[Any]) -> list[Any]:
    """Waits for all refs, but no longer than until the first fails: its fellow ranks may hang in a collective."""
    return list(await asyncio.gather(*(_fetch(ref) for ref in refs)))


async def _fetch(ref: Any) -> Any:
    return await ref


def _cause(error: BaseException) -> BaseException:
    """Returns what the worker raised, out of Ray's wrapping; a dead process as one clear sentence."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause if isinstance(error.cause, BaseException) else None
        if cause is not None:
            cause.add_note(str(error))
            return cause
        return error
    if isinstance(error, ray.exceptions.ActorDiedError | ray.exceptions.ActorUnavailableError):
        return RunError(
            "the process that ran it died (killed, or out of memory); see Ray's log for its last words: "
            + str(error).strip().splitlines()[0]
        )
    return error
