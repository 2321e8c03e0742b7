"""Where the servers of reward models are and listen: from the configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.rewards.models.placed.site import PlacedSite
from dataflow.rewards.models.site import ServerPlan
from dataflow.running.services import placed_models
from dataflow.running.services.placed_models import PlacedModel, is_placed, listening_address, plan_of
from dataflow.system.loopback import ADDRESS
from pipelines import gsm8k_grpo

CLUSTER = "ray.address=auto"
ASKERS = ["controller", "reward"]


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataflow.running.services.nodes.running", lambda: False)
    monkeypatch.setattr(placed_models, "own_address", lambda: "10.0.0.1")


def config(*overrides: str) -> Any:
    return parse_overrides(gsm8k_grpo.Config, ["reward.models.rm.path=model", *overrides])


@pytest.mark.parametrize(
    ("overrides", "placed"),
    [
        ([], False),
        ([CLUSTER], False),
        ([CLUSTER, "ray.nodes.reward.labels.role=a"], False),
        ([CLUSTER, "ray.nodes.rm.labels.role=a"], True),
        ([CLUSTER, "ray.gpus_per_worker=1"], True),
        (["ray.gpus_per_worker=1"], False),
    ],
)
def test_ray_places_servers_that_have_a_rule_or_gpus_of_a_cluster(overrides: list[str], placed: bool) -> None:
    assert is_placed(config(*overrides), "rm") is placed


@pytest.mark.parametrize(
    ("overrides", "address"),
    [
        ([], ADDRESS),
        ([CLUSTER], ADDRESS),
        ([CLUSTER, "ray.nodes.rm.labels.role=a"], ADDRESS),  # the agents reach its relay
        ([CLUSTER, "ray.nodes.rollout.labels.role=a"], ADDRESS),
        ([CLUSTER, "ray.nodes.reward.labels.role=a"], "10.0.0.1"),
        ([CLUSTER, "ray.nodes.controller.labels.role=a"], "10.0.0.1"),  # it wakes the models
    ],
)
def test_servers_listen_for_others_only_where_those_that_ask_are_elsewhere(overrides: list[str], address: str) -> None:
    assert listening_address(config(*overrides), ASKERS) == address


def test_a_server_gets_whole_gpus_of_a_node_that_its_rule_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Mapping[str, Any]] = []

    class Noted(PlacedSite):
        def __init__(self, what: str, plan: ServerPlan, options: Mapping[str, Any], *more: Any) -> None:
            found.append(options)
            super().__init__(what, plan, options, *more)

    monkeypatch.setattr(placed_models, "PlacedSite", Noted)
    given = config(
        CLUSTER, "ray.gpus_per_worker=1", "ray.nodes.rm.labels.ray.io/accelerator-type=H100",
        "reward.models.rm.tensor_parallel=2",
    )  # fmt: skip
    model = given.reward.models["rm"]
    plan = plan_of("rm", model, "cuda", 1)
    placed = PlacedModel("rm", model, given, plan, tmp_path, ADDRESS)
    (site,) = placed.sites
    try:
        selector = {"ray.io/accelerator-type": "H100"}
        assert found == [{"num_cpus": 0, "num_gpus": 2.0, "label_selector": selector}]
        assert site.url.startswith(f"http://{ADDRESS}:")
        words = plan.command(8001, host="10.0.0.2")
        assert words[words.index("--host") + 1] == "10.0.0.2"
        assert words[words.index("--port") + 1] == "8001"
    finally:
        site.relay.close()
