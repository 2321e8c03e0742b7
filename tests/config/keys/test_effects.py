"""Keys that have an effect only beside another one: the table, and the sentences about those given in vain."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from dataflow.config.keys.effects import EFFECTS, without_effect
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.saved import load
from dataflow.config.run import RunConfig
from dataflow.rewards.naming import keyed
from pipelines import gsm8k_grpo, two_judges

ROOT = Path(__file__).parents[3]


def said(*overrides: str) -> list[str]:
    config = parse_overrides(gsm8k_grpo.Config, overrides)
    return without_effect(config, config.given_keys, {})


def test_the_table_names_keys_that_there_are() -> None:
    config = RunConfig()
    for key, needs in EFFECTS.items():
        for name in (key, *(other for need in needs for other in need.keys)):
            section: object = config
            for part in name.split("."):
                assert hasattr(section, part), name
                section = getattr(section, part)


@pytest.mark.parametrize(
    ("key", "beside", "with_effect"),
    [
        ("algorithm.lam=0.9", "algorithm.adv_estimator=grpo", ["algorithm.adv_estimator=gae"]),
        ("algorithm.kl_loss_coef=0.1", "algorithm.use_kl_loss=false", ["algorithm.use_kl_loss=true"]),
        (
            "algorithm.kl_ctrl.horizon=9000000",
            "algorithm.kl_ctrl.type=fixed",
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"],
        ),
        ("algorithm.rollout_is_threshold=3", "algorithm.rollout_is=null", ["algorithm.rollout_is=token"]),
        ("tools.timeout=5", "tools.path=null and tools.names=[]", ["tools.names=calculator"]),
        ("reward.backoff=2", "reward.tries=1", ["reward.tries=2"]),
        ("reward.ledger=false", "reward.cache=c.sqlite", ["reward.cache=null"]),
        ("val.n=4", "val.every=0", ["val.every=2"]),
        ("val.top_p=0.7", "val.temperature=0.0", ["val.temperature=1"]),
        ("val.top_k=5", "val.every=0", ["val.temperature=1"]),
        ("checkpoint.keep_best=3", "checkpoint.every=0", ["checkpoint.every=1"]),
        ("ray.num_cpus=4", "executor=inline", ["executor=ray"]),
        ("judge.model=x", "custom_reward_function.path=f.py", ["custom_reward_function.path=null"]),
    ],
)
def test_a_key_without_the_other_one_is_named(key: str, beside: str, with_effect: list[str]) -> None:
    name = key.partition("=")[0]
    off = [each for each in beside.split(" and ") if name != each]
    if name == "algorithm.kl_ctrl.horizon":
        off.append("algorithm.use_kl_in_reward=true")
    assert said(key, *off) == [f"{name} has no effect with {beside}; leave it out, or change that."]
    assert said(key, *with_effect) == []


def test_what_was_not_given_or_is_the_default_is_not_named() -> None:
    assert said("val.every=0", "algorithm.lam=1.0") == []
    config = gsm8k_grpo.Config(val={"every": 0, "n": 4})
    assert without_effect(config, config.given_keys, {}) == []


def test_keys_with_one_reason_are_one_sentence_without_their_values() -> None:
    (sentence,) = said("custom_reward_function.path=f.py", "judge.url=http://me:secret@h:1", "judge.model=x")
    assert sentence.startswith("judge.url, judge.model have no effect with custom_reward_function.path=f.py; ")


def test_the_keys_of_a_further_agent_are_its_own() -> None:
    config = parse_overrides(two_judges.Config, ["rule.floor=3", "reward.floor=2", "reward.adaptive=true"])
    assert without_effect(config, config.given_keys, {"rule": partial(keyed, agent="rule")}) == [
        "rule.floor has no effect with rule.adaptive=false; leave it out, or change that."
    ]


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_give_no_key_in_vain(recipe: Path) -> None:
    _module, config = load(recipe, [])
    assert without_effect(config, config.given_keys, {}) == []
