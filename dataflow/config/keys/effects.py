"""Effects: keys that matter only beside another one, as a table, and what a run says of those that were given in vain.

They are warnings, not errors: a key that another one switches off may wait in a file for the day it is switched on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from dataflow.config.keys import yaml_values


class Beside(NamedTuple):
    """What a key needs: one of some keys with a value that suits it.

    Attributes:
        keys: dotted.
        suits: whether a value of one of them does.
    """

    keys: tuple[str, ...]
    suits: Callable[[Any], bool]


def _of(key: str, *values: Any) -> Beside:
    return Beside((key,), lambda value: value in values)


def _not(key: str, *values: Any) -> Beside:
    return Beside((key,), lambda value: value not in values)


def _given(*keys: str) -> Beside:
    """One of these keys is not null, false, 0 or empty."""
    return Beside(keys, bool)


def _above(key: str, least: float) -> Beside:
    return Beside((key,), lambda value: value > least)


def _each(keys: str, *needs: Beside) -> dict[str, tuple[Beside, ...]]:
    return dict.fromkeys(keys.split(), needs)


_LOSS, _ESTIMATOR, _EVERY = "algorithm.policy_loss", "algorithm.adv_estimator", "checkpoint.every"
EFFECTS: Mapping[str, tuple[Beside, ...]] = {
    **_each("algorithm.gamma", _of(_ESTIMATOR, "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")),
    **_each("algorithm.lam algorithm.whiten", _of(_ESTIMATOR, "gae")),
    **_each("algorithm.norm_adv_by_std_in_grpo", _of(_ESTIMATOR, "grpo", "grpo_vectorized", "grpo_passk", "gdpo")),
    **_each("algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights", _of(_ESTIMATOR, "gdpo")),
    **_each("algorithm.clip_ratio_c", _of(_LOSS, "vanilla", "dppo_tv", "dppo_kl")),
    **_each("algorithm.clip_cov_ratio algorithm.clip_cov_lb algorithm.clip_cov_ub", _of(_LOSS, "clip_cov")),
    **_each("algorithm.kl_cov_ratio algorithm.ppo_kl_coef", _of(_LOSS, "kl_cov")),
    **_each("algorithm.dro_beta", _of(_LOSS, "dro")),
    **_each("algorithm.tau_pos algorithm.tau_neg", _of(_LOSS, "sapo")),
    **_each("algorithm.loss_scale_factor", _of("algorithm.loss_agg_mode", "seq-mean-token-sum-norm")),
    **_each("algorithm.kl_loss_coef algorithm.kl_loss_type", _given("algorithm.use_kl_loss")),
    **_each(
        "algorithm.kl_penalty algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef",
        _given("algorithm.use_kl_in_reward"),
    ),
    **_each(
        "algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl",
        _given("algorithm.use_kl_in_reward"),
        _of("algorithm.kl_ctrl.type", "adaptive"),
    ),
    **_each("algorithm.filter_groups.metric", _given("algorithm.filter_groups.enable")),
    **_each("algorithm.rollout_is_threshold algorithm.rollout_is_batch_normalize", _given("algorithm.rollout_is")),
    **_each("checkpoint.keep_last checkpoint.keep_every checkpoint.max_failed checkpoint.on_interrupt", _given(_EVERY)),
    **_each("checkpoint.keep_best", _given(_EVERY), _given("val.every")),
    **_each("checkpoint.grace_s", _given(_EVERY), _given("checkpoint.on_interrupt")),
    **_each("data.train_size", _of("data.train", None)),
    **_each("data.truncation", _of("data.filter_overlong_prompts", False)),
    **_each("val.n val.temperature", _given("val.every")),
    **_each("val.top_k val.top_p", _given("val.every"), _given("val.temperature")),
    **_each("engine.in_flight engine.kv_cache_gb", _not("engine.rollout", "hf")),
    **_each("engine.gpu_memory", _not("engine.rollout", "hf"), _given("ray.gpus_per_worker")),
    **_each("ray.address ray.start_timeout", _of("executor", "ray")),
    **_each("ray.fork ray.num_cpus", _of("executor", "ray"), _of("ray.address", None)),
    **_each("reward.backoff reward.max_backoff", _above("reward.tries", 1)),
    **_each("reward.floor", _given("reward.adaptive")),
    **_each("reward.ledger", _of("reward.cache", None)),
    **_each("reward.max_failed_share", _not("reward.on_failure", "fail")),
    **_each("reward.model_tokenizer reward.router_address", _given("custom_reward_function.path")),
    **_each("samples.most", _given("samples.every")),
    **_each("tools.format tools.frozen_after tools.timeout", _given("tools.path", "tools.names")),
    **_each("tools.max_response_tokens tools.max_turns", _given("tools.path", "tools.names")),
    **_each("tracking.project", _given("tracking.backends")),
    **_each("trainer.epochs_over", _above("trainer.epochs", 1)),
    # The delays of its stand-in are set for whatever scores.
    **_each(
        "judge.method judge.template judge.system judge.score_pattern judge.score_range judge.normalize "
        "judge.temperature judge.max_tokens_reply judge.options judge.url judge.model judge.api_key_env judge.client "
        "judge.max_tokens judge.max_cost judge.price_per_million judge.timeout",
        _of("custom_reward_function.path", None),
    ),
}
"""What a key needs to have an effect: all of these."""
_HAVE = ("has", "have")


def without_effect(config: BaseModel, given: Collection[str], agents: Mapping[str, Callable[[str], str]]) -> list[str]:
    """Returns sentences about keys that were given, are not at their defaults, and have no effect.

    Args:
        config: of a run.
        given: the keys that the user gave, dotted.
        agents: what makes a key of section reward, judge or custom_reward_function one of each further agent, by name.
    """
    own = {key: needs for key, needs in EFFECTS.items() if key.startswith(("reward.", "judge."))}
    tables: list[tuple[Mapping[str, tuple[Beside, ...]], Callable[[str], str]]] = [(EFFECTS, str)]
    tables += [(own, named) for named in agents.values()]
    idle: dict[str, list[str]] = {}
    for table, named in tables:
        for key, needs in table.items():
            if named(key) not in given or _at_default(config, named(key)):
                continue
            if missed := [beside for need in needs if (beside := _missed(config, need, named))]:
                idle.setdefault(missed[0], []).append(named(key))
    return [
        f"{', '.join(keys)} {_HAVE[len(keys) > 1]} no effect with {beside}; leave it out, or change that."
        for beside, keys in idle.items()
    ]


def _missed(config: BaseModel, need: Beside, named: Callable[[str], str]) -> str:
    """Returns the values that do not meet a need, as ``key=value``; "" if one does."""
    others = {named(other): _value(config, named(other)) for other in need.keys}
    met = any(map(need.suits, others.values()))
    return "" if met else " and ".join(f"{other}={yaml_values.inline(value)}" for other, value in others.items())


def _section(config: BaseModel, key: str) -> tuple[Any, str]:
    *path, name = key.split(".")
    return functools.reduce(getattr, path, config), name


def _value(config: BaseModel, key: str) -> Any:
    return getattr(*_section(config, key))


def _at_default(config: BaseModel, key: str) -> bool:
    section, name = _section(config, key)
    return bool(getattr(section, name) == type(section).model_fields[name].get_default(call_default_factory=True))
