"""Keys that another one switches off: the table, and the sentences about those given in vain."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from dataflow.config.keys.effects import EFFECTS, without_effect
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.saved import load
from dataflow.rewards.naming import keyed
from pipelines import gsm8k_grpo, ppo_critic, two_judges


def said(*overrides: str) -> list[str]:
    config = parse_overrides(gsm8k_grpo.Config, overrides)
    return without_effect(config, config.given_keys, {})


def test_the_table_names_keys_that_there_are() -> None:
    config = ppo_critic.Config()
    for keys, (others, _met) in EFFECTS:
        for name in (*keys.split(), *others):
            section: object = config
            for part in name.split("."):
                assert hasattr(section, part), name
                section = getattr(section, part)


@pytest.mark.parametrize(
    ("key", "off", "on"),
    [
        ("algorithm.lam=0.9", "algorithm.adv_estimator=grpo", ["algorithm.adv_estimator=gae"]),
        ("algorithm.kl_loss_coef=0.1", "algorithm.use_kl_loss=false", ["algorithm.use_kl_loss=true"]),
        (
            "algorithm.rollout_is=token",
            "algorithm.bypass_mode=true and algorithm.bypass_loss=ppo_clip",
            ["algorithm.bypass_mode=true", "algorithm.bypass_loss=reinforce"],
        ),
        ("algorithm.rollout_is_threshold=3", "algorithm.rollout_is=null", ["algorithm.rollout_is=token"]),
        ("algorithm.clip_ratio_high=0.3", "algorithm.policy_loss=gpg", ["algorithm.policy_loss=gspo"]),
        ("algorithm.loss_agg_mode=token-sum", "algorithm.policy_loss=sapo", ["algorithm.policy_loss=dppo_kl"]),
        ("engine.max_tokens=512", "tools.max_response_tokens=256", ["tools.max_response_tokens=512"]),
        ("judge.model=x", "judge.url=null", ["judge.url=http://h:1"]),
        ("trainer.min_lr_ratio=0.1", "trainer.lr_scheduler=constant", ["trainer.lr_scheduler=cosine"]),
        ("trainer.betas=[0.8,0.9]", "trainer.optimizer=SGD", ["trainer.optimizer=Adam"]),
    ],
)
def test_a_key_without_the_other_one_is_named(key: str, off: str, on: list[str]) -> None:
    name, besides = key.partition("=")[0], ["tools.names=calculator"]
    assert said(key, *off.split(" and "), *besides) == [
        f"{name} has no effect with {off}; leave it out, or change that."
    ]
    assert said(key, *on, *besides) == []


def test_what_was_not_given_or_is_the_default_is_not_named() -> None:
    assert said("algorithm.lam=1.0") == []
    config = gsm8k_grpo.Config(algorithm={"lam": 0.9})
    assert without_effect(config, config.given_keys, {}) == []


def test_the_keys_of_a_further_agent_are_its_own_and_one_reason_is_one_sentence() -> None:
    config = parse_overrides(two_judges.Config, ["rule.judge.template=t", "rule.judge.model=m", "judge.url=http://h"])
    assert without_effect(config, config.given_keys, {"rule": partial(keyed, agent="rule")}) == [
        "rule.judge.model, rule.judge.template have no effect with rule.judge.url=null; leave them out, or change that."
    ]


@pytest.mark.parametrize("recipe", sorted(Path("recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_give_no_key_in_vain(recipe: Path) -> None:
    _module, config = load(recipe, [])
    assert without_effect(config, config.given_keys, {}) == []
