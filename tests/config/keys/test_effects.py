"""Keys that another one switches off: the table, and the sentences about those given in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.config.keys.effects import EFFECTS, without_effect
from dataflow.config.keys.nested import at
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.saved import load
from pipelines import gsm8k_grpo, ppo_critic


def said(*overrides: str) -> list[str]:
    config = parse_overrides(gsm8k_grpo.Config, overrides)
    return without_effect(config, config.given_keys)


def test_the_table_names_keys_that_there_are() -> None:
    config = ppo_critic.Config()
    for keys, other, _values in EFFECTS:
        for name in (*keys.split(), other):
            section, _, leaf = name.rpartition(".")
            assert leaf in type(at(config, section)).model_fields, name


@pytest.mark.parametrize(
    ("key", "off", "on"),
    [
        ("algorithm.lam=0.9", "algorithm.adv_estimator=grpo", "algorithm.adv_estimator=gae"),
        ("algorithm.kl_loss_coef=0.1", "algorithm.use_kl_loss=false", "algorithm.use_kl_loss=true"),
        ("algorithm.rollout_is_threshold=3", "algorithm.rollout_is=null", "algorithm.rollout_is=token"),
        ("algorithm.clip_ratio_high=0.3", "algorithm.policy_loss=gpg", "algorithm.policy_loss=gspo"),
        ("trainer.min_lr_ratio=0.1", "trainer.lr_scheduler=constant", "trainer.lr_scheduler=cosine"),
    ],
)
def test_a_key_without_the_other_one_is_named(key: str, off: str, on: str) -> None:
    name = key.partition("=")[0]
    assert said(key, off) == [f"{name} has no effect with {off}; change that or leave it out."]
    assert said(key, on) == []


def test_what_was_not_given_or_is_the_default_is_not_named() -> None:
    assert said("algorithm.lam=1.0") == []
    config = gsm8k_grpo.Config(algorithm={"lam": 0.9})
    assert without_effect(config, config.given_keys) == []


@pytest.mark.parametrize("recipe", sorted(Path("recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_give_no_key_in_vain(recipe: Path) -> None:
    _module, config = load(recipe, [])
    assert without_effect(config, config.given_keys) == []
