"""The servers of reward models on nodes of a cluster: their places, from the configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.cluster.joined import own_address
from dataflow.cluster.nodes import NodeRule, Places, lacking, nodes_of
from dataflow.cluster.paths import Where
from dataflow.cluster.shared_paths import SharedPaths
from dataflow.config.served import ServedModelConfig
from dataflow.rewards.models.placed.site import PlacedSite
from dataflow.rewards.models.server import server_command
from dataflow.rewards.models.site import ServerPlan
from dataflow.running.services.nodes import model_files, node_rules, on_cluster
from dataflow.system.loopback import ADDRESS


def is_placed(config: Any, name: str) -> bool:
    """Whether Ray places the servers of a reward model, on any node: if a rule is for them, or if they need GPUs.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
        name: of the model, which the run serves.
    """
    return on_cluster(config) and (name in config.ray.nodes or bool(config.ray.gpus_per_worker))


class PlacedModel:
    """The places of the servers of one reward model; a context manager, opened before the servers.

    Args:
        name: of the model.
        model: its configuration.
        config: a :class:`~dataflow.config.run.RunConfig`.
        plan: what each server runs.
        directory: of the run, for the servers' logs.
        address: of this machine, where the agents reach the servers.
    """

    def __init__(
        self, name: str, model: ServedModelConfig, config: Any, plan: ServerPlan, directory: Path, address: str
    ) -> None:
        self._name, self._number, self._given = name, model.replicas, name in config.ray.nodes
        self._rule = node_rules(config).get(name, NodeRule())
        key = f"reward.models.{name}"
        files = model_files(model.path, f"{key}.path", {f"{key}.template": model.template})
        self._paths = SharedPaths(name, **files, directory=str(directory.absolute()))
        self._places = Places(
            model.replicas, 1.0 if plan.device == "cuda" else 0.0, model.tensor_parallel, rule=self._rule
        )
        self.sites: list[PlacedSite] = []
        try:
            for number, gpus in enumerate(self._places.gpus):
                what = f"reward model '{name}': server {number}"
                site = PlacedSite(
                    what, plan, gpus.options, address, self._check, self.lacking, config.ray.start_timeout
                )
                self.sites.append(site)
        except BaseException:
            self.__exit__()
            raise

    def lacking(self) -> str:
        """Returns what the nodes of the cluster lack for the servers, as a clause; "" if nothing is known."""
        import ray

        clause = lacking(self._rule, self._number, self._places.bundle, nodes_of(ray.nodes()))
        return f"{clause} (ray.nodes.{self._name})" if clause and self._given else clause

    async def _check(self, actor: Any, where: Where) -> None:
        import ray

        if where.node != ray.get_runtime_context().get_node_id():
            await self._paths.check({where.address: actor})

    def __enter__(self) -> PlacedModel:
        """Waits for the nodes; raises as :meth:`~dataflow.rewards.models.placed.site.PlacedSite.settle` does."""
        if shortage := self.lacking():
            logger.warning(f"reward model '{self._name}' waits for nodes: {shortage}.")
        try:
            for site in self.sites:
                site.place()
            for site in self.sites:
                site.settle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:  # all of them, also if one fails
            stack.callback(self._places.release)
            for site in self.sites:
                stack.callback(site.close)


def plan_of(name: str, model: ServedModelConfig, device: str, threads: int) -> ServerPlan:
    """Returns what each server of a reward model runs.

    Args:
        name: of the model.
        model: its configuration.
        device: ``cpu`` or ``cuda``.
        threads: CPU threads of a server on a CPU.
    """
    command = partial(server_command, name, device=device, **model.server_options())
    return ServerPlan(command, device, threads, model.placement == "colocated", os.getcwd())


def listening_address(config: Any, askers: Sequence[str]) -> str:
    """Returns the address where servers beside the command listen: loopback, unless what asks them is elsewhere.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
        askers: names of the services that ask.
    """
    return own_address() if on_cluster(config) and any(name in config.ray.nodes for name in askers) else ADDRESS
