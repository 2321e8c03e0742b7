"""The process of which the workers of a run are copies: whether a run can have one, and what it imports."""

from __future__ import annotations

from typing import Any

from dataflow.cluster.fork_server import ForkServer, available
from dataflow.cluster.joined import running


def server_of(config: Any) -> ForkServer | None:
    """Starts it for a run on a Ray of its own, on the CPU; returns None for another run.

    Args:
        config: a :class:`~dataflow.config.base.BaseConfig`.
    """
    gpus = getattr(config.ray, "gpus_per_worker", 0)
    if config.executor != "ray" or config.ray.address is not None or not config.ray.fork or gpus or not available():
        return None
    if running():  # the run joins it
        return None
    return ForkServer(config.copied, config.worker_threads)
