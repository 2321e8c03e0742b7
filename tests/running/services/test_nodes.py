"""Where a run's services are on a cluster: from its configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.cluster.nodes import NodeRule
from dataflow.config.keys.overrides import parse_overrides
from dataflow.errors import ConfigError
from dataflow.graph import Hosted
from dataflow.running.services.nodes import check_nodes, model_files, node_rules
from pipelines import gsm8k_grpo

SERVICES = {name: Hosted(name, dict, here=name == "reward") for name in ("trainer", "rollout", "reward")}


def config(*overrides: str) -> Any:
    return parse_overrides(gsm8k_grpo.Config, overrides)


def test_rules_are_given_by_service() -> None:
    given = config("ray.address=auto", "ray.nodes.trainer=spread", "ray.nodes.rollout.labels.role=in(a,b)")
    assert node_rules(given) == {
        "trainer": NodeRule({}, "spread"),
        "rollout": NodeRule({"role": "in(a,b)"}, "pack"),
    }
    check_nodes(given, SERVICES)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["ray.address=auto", "ray.nodes.trainers=spread"],
            "ray.nodes.trainers: the run has no service of that name; did you mean 'trainer'?",
        ),
        (
            ["ray.nodes.trainer=spread"],
            "ray.nodes.trainer has no effect on a Ray of the run's own, which is on this machine alone; give "
            "ray.address, or leave it out.",
        ),
        (
            ["ray.address=auto", "ray.nodes.reward.labels.role=a", "reward.models.m.path=m"],
            "reward.models.m: its servers listen on this machine alone, and ray.nodes.reward gives the agent that may "
            "ask them other nodes; give their url, or leave that out.",
        ),
    ],
)
def test_a_rule_without_effect_is_refused(overrides: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataflow.running.services.nodes.running", lambda: False)
    with pytest.raises(ConfigError) as caught:
        check_nodes(config(*overrides), SERVICES)
    assert str(caught.value) == words


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ray\.nodes\.trainer\.strategy"):
        config("ray.nodes.trainer=wide")


def test_a_model_of_the_cache_is_copied_and_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiny, own = tmp_path / "dataflow" / "tiny-1", tmp_path / "own"
    for path in (tiny, own):
        path.mkdir(parents=True)
    assert model_files(str(tiny)) == {"files": {}, "made": {"model.path": str(tiny)}}
    tools = model_files(str(own), "critic.path", {"tools.path": "tools.py"})
    assert tools == {"files": {"tools.path": str(Path("tools.py").absolute()), "critic.path": str(own)}}
    assert model_files(None) == {"files": {}}


def test_each_service_of_a_run_names_its_files(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(*_): return 1.0")
    (tmp_path / "model").mkdir()
    given = config(
        f"model.path={tmp_path / 'model'}", f"custom_reward_function.path={tmp_path / 'reward.py'}", "name=a",
        "ray.address=auto",
    )  # fmt: skip
    hosts = gsm8k_grpo.pipeline(given).hosts()
    model = {"model.path": str(tmp_path / "model")}
    assert hosts["trainer"].files == hosts["rollout"].files == model
    assert hosts["reward"].files == {**model, "custom_reward_function.path": str(tmp_path / "reward.py")}
    assert hosts["reward"].here
    assert hosts["reward"].run_directory  # its ledger
    assert hosts["trainer"].run_directory  # the exported model
    assert not hosts["rollout"].here
    assert not hosts["rollout"].run_directory
