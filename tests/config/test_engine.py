"""The configuration of the rollout: keys of servers and of engines of the run exclude each other."""

from __future__ import annotations

import pytest
import yaml

from dataflow.config.loading.pipeline_file import load_pipeline_file, pipeline_of
from dataflow.config.run import RunConfig, dump_yaml, parse_overrides, values_of
from dataflow.errors import ConfigError
from dataflow.running.services.hosting import pools_of

HTTP = ["engine.rollout=http", "engine.urls=[http://a:8000,http://b:8000]"]


def test_servers_have_gpus_of_their_own() -> None:
    config = parse_overrides(RunConfig, [*HTTP, "ray.gpus_per_worker=1", "trainer.world_size=2"])
    assert config.placement == "disaggregated"
    assert config.gpus == 2
    pools = pools_of(config)
    assert (pools.training, pools.sampling, pools.engine_gpus) == ("train", "rollout", 0)
    assert parse_overrides(RunConfig, [*HTTP, "placement=disaggregated"]).placement == "disaggregated"


def test_a_saved_configuration_can_be_read_again() -> None:
    config = parse_overrides(RunConfig, [*HTTP, "engine.api_key_env=KEY"])
    saved = yaml.safe_load(dump_yaml(config))
    assert saved["engine"]["urls"] == ["http://a:8000", "http://b:8000"]
    again = RunConfig.model_validate({key: value for key, value in saved.items() if key != "origin"})
    assert values_of(again) == values_of(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine.rollout=http"], r"engine\.rollout=http needs the servers' addresses; give engine\.urls="),
        (["engine.rollout=http", "engine.urls=a:80"], r"engine\.urls: a:80 is not an address"),
        (["engine.urls=http://a:80"], r"engine\.urls has no effect without engine\.rollout=http; leave it out"),
        ([*HTTP, "placement=colocated"], r"placement=colocated: servers of engine\.rollout=http have other GPUs"),
    ],
)
def test_keys_that_do_not_fit(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_overrides(RunConfig, arguments)


def test_temperatures_that_servers_do_not_take() -> None:
    module = load_pipeline_file("pipelines/gsm8k_grpo.py")
    config = parse_overrides(module.Config, [*HTTP, "engine.temperature=0.005"])
    with pytest.raises(ConfigError, match=r"engine\.temperature=0\.005: vLLM takes 0 \(greedy\) or 0\.01"):
        pipeline_of(module, config)
