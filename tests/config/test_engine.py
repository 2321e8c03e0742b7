"""The configuration of the rollout: keys of servers and of engines of the run exclude each other."""

from __future__ import annotations

import re

import pytest
import yaml

from dataflow.config.loading.pipeline_file import load_pipeline_file, pipeline_of
from dataflow.config.run import RunConfig, dump_yaml, parse_overrides, values_of
from dataflow.errors import ConfigError
from dataflow.running.services.hosting import SERVERS, gpus_of, pools_of
from dataflow.system.secrets import MASK

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


def test_passwords_in_addresses_are_masked() -> None:
    text = dump_yaml(parse_overrides(RunConfig, ["engine.rollout=http", "engine.urls=http://me:hush-hush-2@a:8000"]))
    assert "hush-hush-2" not in text
    assert MASK in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine.rollout=http"], r"engine\.rollout=http needs the servers' addresses; give engine\.urls="),
        (["engine.rollout=http", "engine.urls=a:80"], r"engine\.urls: a:80 is not an address"),
        (["engine.urls=http://a:80"], r"engine\.urls has no effect without engine\.rollout=http; leave it out"),
        (["engine.server_wait=3"], r"engine\.server_wait has no effect without engine\.rollout=http"),
        ([*HTTP, "engine.replicas=2"], r"engine\.replicas is a setting of the servers themselves; leave it out"),
        ([*HTTP, "engine.gpu_memory=0.9"], r"engine\.gpu_memory is a setting of the servers themselves"),
        ([*HTTP, "placement=colocated"], r"placement=colocated: the servers of engine\.rollout=http do not share"),
    ],
)
def test_keys_that_do_not_fit(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_overrides(RunConfig, arguments)


def test_the_host_of_the_servers() -> None:
    module = load_pipeline_file("pipelines/gsm8k_grpo.py")
    arguments = [*HTTP, "name=x", "engine.max_num_seqs=9", "engine.in_flight=abort", "ray.gpus_per_worker=1"]
    config = parse_overrides(module.Config, arguments)
    hosts = pipeline_of(module, config).hosts()
    host = hosts["rollout"]
    assert host.factory == SERVERS
    assert host.gpus == 0
    assert gpus_of(hosts.values()) == 1
    options = host.options
    assert options["urls"] == ["http://a:8000", "http://b:8000"]
    assert (options["slots"], options["in_flight"], options["max_model_len"]) == (9, "abort", 1024 + 24)
    assert options["weights_dir"].endswith("runs/x/weights")
    elsewhere = parse_overrides(module.Config, [*arguments, "engine.weights_dir=/nfs"])
    directory = pipeline_of(module, elsewhere).hosts()["rollout"].options["weights_dir"]
    assert re.fullmatch(r"/nfs/x-weights-[0-9a-f]{8}", directory)
    assert pipeline_of(module, elsewhere).hosts()["rollout"].options["weights_dir"] == directory  # for a resume
    others = parse_overrides(module.Config, [*arguments, "engine.weights_dir=/nfs", "runs=others"])
    assert pipeline_of(module, others).hosts()["rollout"].options["weights_dir"] != directory


def test_temperatures_that_servers_do_not_take() -> None:
    module = load_pipeline_file("pipelines/gsm8k_grpo.py")
    config = parse_overrides(module.Config, [*HTTP, "engine.temperature=0.005"])
    with pytest.raises(ConfigError, match=r"engine\.temperature=0\.005: inference servers take 0 \(greedy\) or 0\.01"):
        pipeline_of(module, config)
