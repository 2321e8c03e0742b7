"""Stand-ins for the servers of a reward model, on the nodes of a cluster."""

from __future__ import annotations

import queue
import urllib.request
from pathlib import Path
from typing import Any

from dataflow.cluster.joined import own_address
from dataflow.config.keys.overrides import parse_overrides
from dataflow.errors import RunError
from dataflow.rewards.models.keeper import ModelServers
from dataflow.rewards.models.site import ServerPlan
from dataflow.running.services.placed_models import PlacedModel
from pipelines import gsm8k_grpo
from tests.rigs.cluster import Nodes
from tests.rigs.model_server import fake_command

READY_S = 60.0


class Served:
    """The servers of one model on the cluster that this process has joined; a context manager.

    Args:
        directory: of the run.
        overrides: of its configuration.
        place_s: seconds that a server may wait for a node.

    Attributes:
        lost: the errors with which the run would end.
    """

    def __init__(self, directory: Path, *overrides: str, place_s: float = READY_S) -> None:
        model = directory / "model"
        model.mkdir(exist_ok=True)
        keys = ["ray.address=auto", f"reward.models.rm.path={model}", f"ray.start_timeout={place_s}"]
        config: Any = parse_overrides(gsm8k_grpo.Config, [*keys, *overrides])
        words = fake_command(0)[:-1]  # by value: a node cannot import the rigs
        root = Path(__file__).parents[2]
        plan = ServerPlan(lambda port, host: ["env", f"PYTHONPATH={root}", *words, str(port), "--host", host], "cpu")
        given = config.reward.models["rm"]
        self.lost: queue.Queue[RunError] = queue.Queue()
        self.placed = PlacedModel("rm", given, config, plan, directory, own_address())
        self._directory, self._restarts = directory, given.restarts

    def __enter__(self) -> Served:
        self.placed.__enter__()
        self.servers = ModelServers(
            "rm",
            self.placed.sites,
            logs=self._directory / "servers",
            start_s=READY_S,
            restarts=self._restarts,
            on_lost=self.lost.put,
        )
        self.servers.__enter__()
        self.servers.ready.result(READY_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.servers.__exit__()
        self.placed.__exit__()

    def answers(self, number: int = 0) -> bool:
        """Whether a server answers, through its relay."""
        try:
            with urllib.request.urlopen(f"{self.servers.urls[number]}/health", timeout=READY_S) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def process(self, number: int = 0) -> Any:
        """Returns the current process of a server."""
        return self.servers._servers[number].process

    def roles(self, nodes: Nodes) -> list[str]:
        """Returns the role of the node of each server."""
        return [nodes.named(self.process(number)._where.node) for number in range(len(self.servers.urls))]
