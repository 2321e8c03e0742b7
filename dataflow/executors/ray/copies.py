"""The process of which the workers of a run are copies: whether a run can have one, and what it imports."""

from __future__ import annotations

import sys
from typing import Any

from dataflow.cluster.fork_server import ForkServer, available


def server_of(config: Any) -> ForkServer | None:
    """Starts it for a run on a Ray of its own, on the CPU; returns None for another run.

    Args:
        config: a :class:`~dataflow.config.base.BaseConfig`.
    """
    gpus = getattr(config.ray, "gpus_per_worker", 0)
    if config.executor != "ray" or config.ray.address is not None or not config.ray.fork or gpus or not available():
        return None
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():  # the run joins it
        return None
    return ForkServer(config.copied, config.worker_threads)
