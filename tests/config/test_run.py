"""Configuration: which values are accepted; an invalid one gives one sentence with key and value."""

from __future__ import annotations

import functools
import pickle
import re
from typing import Any

import pytest
import yaml
from pydantic import Field, ValidationError

from dataflow.config.keys import nested
from dataflow.config.keys.overrides import fields
from dataflow.config.run import EngineConfig, PolicyConfig, RunConfig, describe, dump_yaml, parse_overrides, values_of
from dataflow.config.section import Section
from dataflow.errors import ConfigError, DataflowError, PolicyError
from dataflow.policy import SchedulingPolicy
from pipelines import dapo, distill


def test_every_key_has_a_doc_line_and_a_line_in_the_list() -> None:
    assert [path for path, info in fields(RunConfig) if not info.description and len(path) > 1] == []
    text = describe(RunConfig)
    for line in ("trainer.lr=1.0e-06", "policy.split=null", "trainer.betas=[0.9, 0.999]", "# judge: The HTTP judge"):
        assert line in text


@pytest.mark.parametrize(
    ("arg", "at", "value"),
    [
        ("steps=5", "steps", 5),
        ("policy=mini-batch", "policy.preset", "mini-batch"),
        ("trainer.lr=1e-4", "trainer.lr", 1e-4),
        ("trainer.betas=[0.9,0.95]", "trainer.betas", (0.9, 0.95)),
        ("data.train=a=b #1.jsonl", "data.train", "a=b #1.jsonl"),
        ("data.train=[a.jsonl,b.jsonl]", "data.train", ["a.jsonl", "b.jsonl"]),
        ("name='null'", "name", "null"),
        ("name=null", "name", None),
        ("judge.latency=uniform:1:40", "judge.latency", "uniform:1:40"),
        ("tracking.backends=[tensorboard,wandb]", "tracking.backends", ["tensorboard", "wandb"]),
        ("engine={n: 4}", "engine.n", 4),
        ("custom_reward_function.reward_kwargs.a=2", "custom_reward_function.reward_kwargs", {"a": 2}),
        ("reward={manager_kwargs: {a: '1e5', c: 1e5}}", "reward.manager_kwargs", {"a": "1e5", "c": 1e5}),
    ],
)
def test_a_value_arrives(arg: str, at: str, value: object) -> None:
    found: object = functools.reduce(getattr, at.split("."), parse_overrides(RunConfig, [arg]))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("trainer.worldsize=2", "unknown key 'trainer.worldsize'; did you mean 'trainer.world_size'?"),
        ("stpes=2", "unknown key 'stpes'; did you mean 'steps'?"),
        ("lr=1e-4", "unknown key 'lr'; did you mean 'trainer.lr'?"),
        ("val={m: 4}", "unknown key 'val.m'; keys of 'val': every, n, temperature, top_p, top_k."),
        (
            "reward.models.a.prompt={foo: 1}",
            "unknown key 'reward.models.a.prompt.foo'; keys of 'reward.models.a.prompt': ",
        ),
        ("+trainer.lr=1", "unknown key '+trainer.lr'; did you mean 'trainer.lr'?"),
        ("steps=0", "steps=0: Input should be greater than 0."),
        ("policy=", "policy.preset=: String should have at least 1 character."),
        ("trainer.lr=.nan", "trainer.lr=nan: Input should be a finite number."),
        ("policy.order=idx", "policy.order=idx: Input should be 'arrival' or 'index'."),
        ("name=a/b", "name=a/b: give a plain directory name, without slashes, line breaks and outer spaces."),
        (
            "engine={n: 4, n: 8}",
            "engine={n: 4, n: 8}: it is not YAML (key 'n' is given twice; give it once); put quotes",
        ),
        ("tracking=64", "tracking=64: Input should be a valid dictionary"),
        ("steps", "argument 'steps' is not key=value; write it so, such as steps=5."),
        (
            "judge.latency=unifrm:1",
            "judge.latency 'unifrm:1': no distribution is named 'unifrm'; did you mean 'uniform'?",
        ),
        ("engine.n=1", "engine.n=1: 'grpo' compares one prompt's responses; give 2 or more."),
        (
            "trainer.world_size=3",
            "trainer.world_size=3 does not divide a mini-batch's 64 rows (data.prompts / trainer.",
        ),
        ("reward.on_failure=replace_group", "reward.on_failure=replace_group and reward.extra_groups go together: "),
        (
            "reward.deadline=60",
            "reward.deadline=60 ends a request before its first try may time out (reward.timeout=120)",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(args: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(RunConfig, [args])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "at", "value"),
    [
        (["steps=3", "steps=4"], "steps", 4),
        (["policy=baseline", "policy.split=2", "policy={preset: mini-batch}"], "policy.preset", "mini-batch"),
        (["reward.timeout=9", "reward={timeout: 2}"], "reward.timeout", 2),
        (["trainer.optimizer_kwargs={a: 1, b: 2}", "trainer.optimizer_kwargs.a=3"], "trainer.optimizer_kwargs",
         {"a": 3, "b": 2}),
        (["trainer.optimizer_kwargs={a: 1, b: 2}", "trainer.optimizer_kwargs={}"], "trainer.optimizer_kwargs", {}),
        (["reward.models.a={path: x, replicas: 2}", "reward.models.a.replicas=3"], "reward.models.a.path", "x"),
    ],
)  # fmt: skip
def test_a_later_argument_wins(args: list[str], at: str, value: object) -> None:
    assert nested.at(parse_overrides(RunConfig, args), at) == value


