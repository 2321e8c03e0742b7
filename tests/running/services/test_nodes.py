"""Where a run's services are on a cluster: from its configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.errors import ConfigError
from dataflow.executors.ray.nodes import NodeRule
from dataflow.graph import Hosted
from dataflow.running.services.nodes import check_nodes, node_rules
from pipelines import distill, gsm8k_grpo, ppo_critic

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
    check_nodes(config("ray.address=auto", "reward.models.rm.path=m", "ray.nodes.rm.labels.role=a"), SERVICES)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["ray.address=auto", "ray.nodes.trainers=spread"],
            "ray.nodes.trainers: the run has no service of that name; did you mean 'trainer'?",
        ),
        (
            ["ray.nodes.trainer=spread"],
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


def test_each_service_of_a_run_names_its_files(tmp_path: Path) -> None:
    for name in ("model", "teacher", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"r": 8, "peft_type": "LORA"}')
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"")

    def hosts(recipe: Any, *overrides: str) -> Any:
        return recipe.pipeline(parse_overrides(recipe.Config, ["name=a", "ray.address=auto", *overrides])).hosts()

    own = hosts(gsm8k_grpo, f"model.path={tmp_path / 'model'}", "checkpoint.every=0")
    assert own["trainer"].files == own["rollout"].files == {"model.path": str(tmp_path / "model")}
    assert [own[name].here for name in ("trainer", "rollout", "reward")] == [False, False, True]
    # The exported model, and the ledger.
    assert [own[name].run_directory for name in ("trainer", "rollout", "reward")] == [True, False, True]
    assert not any(hosts(gsm8k_grpo, key)["reward"].run_directory for key in ("reward.cache=c", "reward.ledger=false"))
    assert hosts(gsm8k_grpo, "model.path=org/name")["trainer"].files == {}
    teacher = {"teacher.path": str(tmp_path / "teacher")}
    assert hosts(distill, f"teacher.path={tmp_path / 'teacher'}")["teacher"].files == teacher
    adapter = {"critic.lora.adapter": str(tmp_path / "adapter")}
    critic = hosts(ppo_critic, "critic.lora.rank=8", f"critic.lora.adapter={tmp_path / 'adapter'}")["critic"]
    assert critic.files == adapter
