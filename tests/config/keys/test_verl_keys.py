"""verl's keys: each has an equivalent or a reason for having none, and no hint names a key of another meaning."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from dataflow.config.keys.nested import flat
from dataflow.config.keys.overrides import fields
from dataflow.config.keys.verl_keys import COMMON, find, hint, keys, sections
from dataflow.config.run import RunConfig, parse_overrides
from dataflow.errors import ConfigError
from dataflow.importing.conversions import CONVERSIONS
from dataflow.importing.imported import WithCritic
from dataflow.importing.settings import BASES

OURS = {".".join(path) for path, _ in fields(RunConfig)} | {".".join(path) for path, _ in fields(WithCritic)}
OLDER = {"reward_model.launch_reward_fn_async"}
"""Keys of verl's earlier versions."""

ADDED = (
    "reward.custom_reward_function.reward_kwargs",
    "reward.reward_kwargs.",
    "algorithm.gdpo_reward_",
    "custom_reward_function.reward_kwargs.",
    "reward_model.reward_kwargs.",
)
"""What verl reads although its files do not have it; a launch adds it with +."""


def said(key: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(RunConfig, [f"{key}=1"])
    return str(caught.value)


@pytest.mark.slow
def test_every_key_names_one_of_ours_or_a_reason() -> None:
    for key, meaning in keys().items():
        if meaning.moved is not None:
            assert find(meaning.moved.replace("*", "x")) is not None, key
            continue
        assert meaning.ours in OURS if meaning.ours else meaning.note, key
        assert meaning.how in CONVERSIONS or not meaning.how, key
        assert meaning.fine is None or meaning.ours is None, key
        if meaning.ours == key or "*" in key or key.startswith("critic."):
            continue
        assert said(key).startswith(f"unknown key '{key}'; verl's '{key}' "), said(key)
        if meaning.ours and not meaning.ours.startswith("critic."):
            assert f"is '{meaning.ours}' here" in said(key)


def test_each_conversion_is_used() -> None:
    assert {meaning.how for meaning in keys().values()} - {""} == set(CONVERSIONS)


# Each has about a thousand lines: reading them in Python takes a second.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
VERLS = {
    base: dict(flat(yaml.load((Path(spec.origin).parent / "trainer" / "config" / name).read_text(), LOADER)))
    for base, name in BASES.items()
    if (spec := importlib.util.find_spec("verl")) is not None and spec.origin is not None
}


@pytest.mark.skipif(not VERLS, reason="verl is not installed")
@pytest.mark.parametrize("base", sorted(set(BASES)))
def test_every_key_of_verls_own_configurations_is_known(base: str) -> None:
    unknown = [key for key in VERLS[base] if find(key) is None and not key.endswith("._target_")]
    assert unknown == [], "verl has keys that dataflow/config/keys/verl_keys.yaml does not know; add a row for each"


@pytest.mark.skipif(not VERLS, reason="verl is not installed")
def test_every_key_is_one_of_verls() -> None:
    theirs = {key for values in VERLS.values() for key in values}
    sections = {key[:at] for key in theirs for at in range(len(key)) if key[at] == "."}
    for key in keys():
        if key in OLDER or key.startswith(ADDED):
            continue
        # A section that is empty in verl's files takes keys of the launch.
        bare = key.rstrip("*").rstrip("._")
        assert bare in theirs or bare in sections or any(each.startswith(bare) for each in theirs), key


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("data.train_batch_size", "is 'data.prompts' here"),
        ("+data.train_batch_size", "is 'data.prompts' here"),
        ("trainer.save_freq", "is 'checkpoint.every' here: 0 saves none"),
        ("trainer.resume_from_path", "'dataflow resume runs/NAME' resumes"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "data.prompts divided by verl's value"),
        ("actor_rollout_ref.rollout.no_such_key", "section engine holds the options of rollout"),
        ("actor_rollout_ref.no_such_key", "sections model, engine, trainer and algorithm"),
        ("global_profiler", "has no counterpart here: a run writes trace.json"),
        ("reward_model.reward_manager", "is 'reward.manager' here"),
        (
            "+data.apply_chat_template_kwargs.enable_thinking",
            "is 'data.apply_chat_template_kwargs' here: the same options, without Hydra's +",
        ),
        ("critic.optim.lr", "has no critic; pipelines/ppo_critic.py trains one"),
    ],
)
def test_what_verl_calls_otherwise_is_named(key: str, message: str) -> None:
    assert message in said(key)


@pytest.mark.parametrize(
    ("key", "not_named"),
    [
        ("data.train_batch_size", "data.train_size"),
        ("trainer.save_freq", "trainer.lr"),
        ("trainer.micro_batch", "trainer.mini_batches"),
    ],
)
def test_no_hint_names_a_key_of_another_meaning(key: str, not_named: str) -> None:
    assert f"did you mean '{not_named.strip(chr(39))}'" not in said(key)


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("worldsize", "trainer.world_size"),
        ("trainer.lrr", "trainer.lr"),
        ("engine.top-p", "engine.top_p"),
        ("reward.concurency", "reward.concurrency"),
        ("policy.staleness", "policy.max_staleness"),
        ("++engine.max_tokens", "engine.max_tokens"),
    ],
)
def test_a_misspelt_key_is_named(key: str, named: str) -> None:
    assert f"did you mean '{named}'?" in said(key)


def test_what_other_trainers_call_a_key_names_the_one_of_that_meaning() -> None:
    for key, (ours, meaning) in COMMON.items():
        assert ours in OURS
        assert said(key) == f"unknown key '{key}'; '{ours}' is {meaning}."


def test_sections_have_a_sentence_each() -> None:
    for section, sentence in sections().items():
        assert sentence in str(hint(f"{section}.no_such_key_at_all"))
