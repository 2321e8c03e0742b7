"""Services that run in processes of their own, as a pipeline declares them.

Pure: no torch, no ray, no clock.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from dataflow.errors import PipelineError, an
from dataflow.signature.task_info import TaskInfo


@dataclass(frozen=True)
class Hosted:
    """A service in a process of its own: an engine, a trainer, the reward agent.

    The executor builds it there with ``factory(**options)`` and runs the stages that use it in the same process.

    Attributes:
        name: of the host; services of one name are one object.
        factory: builds the service; as ``"package.module:name"`` it is imported only where it is built.
        options: keyword arguments of the factory.
        ranks: processes that all run each call (SPMD); the outputs of the first are used.
        gpus: GPUs per process, or the share of one.
        devices: GPUs that each process has ``gpus`` of, all on one node.
        concurrent: calls run concurrently on one event loop (for I/O-bound services).
        restarts: how often in a run it may be rebuilt when its process dies; stages that replay then run again,
            followed by the interrupted tasks. For services whose state can be restored, such as an agent; with 0 its
            death restarts the run from the newest checkpoint.
        alone: built before the other services on GPUs, never at the same time, since it measures free memory.
        close_s: seconds that closing it may take at the end of a run.
        here: runs on the node of the run's own process on a cluster, as it uses files or servers there, unless
            ``ray.nodes`` names other nodes for it.
        files: paths that it reads, by the key that gives each; on a cluster its nodes must have the same.
        made: directories that the run has made itself, likewise, which are copied to a node without them.
        writes: files that it writes outside the run's directory, by key; on a cluster its nodes must
            share the directories of these files with the machine of the command.
        run_directory: whether it has files in the run's directory, which its nodes then must share. One that a stage
            with the role ``saves`` calls has.
        around: called with the task of each stage function in its process (except those that save, which run beside
            others), returns what is entered around the call, such as a profiler.
    """

    name: str
    factory: Callable[..., Any] | str
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    gpus: float = 0.0
    devices: int = 1
    concurrent: bool = False
    restarts: int = 0
    alone: bool = False
    close_s: float = 1.0
    here: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)
    writes: Mapping[str, str] = field(default_factory=dict)
    run_directory: bool = False
    around: Callable[[TaskInfo], AbstractContextManager[None]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise PipelineError(f"Hosted({self.name!r}, ...): give the name of the service first.")
        if not isinstance(self.factory, str) and not callable(self.factory):
            raise PipelineError(
                f"Hosted('{self.name}', ...): {an(type(self.factory).__name__)} builds no service; give the class or "
                "function itself, which is called in the service's process, and its arguments as a dict after it."
            )
        if not isinstance(self.options, Mapping):
            raise PipelineError(
                f"Hosted('{self.name}', ...): its options are {an(type(self.options).__name__)}; give a dict of "
                "keyword arguments."
            )

    @property
    def lasting(self) -> bool:
        """Whether one process hosts it for the whole run, so that what that process keeps is not missing in another."""
        return self.ranks == 1 and not self.restarts

    def build(self) -> Any:
        """Returns the service, built in this process."""
        factory = self.factory
        if isinstance(factory, str):
            module, _, name = factory.partition(":")
            factory = getattr(importlib.import_module(module), name)
        return factory(**self.options)
