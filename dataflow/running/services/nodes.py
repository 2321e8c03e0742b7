"""Where the services of a run are on a cluster: the rules of its configuration, and the files that their nodes need."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from dataflow.cluster.joined import running
from dataflow.cluster.nodes import NodeRule
from dataflow.errors import ConfigError, nearest
from dataflow.models.tiny import cache_home
from dataflow.rewards.naming import MAIN


def node_rules(config: Any) -> dict[str, NodeRule]:
    """Returns the rules for the nodes of services on a cluster, by service.

    Args:
        config: a :class:`~dataflow.config.base.BaseConfig`.
    """
    return {name: NodeRule(each.labels, each.strategy) for name, each in config.ray.nodes.items()}


def check_nodes(config: Any, services: Collection[str]) -> None:
    """Checks the rules for the nodes of services.

    Args:
        config: a :class:`~dataflow.config.base.BaseConfig`.
        services: names of the pipeline's.

    Raises:
        ConfigError: a rule is for no service, or has no effect.
    """
    for name in config.ray.nodes:
        if name not in services:
            raise ConfigError(
                f"ray.nodes.{name}: the run has no service of that name"
                f"{nearest(name, services) or '; it has ' + ', '.join(sorted(services)) + '.'}"
            )
        if config.ray.address is None and not running():
            raise ConfigError(
                f"ray.nodes.{name} has no effect on a Ray of the run's own, which is on this machine alone; give "
                "ray.address, or leave it out."
            )
    models = getattr(getattr(config, "reward", None), "models", {})
    served = [name for name, model in models.items() if model.url is None]
    if served and MAIN in config.ray.nodes:
        raise ConfigError(
            f"reward.models.{served[0]}: its servers listen on this machine alone, and ray.nodes.{MAIN} gives the "
            "agent that asks them other nodes; give their url, or leave that out."
        )


def model_files(path: str | None, key: str = "model.path", **others: str | None) -> dict[str, Any]:
    """Returns what a :class:`~dataflow.stage.Hosted` says about the model of a service, and further files by key."""
    files = {name: str(Path(value).expanduser().absolute()) for name, value in others.items() if value is not None}
    if path is None or not Path(path).is_dir():  # still to be made, or downloaded
        return {"files": files}
    if Path(path).parent == cache_home():
        return {"files": files, "made": {key: str(path)}}
    return {"files": {**files, key: str(Path(path).absolute())}}
