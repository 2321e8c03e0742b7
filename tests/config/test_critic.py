"""Section critic: its keys, and the names that verl has for them."""

from __future__ import annotations

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.errors import ConfigError, PolicyError
from pipelines.gsm8k_grpo import Config as Grpo
from pipelines.ppo_critic import Config


def test_keys_of_verls_critic_have_a_name() -> None:
    for key, message in (
        ("critic.optim.lr", "verl's 'critic.optim.lr' is 'critic.lr' here"),
        ("trainer.critic_warmup", "is 'critic.warmup' here"),
        ("critic.grad_clp", "did you mean 'critic.grad_clip'"),
        ("critic.tomatoes", "keys of 'critic'"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_overrides(Config, [f"{key}=1"])
        assert message in str(caught.value)


@pytest.mark.parametrize("key", ["critic.lr", "critic.optim.lr", "trainer.critic_warmup"])
def test_a_pipeline_without_a_critic_names_the_one_that_has_it(key: str) -> None:
    with pytest.raises(ConfigError, match=r"this pipeline has no critic; pipelines/ppo_critic\.py trains one"):
        parse_overrides(Grpo, [f"{key}=1"])


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
    config = parse_overrides(Config, ["policy=mini-batch", "policy.split=2", "critic.mini_batches=2"])
    assert config.critic.mini_batches == 2
