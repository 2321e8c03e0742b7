"""verl's keys: each that has an equivalent is one of verl's, and no hint names a key of another meaning."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dataflow.config.keys import yaml_values
from dataflow.config.keys.nested import flat
from dataflow.config.keys.overrides import fields
from dataflow.config.keys.verl_keys import find, keys, table
from dataflow.config.run import RunConfig, parse_overrides
from dataflow.errors import ConfigError
from dataflow.importing.conversions import CONVERSIONS
from dataflow.importing.imported import WithCritic
from dataflow.importing.settings import BASES

ADDED = (
    "reward.custom_reward_function.reward_kwargs",
    "reward.reward_kwargs.",
    "algorithm.gdpo_reward_",
    "actor_rollout_ref.actor.optim.warmup_style",
    "critic.optim.warmup_style",
)
"""What verl reads although its files do not have it; a launch adds it with +."""


def said(key: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(RunConfig, [f"{key}=1"])
    return str(caught.value)


def test_every_key_names_one_of_ours() -> None:
    ours = {".".join(path) for path, _ in fields(WithCritic)}
    for key, meaning in keys().items():
        assert str(meaning.ours).removesuffix(".*") in ours, key
    for present in table()["moved"].values():
        assert any(key.startswith(present.removesuffix("*")) for key in keys()) or find(present), present
    for key in CONVERSIONS:
        assert find(key.replace("*", "x")).ours is not None, key  # type: ignore[union-attr]


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_every_key_is_one_of_verls() -> None:
    folder = Path(str(importlib.util.find_spec("verl").origin)).parent / "trainer" / "config"  # type: ignore[union-attr]
    files = {name for name in BASES.values() if name.endswith(".yaml")}
    theirs = {key for name in files for key, _ in flat(yaml_values.load((folder / name).read_text()))}
    for key in keys():
        bare = key.removesuffix(".*")
        assert key.startswith(ADDED) or any(f"{each}.".startswith(f"{bare}.") for each in theirs), key


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("data.train_batch_size", "is 'data.prompts' here"),
        ("+data.train_batch_size", "is 'data.prompts' here"),
        ("trainer.save_freq", "is 'checkpoint.every' here: 0 saves none"),
        ("trainer.resume_from_path", "'dataflow resume runs/NAME' resumes"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "data.prompts divided by verl's value"),
        ("actor_rollout_ref.rollout.no_such_key", "'dataflow import-verl --keys' lists verl's keys"),
        ("reward_model.reward_manager", "is 'reward.manager' here"),
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
