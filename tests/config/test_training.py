"""The keys that trained models share: what does not fit together is one sentence."""

from __future__ import annotations

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.run import RunConfig
from dataflow.errors import ConfigError
from pipelines.gsm8k_grpo import Config as Grpo
from pipelines.ppo_critic import Config as Ppo


def test_the_defaults_are_for_real_models_and_the_recipes_own_for_a_tiny_one() -> None:
    real, toy = RunConfig().trainer, Grpo().trainer
    assert (real.lr, real.betas, real.weight_decay, real.warmup_in(30)) == (1e-6, (0.9, 0.999), 0.01, 0)
    assert (toy.lr, toy.betas, toy.weight_decay, toy.warmup_in(30)) == (2e-4, (0.9, 0.99), 0.0, 5)
    assert (Ppo().trainer, Ppo().critic.lr) == (toy, 1e-3)
    assert (RunConfig().engine_memory, RunConfig(placement="disaggregated").engine_memory) == (0.6, 0.9)
    assert parse_overrides(RunConfig, ["engine.gpu_memory=0.3"]).engine_memory == 0.3


def test_a_warm_up_is_a_number_of_steps_or_a_share_of_them_and_a_short_run_may_have_that_of_its_pipeline() -> None:
    for keys, steps in (([], 0), (["trainer.warmup_steps=7"], 7), (["trainer.warmup_ratio=0.1"], 3)):
        assert parse_overrides(RunConfig, keys).trainer.warmup_in(30) == steps
    assert parse_overrides(Grpo, ["steps=2"]).trainer.warmup_steps == 5


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            ["trainer.warmup_ratio=0.1", "trainer.warmup_steps=3"],
            "trainer.warmup_ratio=0.1 and trainer.warmup_steps=3 are two numbers for one; give "
            "trainer.warmup_steps=null beside the ratio, or leave that out.",
        ),
        (
            ["trainer.world_size=4", "trainer.fsdp_size=3"],
            "trainer.fsdp_size=3 does not divide trainer.world_size=4; give a divisor of it.",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(keys: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(RunConfig, keys)
    assert str(caught.value) == sentence