def test_a_policy_that_does_not_exist_or_fit_is_a_policy_error() -> None:
    with pytest.raises(PolicyError, match=r"unknown policy 'bth'; did you mean 'both'\?"):
        parse_overrides(RunConfig, ["policy=bth"])
    with pytest.raises(PolicyError, match="mini_batches=3 does not divide 32 prompt groups; use 1, 2, 4, 8"):
        parse_overrides(RunConfig, ["trainer.mini_batches=3"])
    with pytest.raises(PolicyError, match=r"policy\.max_staleness=9; give 0"):
        parse_overrides(RunConfig, ["policy.max_staleness=9"])


def test_a_policy_resolves_to_the_preset_with_what_is_given_over_it() -> None:
    assert PolicyConfig().resolve(4) == SchedulingPolicy(split=4, max_staleness=1)
    assert PolicyConfig(preset="baseline", order="index").resolve(4) == SchedulingPolicy(1, 0, "index")
    assert PolicyConfig(split=2, max_staleness=2).resolve(4) == SchedulingPolicy(split=2, max_staleness=2)
    assert PolicyConfig(max_staleness=0).resolve(4) == SchedulingPolicy(split=4, max_staleness=0)


class Inner(Section):
    active: bool = False
    metric: str = "score"


class Middle(Section):
    inner: Inner = Field(default_factory=Inner)
    size: int = 1


class Mine(RunConfig):
    """A pipeline's own."""

    engine: EngineConfig = EngineConfig(n=4, max_tokens=8)
    middle: Middle = Middle(inner=Inner(metric="acc"), size=2)
    """A section inside a section, each with defaults of its own."""


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], (2, False, "acc")),
        (["middle.size=3"], (3, False, "acc")),
        (["middle.inner.active=true"], (2, True, "acc")),
        (["middle.inner={metric: length}", "middle.size=4"], (4, False, "length")),
    ],
)
def test_an_override_leaves_the_other_defaults_of_a_pipeline(given: list[str], wanted: tuple[Any, ...]) -> None:
    config = parse_overrides(Mine, [*given, "engine.temperature=0.5"])
    assert (config.middle.size, config.middle.inner.active, config.middle.inner.metric) == wanted
    assert (config.engine.n, config.engine.max_tokens, config.engine.temperature) == (4, 8, 0.5)
    assert "engine.n=4" in describe(Mine)
    assert parse_overrides(dapo.Config, ["algorithm.filter_groups.metric=score"]).algorithm.filter_groups.enable
    # A mapping's keys, too, where one of them is given.
    kept = parse_overrides(dapo.Config, ["reward.manager_kwargs.overlong_penalty_factor=0.5"]).reward.manager_kwargs
    assert kept == {"overlong_buffer_len": 6, "overlong_penalty_factor": 0.5}
    whole = parse_overrides(dapo.Config, ["reward.manager_kwargs={overlong_buffer_len: 4}"]).reward.manager_kwargs
    assert whole == {"overlong_buffer_len": 4}


def test_dump_is_resolved_and_reads_back() -> None:
    config = parse_overrides(RunConfig, ["policy=off-policy", "trainer.lr=1e-5", "name=x"])
    values = yaml.safe_load(dump_yaml(config))
    numbers = {"split": 1, "max_staleness": 1, "order": "arrival", "stream_rollout": False}
    assert values["policy"] == {"preset": "off-policy", **numbers}
    again = parse_overrides(RunConfig, [], values)
    assert again.policy.resolve(4) == config.policy.resolve(4)
    assert again.model_copy(update={"policy": config.policy}) == config


def test_made_in_python_the_values_are_checked_too() -> None:
    with pytest.raises(ValidationError):
        RunConfig(steps=0)
    with pytest.raises(DataflowError):
        RunConfig(policy={"preset": "nothing"})
    assert RunConfig(policy="baseline").policy.preset == "baseline"
    assert pickle.loads(pickle.dumps(RunConfig())) == RunConfig()


def test_dynamic_sampling_samples_twice_what_a_step_trains_on_by_default() -> None:
    def extra(*overrides: str) -> int:
        return parse_overrides(RunConfig, list(overrides)).extra_groups

    enabled = "algorithm.filter_groups.enable=true"
    assert extra() == 0
    assert extra(enabled) == 32
    assert extra(enabled, "data.gen_batch_size=40") == 8
    assert extra(enabled, "data.gen_batch_size=40", "reward.on_failure=replace_group", "reward.extra_groups=3") == 11
    assert parse_overrides(RunConfig, ["data.gen_batch_size=32"]).group_filter is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.filter_groups.enable=true", "data.gen_batch_size=32"], "leaves algorithm.filter_groups no group"),
        (["algorithm.filter_groups.enable=true", "data.gen_batch_size=8"], "leaves algorithm.filter_groups no group"),
    ],
)
def test_dynamic_sampling_that_could_leave_nothing_out_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(RunConfig, overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("algorithm.adv_estimator=gae", "algorithm.adv_estimator has no effect in this pipeline: the advantage of a"),
        ("algorithm.use_kl_in_reward=true", "algorithm.use_kl_loss adds a KL term to the loss; leave it out."),
        ("custom_reward_function.path=own.py", "it has no reward agent; leave it out."),
        ("reward.rpm=5", "reward has no effect in this pipeline: it has no reward agent"),
        ("samples.every=5", "samples.every has no effect in this pipeline: it keeps no samples"),
    ],
)
def test_a_key_that_no_stage_of_the_pipeline_reads_is_refused(given, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_overrides(distill.Config, [given])


def test_without_an_estimator_one_response_is_enough():
    config = parse_overrides(distill.Config, ["engine.n=1", "algorithm=gspo"])
    assert parse_overrides(distill.Config, [], values_of(config)).engine.n == 1, "its file can be read again"
