"""Where a run's services are on a cluster: from its configuration alone."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.errors import ConfigError
from dataflow.graph import Hosted
from dataflow.running.services.nodes import check_nodes, node_labels
from pipelines import gsm8k_grpo

SERVICES = {name: Hosted(name, dict, here=name == "reward") for name in ("trainer", "rollout", "reward")}


def config(*overrides: str) -> Any:
    return parse_overrides(gsm8k_grpo.Config, overrides)


def test_labels_are_given_by_service() -> None:
    given = config("ray.address=auto", "ray.nodes.rollout.labels.role=in(a,b)")
    assert node_labels(given) == {"rollout": {"role": "in(a,b)"}}
    check_nodes(given, SERVICES)
    check_nodes(config("ray.address=auto", "reward.models.rm.path=m", "ray.nodes.rm.labels.role=a"), SERVICES)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["ray.address=auto", "ray.nodes.trainers.labels.role=a"],
            "ray.nodes.trainers: the run has no service of that name; did you mean 'trainer'?",
        ),
        (
            ["ray.nodes.trainer.labels.role=a"],
            "ray.nodes.trainer has no effect, as the run joins no cluster; give ray.address, or leave it out.",
        ),
        (
            ["ray.address=auto", "ray.nodes.m.labels.role=a", "reward.models.m.url=http://h:1"],
            "ray.nodes.m: the run has no service of that name; it has controller, reward, rollout, trainer.",
        ),
    ],
)
def test_a_rule_without_effect_is_refused(overrides: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataflow.running.services.nodes.running", lambda: False)
    with pytest.raises(ConfigError) as caught:
        check_nodes(config(*overrides), SERVICES)
    assert str(caught.value) == words


def test_the_services_with_files_in_the_runs_directory() -> None:
    def hosts(*overrides: str) -> Any:
        keys = ["name=a", "ray.address=auto", *overrides]
        return gsm8k_grpo.pipeline(parse_overrides(gsm8k_grpo.Config, keys)).hosts()

    own = hosts("checkpoint.every=0")
    assert [own[name].here for name in ("trainer", "rollout", "reward")] == [False, False, True]
    # The exported model, and the ledger.
    assert [own[name].run_directory for name in ("trainer", "rollout", "reward")] == [True, False, True]
    assert not hosts("reward.ledger=false")["reward"].run_directory
