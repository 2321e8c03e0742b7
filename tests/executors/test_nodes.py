"""What the nodes of a cluster, or this machine, lack for a service, from labels and resources alone."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.errors import ConfigError
from dataflow.executors.ray.nodes import check_count, lacking

CPU = {"CPU": 0.001}


def node(gpus: float = 0, alive: bool = True, **labels: str) -> dict[str, Any]:
    return {"Alive": alive, "Labels": labels, "Resources": {"CPU": 4} | ({"GPU": gpus} if gpus else {})}


CLUSTER = [node(), node(8, role="train"), node(8, role="train"), node(role="agents"), node(8, alive=False, role="lost")]


@pytest.mark.parametrize(
    ("labels", "number", "bundle", "words"),
    [
        ({}, 1, CPU, ""),
        ({"role": "in(agents, train)"}, 3, CPU, ""),
        ({"role": "!train"}, 1, CPU, ""),
        ({"role": "train"}, 16, {"GPU": 1}, ""),
        ({"role": "lost"}, 1, CPU, "no node of the cluster has the label role=lost"),
        (
            {"role": "agents"},
            1,
            {"GPU": 0.3},
            "it needs 0.3 GPUs, and the nodes with the label role=agents have 0",
        ),
        ({}, 27, {"GPU": 0.6}, "it needs 16.2 GPUs, and the nodes have 16"),
    ],
)
def test_what_a_cluster_lacks_for_a_service_is_said(
    labels: dict[str, str], number: int, bundle: dict[str, float], words: str
) -> None:
    assert lacking(labels, number, bundle, CLUSTER) == words


def test_a_machine_with_too_few_gpus_is_an_error_at_once() -> None:
    assert check_count(1.6, 2) == "2 of 2"
    with pytest.raises(ConfigError, match=r"ray\.gpus_per_worker: the run needs 1 GPU, and finds none"):
        check_count(1.0, 0)
