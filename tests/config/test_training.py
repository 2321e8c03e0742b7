"""The keys that trained models share: what does not fit together is one sentence."""

from __future__ import annotations

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.run import RunConfig, TrainerConfig
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
            ["trainer.lora.target_modules=[q_proj]"],
            "trainer.lora.target_modules has no effect without trainer.lora.rank; give that, such as 32.",
        ),
        (
            ["trainer.optimizer=AdamX"],
            "trainer.optimizer=AdamX: torch.optim has none of that name; give one of ASGD, Adadelta, Adagrad, Adam, "
            "AdamW, Adamax, NAdam, RAdam, RMSprop, SGD, or the module that has it as trainer.optimizer_impl.",
        ),
        (
            ["trainer.warmup_steps=31"],
            "trainer.warmup_steps=31: the run has only 30 steps (steps), so that trainer.lr is never "
            "reached; give fewer.",
        ),
        (
            ["trainer.warmup_ratio=0.1", "trainer.warmup_steps=3"],
            "trainer.warmup_ratio=0.1 and trainer.warmup_steps=3 are two numbers for one; give "
            "trainer.warmup_steps=null beside the ratio, or leave that out.",
        ),
        (
            ["trainer.world_size=4", "trainer.fsdp_size=3"],
            "trainer.fsdp_size=3 does not divide trainer.world_size=4; give a divisor of it.",
        ),
        (
            ["critic.warmup_steps=99"],
            "critic.warmup_steps=99: the run has only 30 steps (steps), so that critic.lr is never reached; give "
            "fewer.",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(keys: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(Ppo if keys[0].startswith("critic") else RunConfig, keys)
    assert str(caught.value) == sentence


def test_nothing_is_moved_from_gpus_that_are_not_there() -> None:
    options = TrainerConfig(param_offload=True)
    options.check_device("cuda")
    with pytest.raises(ConfigError, match=r"^trainer\.param_offload=true moves tensors from GPUs to CPU memory"):
        options.check_device("cpu")
