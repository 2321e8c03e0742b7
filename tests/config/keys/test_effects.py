"""Keys that have an effect only beside another one: the table, and the sentences about those given in vain."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from dataflow.config.keys.effects import EFFECTS, without_effect
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.saved import load
from dataflow.rewards.naming import keyed
from pipelines import gsm8k_grpo, ppo_critic, two_judges

ROOT = Path(__file__).parents[3]
BESIDES: dict[str, list[str]] = {
    "algorithm.kl_ctrl.horizon": ["algorithm.use_kl_in_reward=true"],
    "engine.max_tokens": ["tools.path=tools.py"],
    "judge.method": ["judge.url=http://h:1"],
    "val.temperature": ["val.every=1"],
}
"""What a case needs besides, by its key."""


def said(*overrides: str) -> list[str]:
    config = parse_overrides(gsm8k_grpo.Config, overrides)
    return without_effect(config, config.given_keys, {}, {"policy.max_staleness": config.policy.max_staleness or 0})


def test_the_table_names_keys_that_there_are() -> None:
    config = ppo_critic.Config()
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
        ("val.n=4", "val.every=0", ["val.every=2", "val.temperature=1"]),
        ("val.n=4", "val.temperature=0.0", ["val.temperature=0.7"]),
        ("val.n=4", "val.top_k=1", ["val.temperature=0.7"]),
        ("val.top_p=0.7", "val.temperature=0.0", ["val.temperature=1"]),
        ("val.top_k=5", "val.every=0", ["val.temperature=1"]),
        ("data.val=held_out.jsonl", "val.every=0", ["val.every=1"]),
        ("data.val_size=9", "val.every=0", ["val.every=1"]),
        ("algorithm.clip_ratio_high=0.3", "algorithm.policy_loss=gpg", ["algorithm.policy_loss=gspo"]),
        ("algorithm.loss_agg_mode=token-sum", "algorithm.policy_loss=sapo", ["algorithm.policy_loss=dppo_kl"]),
        (
            "algorithm.clip_ratio=0.3",
            "algorithm.clip_ratio_low=0.2 and algorithm.clip_ratio_high=0.28",
            ["algorithm.preset=gspo", "algorithm.clip_ratio_high=0.3"],
        ),
        (
            "algorithm.rollout_is=token",
            "algorithm.bypass_mode=true and algorithm.bypass_loss=ppo_clip",
            ["algorithm.bypass_mode=true", "algorithm.bypass_loss=reinforce"],
        ),
        ("checkpoint.keep_every=7", "checkpoint.every=10 and steps=30", ["checkpoint.every=3"]),
        (
            "engine.max_tokens=512",
            "tools.max_response_tokens=256",
            ["tools.names=calculator", "tools.max_response_tokens=512"],
        ),
        ("engine.max_num_seqs=8", "engine.rollout=hf and engine.replicas=1", ["engine.rollout=vllm"]),
        ("engine.restarts=5", "executor=inline", ["executor=ray"]),
        ("judge.latency=uniform:1:2", "judge.url=http://h:1", ["judge.url=null"]),
        ("judge.method=flexible", "judge.template=t.md", ["judge.template=null"]),
        ("judge.model=x", "judge.url=null", ["judge.url=http://h:1"]),
        ("judge.timeout=300", "reward.timeout=120.0", ["reward.timeout=400"]),
        ("reward.hedge_after=130", "reward.timeout=120.0", ["reward.timeout=200"]),
        ("tools.names=calculator", "tools.max_turns=1", ["tools.max_turns=2"]),
        ("trainer.balance_batch=true", "trainer.world_size=1", ["trainer.world_size=2"]),
        ("trainer.betas=[0.8,0.9]", "trainer.optimizer=SGD", ["trainer.optimizer=Adam"]),
        ("trainer.micro_batch_size=8", "trainer.max_tokens_per_gpu=9000", ["trainer.max_tokens_per_gpu=null"]),
        ("checkpoint.keep_best=3", "checkpoint.every=0", ["checkpoint.every=1"]),
        ("ray.num_cpus=4", "executor=inline", ["executor=ray"]),
        ("judge.model=x", "custom_reward_function.path=f.py", ["judge.url=http://h:1"]),
    ],
)
def test_a_key_without_the_other_one_is_named(key: str, beside: str, with_effect: list[str]) -> None:
    name = key.partition("=")[0]
    off = [each for each in beside.split(" and ") if name != each]
    off += BESIDES.get(name, [])
    off += ["val.temperature=1"] if beside == "val.top_k=1" else []
    assert said(key, *off) == [f"{name} has no effect with {beside}; leave it out, or change that."]
    assert said(key, *with_effect) == []


def test_weights_of_stale_samples_need_a_policy_with_some() -> None:
    keys = ("algorithm.rollout_is=token", "algorithm.rollout_is_stale_only=true")
    assert said(*keys, "policy=off-policy", "policy.max_staleness=1") == []
    (sentence,) = said(*keys, "policy=baseline")
    assert sentence.startswith("algorithm.rollout_is_stale_only has no effect with policy.max_staleness=0;")


def test_what_was_not_given_or_is_the_default_is_not_named() -> None:
    assert said("val.every=0", "algorithm.lam=1.0", "reward.hedge_after=p95") == []
    config = gsm8k_grpo.Config(val={"every": 0, "n": 4})
    assert without_effect(config, config.given_keys, {}) == []


def test_keys_with_one_reason_are_one_sentence_without_their_values() -> None:
    (sentence,) = said("custom_reward_function.path=f.py", "judge.url=http://me:secret@h:1", "judge.model=x")
    assert sentence.startswith(
        "judge.url, judge.model have no effect with custom_reward_function.path=f.py; leave them"
    )


def test_the_keys_of_a_further_agent_are_its_own() -> None:
    config = parse_overrides(two_judges.Config, ["rule.floor=3", "reward.floor=2", "reward.adaptive=true"])
    assert without_effect(config, config.given_keys, {"rule": partial(keyed, agent="rule")}) == [
        "rule.floor has no effect with rule.adaptive=false; leave it out, or change that."
    ]


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_give_no_key_in_vain(recipe: Path) -> None:
    _module, config = load(recipe, [])
    assert without_effect(config, config.given_keys, {}) == []
