"""Configuration: which values are accepted; an invalid one gives one sentence with key and value."""

from __future__ import annotations

import functools
import pickle
import re
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from dataflow.config.keys.overrides import build, fields
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.config.run import EngineConfig, PolicyConfig, RunConfig, describe, dump_yaml, parse_overrides, values_of
from dataflow.errors import ConfigError, DataflowError, PipelineError, PolicyError, UserError
from dataflow.policy import SchedulingPolicy
from pipelines import distill


def test_runs_may_be_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/me")
    assert parse_overrides(RunConfig, ["runs=~/runs"]).runs == "/srv/me/runs"
    assert parse_overrides(RunConfig, ["runs=./~x"]).runs == "./~x"
    with pytest.raises(ConfigError, match=r"^runs=~no-such-user/x: there is no such user; give \./ before a name"):
        parse_overrides(RunConfig, ["runs=~no-such-user/x"])


def test_defaults_are_valid_and_every_key_has_a_doc_line() -> None:
    config = parse_overrides(RunConfig, [])
    assert (config.steps, config.policy.preset, config.data.prompts, config.engine.n) == (30, "both", 32, 8)
    undocumented = [path for path, info in fields(RunConfig) if not info.description and len(path) > 1]
    assert undocumented == []


@pytest.mark.parametrize(
    ("arg", "at", "value"),
    [
        ("steps=5", "steps", 5),
        ("policy=mini-batch", "policy.preset", "mini-batch"),
        ("policy.split=2", "policy.split", 2),
        ("policy.split=null", "policy.split", None),
        ("trainer.lr=1e-4", "trainer.lr", 1e-4),
        ("trainer.lr=1", "trainer.lr", 1.0),
        ("trainer.betas=[0.9,0.95]", "trainer.betas", (0.9, 0.95)),
        ("data.shuffle=false", "data.shuffle", False),
        ("data.train=a=b #1.jsonl", "data.train", "a=b #1.jsonl"),
        ("data.train=[a.jsonl,b.jsonl]", "data.train", ["a.jsonl", "b.jsonl"]),
        ("name=2024_01", "name", "2024_01"),
        ("name=1e5", "name", "1e5"),
        ("name='null'", "name", "null"),
        ("name=None", "name", None),
        ("name=null", "name", None),
        ("judge.latency=uniform:1:40", "judge.latency", "uniform:1:40"),
        ("judge.url=http://127.0.0.1:80/v1", "judge.url", "http://127.0.0.1:80/v1"),
        ("algorithm.rollout_is=token", "algorithm.rollout_is", "token"),
        ("tracking.backends=[tensorboard,wandb]", "tracking.backends", ["tensorboard", "wandb"]),
        ("tracking.backends=wandb", "tracking.backends", ["wandb"]),
        ("tracking.backends=[]", "tracking.backends", []),
        ("engine={n: 4}", "engine.n", 4),
        ("custom_reward_function.reward_kwargs.a=2", "custom_reward_function.reward_kwargs", {"a": 2}),
        (
            "custom_reward_function.reward_kwargs={a: [x]}",
            "custom_reward_function.reward_kwargs",
            {"a": ["x"]},
        ),
    ],
)
def test_a_value_arrives(arg: str, at: str, value: object) -> None:
    found: object = parse_overrides(RunConfig, [arg])
    for name in at.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("trainer.worldsize=2", "unknown key 'trainer.worldsize'; did you mean 'trainer.world_size'?"),
        ("judge.api_key=k", "unknown key 'judge.api_key'; did you mean 'judge.api_key_env'?"),
        ("stpes=2", "unknown key 'stpes'; did you mean 'steps'?"),
        ("lr=1e-4", "unknown key 'lr'; did you mean 'trainer.lr'?"),
        ("n=2", "unknown key 'n'; did you mean one of engine.n, val.n?"),
        ("optim.lr=1", "unknown key 'optim.lr'; did you mean 'trainer.lr'?"),
        ("actor.optim.lr=1", "unknown key 'actor.optim.lr'; did you mean 'trainer.lr'?"),
        ("trainer.lr.x=1", "unknown key 'trainer.lr.x'; did you mean 'trainer.lr'?"),
        ("val={m: 4}", "unknown key 'val.m'; keys of 'val': every, n, temperature, top_p, top_k."),
        ("val.tmp=4", "unknown key 'val.tmp'; keys of 'val': every, n, temperature, top_p, top_k."),
        (
            "reward.models.a.prompt={foo: 1}",
            "unknown key 'reward.models.a.prompt.foo'; keys of 'reward.models.a.prompt': method, template, system, "
            "score_pattern, score_range, normalize, temperature, max_tokens_reply, options.",
        ),
        ("trainer.world_size=two", "trainer.world_size=two: give a whole number."),
        ("steps=2.5", "steps=2.5: give a whole number."),
        ("steps=true", "steps=true: give a number, not true or false."),
        ("steps=0", "steps=0: give a number greater than 0."),
        ("trainer.lr=-1", "trainer.lr=-1: give a number greater than 0."),
        ("trainer.lr=.nan", "trainer.lr=.nan: give a finite number."),
        ("trainer.lr=fast", "trainer.lr=fast: give a number."),
        ("trainer.betas=[0.9]", "trainer.betas=[0.9]: give a list of the right length."),
        ("trainer.betas=[0.9,1]", "trainer.betas=[0.9,1]: give a number less than 1."),
        ("engine.temperature=-0.1", "engine.temperature=-0.1: give a number of at least 0."),
        ("engine.top_p=1.5", "engine.top_p=1.5: give a number of at most 1."),
        ("reward.concurrency=0", "reward.concurrency=0: give a number greater than 0."),
        ("data.shuffle=maybe", "data.shuffle=maybe: give true or false."),
        ("policy.order=idx", "policy.order=idx: give arrival or index (did you mean 'index'?)."),
        ("data.truncation=sideways", "data.truncation=sideways: give error, left, right or middle."),
        ("runs=null", "runs=null: give a text."),
        ("data.train=''", "data.train='': give a text that is not empty."),
        ("name=a/b", "name=a/b: give a plain directory name, without slashes."),
        ("steps=[1", "steps=[1: the value is not YAML; put quotes around a text."),
        (
            "tracking=64",
            "tracking=64: 'tracking' is a section; set one of its keys: tracking.backends, tracking.project.",
        ),
        ("steps", "argument 'steps' has no '='; write key=value, such as steps=5."),
        ("=3", "argument '=3' has no key before '='; write key=value."),
        (
            "judge.latency=unifrm:1:40",
            "judge.latency 'unifrm:1:40': no distribution is named 'unifrm'; did you mean 'uniform'?",
        ),
        ("engine.n=1", "engine.n=1: 'grpo' compares one prompt's responses; give 2 or more."),
        (
            "trainer.world_size=3",
            "trainer.world_size=3 does not divide a mini-batch's 64 rows "
            "(data.prompts / trainer.mini_batches x engine.n).",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(args: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(RunConfig, [args] if "{" in args else args.split(" "))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("args", "at", "value", "replaced"),
    [
        (["steps=3", "steps=4"], "steps", 4, ("steps=4 in place of steps=3",)),
        (["steps=3", "steps=3"], "steps", 3, ()),
        (
            ["policy=baseline", "policy.preset=both", "policy={preset: mini-batch}"],
            "policy.preset",
            "mini-batch",
            (
                "policy.preset=both in place of policy=baseline",
                "policy={preset: mini-batch} in place of policy.preset=both",
            ),
        ),
        (["reward.timeout=9", "reward={timeout: 2}"], "reward.timeout", 2, None),
        (["trainer.optimizer_kwargs={a: 1, b: 2}", "trainer.optimizer_kwargs.a=3"], "trainer.optimizer_kwargs",
         {"a": 3, "b": 2}, ()),
        (["trainer.optimizer_kwargs.a=3", "trainer.optimizer_kwargs={b: 2}"], "trainer.optimizer_kwargs",
         {"b": 2}, None),
        (["trainer.optimizer_kwargs=null", "trainer.optimizer_kwargs.a=3"], "trainer.optimizer_kwargs", {"a": 3}, ()),
    ],
)  # fmt: skip
def test_a_later_argument_wins(args: list[str], at: str, value: object, replaced: tuple[str, ...] | None) -> None:
    config = parse_overrides(RunConfig, args)
    assert functools.reduce(getattr, at.split("."), config) == value  # type: ignore[arg-type]
    assert config.replaced == ((f"{args[1]} in place of {args[0]}",) if replaced is None else replaced)


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


def test_clip_ratio_spreads_to_the_sides_that_are_not_given() -> None:
    both = parse_overrides(RunConfig, ["algorithm.clip_ratio=0.3"]).algorithm
    assert (both.clip_ratio_low, both.clip_ratio_high) == (0.3, 0.3)
    one = parse_overrides(RunConfig, ["algorithm.clip_ratio=0.3", "algorithm.clip_ratio_high=0.4"]).algorithm
    assert (one.clip_ratio_low, one.clip_ratio_high) == (0.3, 0.4)


class Mine(RunConfig):
    """A pipeline's own."""

    engine: EngineConfig = EngineConfig(n=4, max_tokens=8)
    max_chars: int = 80
    """Characters a response may have."""


def test_a_pipeline_may_add_keys_and_defaults_and_an_override_leaves_the_others() -> None:
    config = parse_overrides(Mine, ["max_chars=5", "engine.temperature=0.5"])
    assert (config.max_chars, config.engine.n, config.engine.max_tokens) == (5, 4, 8)
    assert config.engine.temperature == 0.5
    assert parse_overrides(Mine, []).engine.temperature == 1.0
    assert "max_chars=80" in describe(Mine)
    assert "engine.n=4" in describe(Mine)


def test_dump_is_resolved_and_reads_back() -> None:
    config = parse_overrides(RunConfig, ["policy=off-policy", "trainer.lr=1e-5", "name=x"])
    values = yaml.safe_load(dump_yaml(config))
    numbers = {"split": 1, "max_staleness": 1, "order": "arrival", "stream_rollout": False}
    assert values["policy"] == {"preset": "off-policy", **numbers, "replan": 5, "gain": 0.03}
    assert values["trainer"]["lr"] == 1e-5
    again = build(RunConfig, values)
    assert again.policy.resolve(4) == config.policy.resolve(4)
    assert again.model_copy(update={"policy": config.policy}) == config


def test_build_names_the_key_of_a_bad_value_in_a_file() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lr=fast: give a number"):
        build(RunConfig, {"trainer": {"lr": "fast"}})
    with pytest.raises(ConfigError, match=r"unknown key 'trainer.ll'; did you mean 'trainer.lr'\?"):
        build(RunConfig, {"trainer": {"ll": 1}})


def test_made_in_python_the_values_are_checked_too() -> None:
    with pytest.raises(ValidationError):
        RunConfig(steps=0)
    with pytest.raises(DataflowError):
        RunConfig(policy={"preset": "nothing"})
    assert RunConfig(policy="baseline").policy.preset == "baseline"
    assert pickle.loads(pickle.dumps(RunConfig())) == RunConfig()


def test_describe_has_a_line_for_every_key() -> None:
    text = describe(RunConfig)
    assert "trainer.lr=1.0e-06" in text
    assert "policy.split=null" in text
    assert "trainer.betas=[0.9, 0.999]" in text
    assert "# judge: The HTTP judge" in text
    keys = [line.partition("=")[0] for line in text.splitlines() if line and not line.startswith("#")]
    paths = [".".join(path) for path, _ in fields(RunConfig)]
    assert sorted(keys) == sorted(p for p in paths if not any(q.startswith(f"{p}.") for q in paths))
    for line in text.splitlines():
        assert line.startswith("#") or not line or "  " in line, line


GOOD = '''
"""A pipeline."""
from __future__ import annotations
from dataflow.config.run import RunConfig

class Config(RunConfig):
    extra: int = 3
    """Something of its own."""

def helper():
    return 7

def pipeline(config: Config):
    return helper() + config.extra
'''


def test_a_pipeline_file_loads(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    module = load_pipeline_file(file)
    config = parse_overrides(module.Config, ["extra=4"])
    assert module.pipeline(config) == 11
    assert "Something of its own." in describe(module.Config)
    assert "dataflow_pipeline_mine" not in sys.modules


def test_functions_of_a_pipeline_file_travel_by_value(tmp_path: Path) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    module = load_pipeline_file(file)
    sent = cloudpickle.dumps(module.helper)
    file.unlink()
    assert pickle.loads(sent)() == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Config = 3\ndef pipeline(config): ...", "'Config' is an object of type int; define 'class Config(PipelineCo"),
        (
            "from dataflow.config.run import RunConfig as Config",
            "lacks 'pipeline'; define pipeline(config) -> Pipeline.",
        ),
        ("x = 1\nimport no_such_module", "cannot be loaded (line 2): ModuleNotFoundError: No module named"),
        ("def pipeline(:", "cannot be loaded: SyntaxError: "),
        ("raise SystemExit('stop')", "cannot be loaded (line 1): SystemExit: stop."),
    ],
)
def test_a_bad_pipeline_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(file)
    assert message in str(caught.value)
    assert f"pipeline file '{file}'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_beside_a_pipeline_file_is_found_by_a_setting_that_the_error_names(tmp_path: Path) -> None:
    for file, name in (("helpers.py", "helpers"), ("package/__init__.py", "package.inner")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
        (tmp_path / "mine.py").write_text(f"import {name.partition('.')[0]}")
        with pytest.raises(ConfigError, match=rf"No module named .*; .*start with PYTHONPATH={tmp_path} in the env"):
            load_pipeline_file(tmp_path / "mine.py")


def test_an_error_in_a_pipeline_file_is_chained_and_a_users_error_passes(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("1 / 0")
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(file)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    file.write_text("from dataflow.errors import PipelineError\nraise PipelineError('two stages')")
    with pytest.raises(PipelineError, match="two stages"):
        load_pipeline_file(file)


def test_a_missing_pipeline_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_grpo.py").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"no pipeline file '.*gsm8k_gpro.py': .*; did you mean '.*gsm8k_grpo.py'\?"):
        load_pipeline_file(tmp_path / "gsm8k_gpro.py")
    (tmp_path / "x.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"is not a \.py file"):
        load_pipeline_file(tmp_path / "x.yaml")
    with pytest.raises(UserError):
        load_pipeline_file(tmp_path)


def test_a_rule_of_a_whole_section_names_its_keys_and_no_internals() -> None:
    with pytest.raises(ConfigError, match=r"^reward\.on_failure=replace_group and "):
        parse_overrides(RunConfig, ["reward.on_failure=replace_group"])


def test_a_text_in_a_mapping_keeps_its_quotes() -> None:
    config = parse_overrides(RunConfig, ["reward={manager_kwargs: {a: '1e5', b: ['010'], c: 1e5}}"])
    assert config.reward.manager_kwargs == {"a": "1e5", "b": ["010"], "c": 1e5}
    with pytest.raises(ConfigError, match=r"nests too deep, over 50 levels; give fewer\.$"):
        parse_overrides(RunConfig, ["reward.manager_kwargs=" + "[" * 3000])


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        (["reward.deadline=60"], False),
        (["reward.timeout=700"], False),
        (["reward.deadline=120"], True),
        (["reward.deadline=60", "reward.timeout=null"], True),
        (["reward.deadline=null", "reward.timeout=700"], True),
    ],
)
def test_a_deadline_must_allow_one_try(args: list[str], allowed: bool) -> None:
    if allowed:
        parse_overrides(RunConfig, args)
        return
    with pytest.raises(ConfigError, match=r"^reward\.deadline=\d+ ends a request .* \(reward\.timeout=\d+\); raise "):
        parse_overrides(RunConfig, args)


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
        (["data.gen_batch_size=48"], "samples groups that no step trains on; give algorithm.filter_groups.enable=true"),
        (["algorithm.filter_groups.enable=true", "data.gen_batch_size=32"], "leaves algorithm.filter_groups no group"),
        (["algorithm.filter_groups.enable=true", "data.gen_batch_size=8"], "leaves algorithm.filter_groups no group"),
        (
            ["algorithm.filter_groups.enable=true", "engine.n=1", "algorithm.adv_estimator=gpg"],
            "engine.n=1: the scores",
        ),
        (["algorithm.filter_groups.enable=true", "data.gen_batch_size=16777216"], "data.gen_batch_size=16777216 x"),
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
        ("algorithm=rloo", "algorithm.adv_estimator has no effect"),
        ("algorithm.use_kl_in_reward=true", "algorithm.use_kl_loss adds a KL term to the loss; leave it out."),
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.enable has no effect"),
        ("custom_reward_function.path=own.py", "it has no reward agent; leave it out."),
        ("reward.rpm=5", "reward.rpm has no effect in this pipeline: it has no reward agent"),
        ("judge.model=m", "judge.model has no effect in this pipeline"),
        ("samples.every=5", "samples.every has no effect in this pipeline: it keeps no samples"),
    ],
)
def test_a_key_that_no_stage_of_the_pipeline_reads_is_refused(given, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_overrides(distill.Config, [given])


def test_without_an_estimator_one_response_is_enough():
    config = parse_overrides(distill.Config, ["engine.n=1", "algorithm=gspo"])
    assert parse_overrides(distill.Config, [], values_of(config)).engine.n == 1, "its file can be read again"


@pytest.mark.parametrize("more", [[], ["algorithm.filter_groups.enable=true", "data.gen_batch_size=96"]])
def test_an_adaptive_coefficient_cannot_change_its_sign(more):
    keys = ["algorithm.use_kl_in_reward=true", "data.prompts=32", "engine.n=8", *more]
    samples = 8 * (96 if more else 32)
    adaptive = [*keys, "algorithm.kl_ctrl.type=adaptive"]
    words = rf"horizon={samples // 5}: a step of {samples} samples .* give {samples // 5 + 1} or more"
    with pytest.raises(ConfigError, match=words):
        parse_overrides(RunConfig, [*adaptive, f"algorithm.kl_ctrl.horizon={samples // 5}"])
    parse_overrides(RunConfig, [*adaptive, f"algorithm.kl_ctrl.horizon={samples // 5 + 1}"])
    parse_overrides(RunConfig, [*keys, "algorithm.kl_ctrl.horizon=1"])
