"""Section critic: its keys, and the names that verl has for them."""

from __future__ import annotations

import pytest

from dataflow.config.keys.overrides import fields, parse_overrides
from dataflow.config.keys.verl_keys import keys
from dataflow.config.training.critic import hint
from dataflow.errors import ConfigError, PolicyError
from pipelines.gsm8k_grpo import Config as Grpo
from pipelines.ppo_critic import Config

OURS = {".".join(path) for path, _ in fields(Config)}


def said(key: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(Config, [f"{key}=1"])
    return str(caught.value)


def test_every_key_of_verls_critic_has_a_name_or_a_reason() -> None:
    own = {key: row for key, row in keys().items() if "*" not in key and (f"{key} {row.ours}").count("critic.")}
    assert {"critic.optim.lr", "trainer.critic_warmup"} <= own.keys()
    for key, meaning in own.items():
        if key in OURS:  # as critic.grad_clip, which verl does not read itself
            continue
        assert meaning.ours in OURS if meaning.ours else meaning.note
        assert said(key).startswith(f"unknown key '{key}'; verl's '{key}' "), said(key)


def test_other_keys_are_those_of_any_pipeline() -> None:
    assert hint("data.train_batch_size") == "verl's 'data.train_batch_size' is 'data.prompts' here."
    assert "did you mean 'critic.grad_clip'" in said("critic.grad_clp")
    assert "keys of 'critic'" in said("critic.tomatoes")


@pytest.mark.parametrize("key", ["critic.lr", "critic.optim.lr", "trainer.critic_warmup"])
def test_a_pipeline_without_a_critic_names_the_one_that_has_it(key: str) -> None:
    with pytest.raises(ConfigError, match=r"has no critic; pipelines/ppo_critic\.py trains one"):
        parse_overrides(Grpo, [f"{key}=1"])


@pytest.mark.parametrize(
    "bad", ["critic.lr=0", "critic.warmup=-1", "critic.cliprange_value=0", "critic.loss_agg_mode=x"]
)
def test_values_out_of_range_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=bad.partition("=")[0]):
        parse_overrides(Config, [bad])


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            ["policy=mini-batch", "critic.mini_batches=2"],
            "policy.split=4 does not divide critic.mini_batches=2; use policy.split=1 or 2.",
        ),
        (
            ["data.prompts=16", "critic.mini_batches=3"],
            "critic.mini_batches=3 does not divide 16 prompt groups; use 1, 2, 4, 8 or 16.",
        ),
    ],
)
def test_mini_batches_that_do_not_fit_are_named_by_their_key(keys: list[str], sentence: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_overrides(Config, keys)
    assert str(caught.value) == sentence


def test_mini_batches_of_its_own_that_fit() -> None:
    config = parse_overrides(Config, ["policy=mini-batch", "policy.split=2", "critic.mini_batches=2"])
    assert config.critic.mini_batches == 2
