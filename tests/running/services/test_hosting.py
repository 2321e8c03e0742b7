"""The hosts of a run's services, from its configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dataflow.config.run import RunConfig
from dataflow.engines import choice
from dataflow.errors import ConfigError
from dataflow.running.services.hosting import (
    HF,
    VLLM,
    critic_host,
    pools_of,
    reward_host,
    rollout_host,
)
from dataflow.running.services.training import check_trained
from dataflow.stage import Hosted
from pipelines import gsm8k_grpo, ppo_critic, two_judges


def host(gpus: float = 0.0, **sections: Any) -> Hosted:
    return rollout_host(RunConfig.model_validate({"model": {"path": "x"}, **sections}), gpus)


def ppo(**sections: Any) -> ppo_critic.Config:
    return ppo_critic.Config.model_validate(sections)


@pytest.fixture
def vllm_for(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda device: monkeypatch.setattr(choice, "vllm_device", lambda: device)


def test_the_engine_follows_what_is_installed_and_where_it_samples(vllm_for: Any) -> None:
    vllm_for("cpu")
    assert (host().factory, host(0.3).factory) == (VLLM, HF)
    vllm_for("cuda")
    assert (host().factory, host(0.3).factory) == (HF, VLLM)
    assert host(0.3).options["device"] == "cuda"


def test_on_gpus_that_it_shares_it_is_built_alone(vllm_for: Any) -> None:
    vllm_for("cuda")
    assert host(0.3).alone
    assert host(0.3, engine={"replicas": 2}).alone
    assert not host(1.0, placement="disaggregated").alone
    assert not host().alone


@pytest.mark.parametrize(("key", "value"), [("engine", 3), ("val", 0.001)])
def test_a_temperature_that_vllm_refuses_is_said_before_anything_starts(vllm_for: Any, key: str, value: float) -> None:
    vllm_for("cpu")
    with pytest.raises(ConfigError, match=rf"{key}\.temperature={value}: vLLM takes 0 \(greedy\) or 0\.01 to 2"):
        host(**{key: {"temperature": value}})
    assert host(engine={"rollout": "hf", "temperature": 3}).factory == HF


def test_parts_of_gpus_are_refused_where_engine_and_trainer_share_them(vllm_for: Any) -> None:
    vllm_for("cuda")
    gpus = 0.5
    sections: dict[str, Any] = {"model": {"path": "x"}, "ray": {"gpus_per_worker": gpus}}
    with pytest.raises(ConfigError, match=rf"ray\.gpus_per_worker={gpus:g}: colocated, .* give 1, a rank for each"):
        gsm8k_grpo.pipeline(gsm8k_grpo.Config.model_validate(sections))
    apart = gsm8k_grpo.Config.model_validate({**sections, "placement": "disaggregated"})
    assert gsm8k_grpo.pipeline(apart).hosts()["trainer"].gpus == gpus


def test_colocated_trainer_and_engine_share_each_gpu_so_that_no_gpu_gets_two_ranks() -> None:
    pools = pools_of(RunConfig.model_validate({"ray": {"gpus_per_worker": 1}}))
    assert pools.shared
    assert pools.resources["gpu"] == 1
    assert 0.5 < pools.trainer_gpus < pools.trainer_gpus + pools.engine_gpus <= 1


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_a_critic_shares_the_trainers_gpus_so_that_no_gpu_gets_two_ranks(placement: str) -> None:
    pools = pools_of(ppo(placement=placement, ray={"gpus_per_worker": 1}), critic=True)
    shares = [pools.trainer_gpus, pools.critic_gpus] + [pools.engine_gpus] * pools.shared
    assert shares == sorted(shares, reverse=True), "Ray places the largest first"
    left = 1.0
    for share in shares:
        assert left / 2 < share <= left, "a second one of its kind does not fit"
        left -= share
    plain = pools_of(ppo(placement=placement), critic=True)
    assert (plain.trainer_gpus, plain.critic_gpus, plain.engine_gpus) == (0, 0, 0)


@pytest.mark.heavy
def test_a_critic_that_cannot_read_what_the_actor_may_write_is_refused(tmp_path: Path, tiny_qwen: Path) -> None:
    own = shutil.copytree(tiny_qwen, tmp_path / "own")
    known = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(known | {"max_position_embeddings": 40}))
    sections: dict[str, Any] = {"model": {"path": str(tiny_qwen)}, "critic": {"path": str(own)}}
    config = ppo(**sections, data={"max_prompt_length": 30}, engine={"max_tokens": 11})
    with pytest.raises(ConfigError, match=r"critic.path=.*: it reads 40 tokens, a prompt and its response may have 41"):
        check_trained(config, "critic")
    fits = ppo(**sections, data={"max_prompt_length": 30}, engine={"max_tokens": 10})
    check_trained(fits, "critic")
    assert critic_host(fits, pools_of(fits, critic=True)).options["model"] == str(own)
    (own / "config.json").write_text(json.dumps(known | {"vocab_size": 20}))
    with pytest.raises(ConfigError, match=r"critic.path=.*: it knows 20 tokens, the actor"):
        check_trained(fits, "critic")


def test_each_agent_has_its_section_its_host_and_its_resource(tmp_path: Path) -> None:
    values = {"name": "a", "runs": str(tmp_path), "rule": {"restarts": 1, "judge": {"url": "http://judge"}}}
    config = two_judges.Config.model_validate(values)
    main, rule = reward_host(config), reward_host(config, "rule")
    assert (main.name, main.restarts, rule.name, rule.restarts) == ("reward", 3, "rule", 1)
    assert rule.options["options"] is config.rule
    assert rule.options["default"]["kwargs"]["url"] == "http://judge"
    assert [Path(h.options["ledger"]).name for h in (main, rule)] == ["rewards.sqlite", "rewards_rule.sqlite"]
    assert list(pools_of(config).with_agents("rule")) == ["gpu", "reward", "rule", "controller", "io"]
    with pytest.raises(ConfigError, match=r"no reward agent 'rul'; did you mean 'rule'\?.*SourceConfig"):
        reward_host(config, "rul")
