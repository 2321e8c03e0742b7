"""Where the services of a run are on a cluster: the rules of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataflow.config.base import BaseConfig
from dataflow.errors import ConfigError, nearest
from dataflow.executors.ray.connection import running
from dataflow.stage import Hosted

CONTROLLER = "controller"
"""The service of stages that no other hosts."""


def on_cluster(config: BaseConfig) -> bool:
    """Whether the run joins a cluster, of one node or several."""
    return config.executor == "ray" and (config.ray.address is not None or running())


def _served(config: Any) -> dict[str, int]:
    """Returns the number of servers of each reward model that the run serves, by name."""
    models = getattr(getattr(config, "reward", None), "models", {})
    return {name: model.replicas for name, model in models.items() if model.url is None}


def node_labels(config: BaseConfig) -> dict[str, dict[str, str]]:
    """Returns the labels that the nodes of services on a cluster must have, by service."""
    found = {name: each.labels for name, each in config.ray.nodes.items()}
    for name, replicas in _served(config).items():
        if name in found:
            found |= {f"{name}-{number}": found[name] for number in range(replicas)}
    return found


def check_nodes(config: BaseConfig, hosts: Mapping[str, Hosted]) -> None:
    """Checks that each rule for nodes has an effect, and is for a service or a reward model that the run serves."""
    known = sorted({CONTROLLER, *hosts, *_served(config)})
    for name in config.ray.nodes:
        key = f"ray.nodes.{name}"
        if name not in known:
            hint = nearest(name, known) or f"; it has {', '.join(known)}."
            raise ConfigError(f"{key}: the run has no service of that name{hint}")
        if not on_cluster(config):
            raise ConfigError(f"{key} has no effect, as the run joins no cluster; give ray.address, or leave it out.")
