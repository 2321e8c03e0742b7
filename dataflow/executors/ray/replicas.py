"""Starts the replicas of a rollout engine, each in an actor of its own, and calls them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dataflow.errors import ConfigError, RunError, UserError
from dataflow.executors.ray import tensors
from dataflow.executors.ray.answers import answering, cause
from dataflow.executors.ray.nodes import NodeRule, Places, see
from dataflow.executors.ray.paths import SeesPaths, SharedPaths, Where
from dataflow.stage import Hosted

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_CLOSE_S = 20.0


class Replica(SeesPaths):
    """The actor: one engine, whose calls run concurrently on one event loop."""

    @answering
    async def build(
        self,
        factory: str | Callable[..., Any],
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        *gpus: str,
    ) -> None:
        """Builds the engine on these GPUs, or on those that Ray assigned if none are given."""
        os.environ.update(environment)
        see(gpus)
        self.engine: Any = Hosted("replica", factory, options).build()

    @answering
    async def sync(self, shared: Mapping[str, Any], version: int) -> None:
        await self.engine.sync(_weights(shared), version)

    @answering
    async def call(self, method: str, *arguments: Any) -> Any:
        answer = getattr(self.engine, method)(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer


class RemoteEngine:
    """An engine in an actor: of a :class:`~dataflow.engines.base.RolloutEngine`, what a sum of several needs.

    Raises from each method what the engine raises if that is a :class:`UserError`, else a RunError with its name.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor

    async def sample(self, prompt: Sequence[int], sampling: Any, seed: Sequence[int]) -> Any:
        return await self._call("sample", list(prompt), sampling, tuple(seed))

    async def sync(self, weights: Any, version: int) -> None:
        await self._answer(self.actor.sync.remote(weights, version))

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def close(self) -> None:
        """Closes the engine, if it answers in time, and ends its actor."""
        import ray

        with contextlib.suppress(RunError, TimeoutError):  # it is dead
            async with asyncio.timeout(_CLOSE_S):
                await self._call("close")
        ray.kill(self.actor)

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._answer(self.actor.call.remote(method, *arguments))

    async def _answer(self, answer: Any) -> Any:
        import ray

        try:
            return await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except Exception as error:
            raise self.told(error) from error

    def told(self, error: BaseException) -> Exception:
        """Returns the error of a call as this engine raises it."""
        inner = cause(error)
        if isinstance(inner, UserError):
            return inner
        first_line = (str(inner).splitlines() or [""])[0]
        kind = "" if isinstance(inner, RunError) else f"{type(inner).__name__}: "
        return RunError(f"{self.name}: {kind}{first_line}")


def start(
    factory: str | Callable[..., Any],
    options: Mapping[str, Any],
    number: int,
    gpus: float = 0.0,
    devices: int = 1,
    threads: int = 1,
    nodes: NodeRule | None = None,
    paths: SharedPaths | None = None,
) -> tuple[list[RemoteEngine], Callable[[], None]]:
    """Starts engines in actors of their own, and waits until they are built.

    Args:
        factory: ``"package.module:name"`` of a function that builds an engine, or a function that can be pickled.
        options: its keyword arguments, the same for each.
        number: of engines.
        gpus: GPUs of each, or the share of one.
        devices: GPUs that each has ``gpus`` of.
        threads: OMP threads of each.
        nodes: of the cluster that they run on; None leaves them to Ray.
        paths: that every engine reads, where their nodes are compared with this process's; None on one machine.

    Returns:
        The engines, and a function that releases their nodes and GPUs once they are closed.

    Raises:
        ConfigError: Ray does not run, a node does not see a path or has another version of this package, or the
            factory raises it.
        ModelError: the model cannot be loaded.
        RunError: an engine does not start.
    """
    import ray

    if not ray.is_initialized():
        raise ConfigError(f"engine.replicas={number}: Ray does not run here; use executor=ray, or one replica.")
    places = Places(number, gpus, devices, nodes)
    kind = ray.remote(Replica)
    engines = [
        RemoteEngine(f"replica {at + 1} of {number}", kind.options(**each, max_concurrency=1000).remote())
        for at, each in enumerate(places.options)
    ]
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    try:
        # No ray.get: this may be the thread of an event loop, as in an actor.
        if paths is not None:
            _check(engines, paths)
        _wait_for(
            engines,
            [
                engine.actor.build.remote(factory, dict(options), environment, *seen).future()
                for engine, seen in zip(engines, places.seen, strict=True)
            ],
        )
    except BaseException:
        for engine in engines:
            ray.kill(engine.actor)
        places.release()
        raise
    return engines, places.release


def _check(engines: Sequence[RemoteEngine], paths: SharedPaths) -> None:
    """Compares the engines' nodes with this one."""
    import ray

    where: list[Where] = _wait_for(engines, [engine.actor.where.remote().future() for engine in engines])
    here = ray.get_runtime_context().get_node_id()
    checked = paths.check([engine.actor for engine in engines], where, here)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # this one's loop may wait for this call
        thread.submit(asyncio.run, checked).result()


def _wait_for(engines: Sequence[RemoteEngine], answers: Sequence[concurrent.futures.Future[T]]) -> list[T]:
    """Returns the answer of each engine; raises the first failure."""
    done, _late = concurrent.futures.wait(answers, return_when=concurrent.futures.FIRST_EXCEPTION)
    for engine, future in zip(engines, answers, strict=True):
        if future in done and (error := future.exception()) is not None:
            raise engine.told(error) from error
    return [answer.result() for answer in answers]


def share(weights: Mapping[str, torch.Tensor]) -> Any:
    """Puts weights into Ray's store, once for all replicas of a node; returns what :meth:`RemoteEngine.sync` takes.

    As arrays, which Ray stores without a copy, and which are read in place.
    """
    import ray

    return ray.put({name: tensors.sent(value.detach().cpu()) for name, value in weights.items()})


def _weights(shared: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the weights; they are read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return {name: tensors.received(form, copies=False) for name, form in shared.items()}
