"""Where a run's services are on a cluster: from its configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.errors import ConfigError
from dataflow.executors.ray.nodes import NodeRule
from dataflow.graph import Hosted
from dataflow.running.services.nodes import check_nodes, model_files, node_rules
from pipelines import distill, gsm8k_grpo, ppo_critic, two_judges

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
            "ray.nodes.trainer has no effect on a Ray of the run's own, which is on this machine alone; give "
            "ray.address, or leave it out.",
        ),
        (
            ["ray.nodes.trainer=spread", "executor=inline"],
            "ray.nodes.trainer has no effect with executor=inline; give executor=ray, or leave it out.",
        ),
        (
            ["ray.address=auto", "ray.nodes.m.labels.role=a", "reward.models.m.url=http://h:1"],
            "ray.nodes.m has no effect: reward.models.m.url names servers elsewhere; leave it out.",
        ),
        (
            ["ray.address=auto", "ray.nodes.rollout.labels.role=a", "reward.models.rollout.path=m"],
            "ray.nodes.rollout: a service and a reward model have that name; give section reward.models.rollout "
            "another one.",
        ),
        (
            ["ray.address=auto", "ray.nodes.grader.labels.role=a", "reward.models.graders.path=m"],
            "ray.nodes.grader: the run has no service of that name; did you mean 'graders'?",
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


@pytest.mark.parametrize(
    ("override", "label"),
    [
        ("labels.rack=7", ("rack", "7")),
        ("labels.topology.kubernetes.io/zone=in(a, b)", ("topology.kubernetes.io/zone", "in(a, b)")),
        ("labels={role: '!in(a,b)', a.b: 7}", ("role", "!in(a,b)")),
    ],
)
def test_labels_may_have_numbers_and_names_with_dots(override: str, label: tuple[str, str]) -> None:
    labels = config(f"ray.nodes.trainer.{override}").ray.nodes["trainer"].labels
    assert labels == dict([label]) | ({"a.b": "7"} if "a.b" in override else {})


def test_a_model_that_is_there_is_compared(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
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


@pytest.mark.parametrize(
    ("overrides", "there"),
    [
        (["reward.cache=c.sqlite"], False),
        (["reward.ledger=false"], False),
        ([], True),  # the ledger
    ],
)
def test_an_agent_has_files_in_the_run_directory(overrides: list[str], there: bool) -> None:
    assert gsm8k_grpo.pipeline(config("name=a", *overrides)).hosts()["reward"].run_directory is there


def test_an_agent_names_what_it_reads_for_its_requests_and_its_cache(tmp_path: Path) -> None:
    judged = gsm8k_grpo.pipeline(
        config("name=a", "judge.template=grade.md", "judge.system=Be strict.", "reward.cache=c.sqlite")
    ).hosts()["reward"]
    assert judged.files == {"judge.template": str(Path("grade.md").absolute())}
    assert judged.writes == {"reward.cache": str(Path("c.sqlite").absolute())}
    served = gsm8k_grpo.pipeline(
        config("name=a", "reward.models.rm.path=rm", "reward.models.rm.template=t.jinja", "judge.template=grade.md")
    ).hosts()["reward"]
    assert served.files == {
        "reward.models.rm.path": str(Path("rm").absolute()),
        "reward.models.rm.template": str(Path("t.jinja").absolute()),
    }
    chat = "{path: rm, kind: chat, prompt: {template: grade.txt}}"
    rubric = gsm8k_grpo.pipeline(config("name=a", f"reward.models.rm={chat}")).hosts()["reward"]
    assert rubric.files == {"reward.models.rm.prompt.template": str(Path("grade.txt").absolute())}
    rule = two_judges.pipeline(parse_overrides(two_judges.Config, ["name=a", "rule.cache=r.sqlite"])).hosts()["rule"]
    assert rule.files == {}  # a function scores there
    assert rule.writes == {"rule.cache": str(Path("r.sqlite").absolute())}


def test_other_trained_and_read_models_name_their_files(tmp_path: Path) -> None:
    for name in ("teacher", "adapter"):
        (tmp_path / name).mkdir()
    given = parse_overrides(distill.Config, [f"teacher.path={tmp_path / 'teacher'}"])
    assert distill.pipeline(given).hosts()["teacher"].files == {"teacher.path": str(tmp_path / "teacher")}
    adapter = tmp_path / "adapter"
    (adapter / "adapter_config.json").write_text('{"r": 8, "peft_type": "LORA"}')
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    given = parse_overrides(ppo_critic.Config, ["critic.lora.rank=8", f"critic.lora.adapter={adapter}"])
    assert ppo_critic.pipeline(given).hosts()["critic"].files == {"critic.lora.adapter": str(adapter)}


def test_a_profile_is_a_file_in_the_run_directory() -> None:
    hosts = gsm8k_grpo.pipeline(config("name=a", "profile.steps=[2]", "engine.rollout=hf")).hosts()
    assert all(hosts[name].run_directory for name in ("trainer", "rollout"))
