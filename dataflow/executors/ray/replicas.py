"""Starts the replicas of a rollout engine, each in an actor of its own, and calls them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dataflow.errors import ConfigError, RunError, UserError
from dataflow.executors.ray.actors import Actors
from dataflow.executors.ray.answers import cause
from dataflow.executors.ray.nodes import Cluster, Labels
from dataflow.executors.ray.tensors import ReadInPlace
from dataflow.stage import Hosted
from dataflow.usercode.pickling import dumps

if TYPE_CHECKING:
    import torch

_CLOSE_S = 20.0


class RemoteEngine:
    """An engine in an actor: of a :class:`~dataflow.engines.base.RolloutEngine`, what a sum of several needs.

    Raises from each method what the engine raises if that is a :class:`UserError`, else a RunError with its name.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor

    async def sample(self, prompt: Sequence[int], sampling: Any, seed: Sequence[int]) -> Any:
        return await self.call("sample", list(prompt), sampling, tuple(seed))

    async def sync(self, weights: Any, version: int) -> None:
        await self.call("sync", weights, version)

    async def sleep(self) -> None:
        await self.call("sleep")

    async def wake(self) -> None:
        await self.call("wake")

    async def close(self) -> None:
        """Closes the engine, if it answers in time, and ends its actor."""
        import ray

        with contextlib.suppress(RunError, TimeoutError):  # it is dead
            async with asyncio.timeout(_CLOSE_S):
                await self.call("close")
        ray.kill(self.actor)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the engine."""
        import ray

        answer = self.actor.ask.remote(method, *arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except Exception as error:
            raise _told(self.name, error) from error


def _told(name: str, error: BaseException) -> Exception:
    """Returns the error of a call as the engine of this name raises it."""
    inner = cause(error)
    if isinstance(inner, UserError):
        return inner
    first_line = (str(inner).splitlines() or [""])[0]
    kind = "" if isinstance(inner, RunError) else f"{type(inner).__name__}: "
    return RunError(f"{name}: {kind}{first_line}")


def start(
    factory: str | Callable[..., Any],
    options: Mapping[str, Any],
    number: int,
    gpus: float = 0.0,
    devices: int = 1,
    threads: int = 1,
    nodes: Labels | None = None,
) -> tuple[list[RemoteEngine], Callable[[], None]]:
    """Starts ``number`` engines in actors of their own, and waits until they are built.

    Args:
        factory: ``"package.module:name"`` of a function that builds an engine, or a function that can be pickled.
        gpus: GPUs of each, or the share of one.
        devices: GPUs that each has ``gpus`` of.
        threads: OMP threads of each.
        nodes: labels of the nodes of the cluster that they run on; None leaves them to Ray.

    Returns:
        The engines, and a function that ends their processes and releases their nodes and GPUs.
    """
    import ray

    if not ray.is_initialized():
        raise ConfigError(f"engine.replicas={number}: Ray does not run here; use executor=ray, or one replica.")
    spec = Hosted("replica", factory, options, ranks=number, gpus=gpus, devices=devices, concurrent=True)
    cluster = None
    if nodes is not None:
        cluster = Cluster(ray.get_runtime_context().get_node_id(), {spec.name: nodes})
    actors = Actors(spec, threads, cluster, apart=True)
    try:
        with ThreadPoolExecutor(1) as thread:  # this one may run an event loop, as in an actor
            thread.submit(asyncio.run, actors.build(dumps((spec, {})))).result()
    except Exception as error:
        actors.kill()
        raise _told("rollout: a replica", error) from error
    engines = [RemoteEngine(f"replica {at + 1} of {number}", actor) for at, actor in enumerate(actors.handles)]
    return engines, actors.kill


def share(weights: Mapping[str, torch.Tensor]) -> Any:
    """Puts weights into Ray's store, once for all replicas of a node; returns what :meth:`RemoteEngine.sync` takes."""
    import ray

    return ray.put(ReadInPlace(weights))
