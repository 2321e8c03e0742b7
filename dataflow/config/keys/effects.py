"""Effects: keys that matter only beside another one, as a table, and what a run says of those that were given in vain.

They are warnings, not errors: a key that another one switches off may wait in a file for the day it is switched on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import BaseModel

from dataflow.algorithms.losses import CLIPS, LOSSES
from dataflow.config.keys import yaml_values


class Beside(NamedTuple):
    """What a key needs to have an effect.

    Attributes:
        keys: others, dotted, that take the effect away; the sentence shows them.
        met: whether they leave it, given the key's own value and a function that returns another key's.
    """

    keys: tuple[str, ...]
    met: Callable[[Any, Callable[[str], Any]], bool]


def _of(key: str, *values: Any) -> Beside:
    return Beside((key,), lambda _own, of: of(key) in values)


def _not(key: str, *values: Any) -> Beside:
    return Beside((key,), lambda _own, of: of(key) not in values)


def _given(*keys: str) -> Beside:
    """One of these keys is not null, false, 0 or empty."""
    return Beside(keys, lambda _own, of: any(map(of, keys)))


def _above(key: str, least: float) -> Beside:
    return Beside((key,), lambda _own, of: of(key) > least)


def _within(key: str) -> Beside:
    """Its seconds are not above those of another key, which bounds it unless that is null; p95 is no number."""
    return Beside((key,), lambda own, of: of(key) is None or str(own).startswith("p") or float(own) <= of(key))


def _each(keys: str, *needs: Beside) -> dict[str, tuple[Beside, ...]]:
    return dict.fromkeys(keys.split(), needs)


def _keeps_one(every: int, of: Callable[[str], Any]) -> bool:
    """Whether a checkpoint of the run is of a step that checkpoint.keep_every keeps."""
    saved, steps = of("checkpoint.every"), of("steps")
    return not saved or math.lcm(saved, every) <= steps or steps % every == 0


def _in_turns(own: int, of: Callable[[str], Any]) -> bool:
    """Whether engine.max_tokens bounds a turn before tools.max_response_tokens bounds the conversation."""
    return not (of("tools.path") or of("tools.names")) or own <= of("tools.max_response_tokens")


_LOSS, _ESTIMATOR, _EVERY = "algorithm.policy_loss", "algorithm.adv_estimator", "checkpoint.every"
_CLIPPED = _of("algorithm.bypass_loss", "ppo_clip")
_SPREAD = Beside(
    ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
    lambda own, of: own in (of("algorithm.clip_ratio_low"), of("algorithm.clip_ratio_high")),
)
"""A preset may set both."""
_WEIGHS = Beside(
    ("algorithm.bypass_mode", "algorithm.bypass_loss"),
    lambda _own, of: not of("algorithm.bypass_mode") or of("algorithm.bypass_loss") == "reinforce",
)
"""PPO's loss of bypass_mode takes the rollout's log-probs for the old ones, and no weights besides."""
EFFECTS: Mapping[str, tuple[Beside, ...]] = {
    # Each loss of verl's with the keys that it reads.
    **{
        f"algorithm.{key}": (
            _of(_LOSS, *(name for name, loss in LOSSES.items() if key in loss.keys)),
            *((_CLIPPED,) if key in (*CLIPS, "clip_ratio_c") else ()),
            *((_SPREAD,) if key == "clip_ratio" else ()),
        )
        for key in dict.fromkeys(key for loss in LOSSES.values() for key in loss.keys)
    },
    **_each("algorithm.gamma", _of(_ESTIMATOR, "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")),
    **_each("algorithm.lam algorithm.whiten", _of(_ESTIMATOR, "gae")),
    **_each("algorithm.norm_adv_by_std_in_grpo", _of(_ESTIMATOR, "grpo", "grpo_vectorized", "grpo_passk", "gdpo")),
    **_each("algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights", _of(_ESTIMATOR, "gdpo")),
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
    **_each("algorithm.rollout_is", _WEIGHS),
    **_each(
        "algorithm.rollout_is_threshold algorithm.rollout_is_batch_normalize", _given("algorithm.rollout_is"), _WEIGHS
    ),
    **_each("algorithm.rollout_is_stale_only", _given("policy.max_staleness")),
    **_each("checkpoint.keep_last checkpoint.max_failed checkpoint.on_interrupt", _given(_EVERY)),
    **_each("checkpoint.keep_best", _given(_EVERY), _given("val.every")),
    **_each("checkpoint.keep_every", _given(_EVERY), Beside((_EVERY, "steps"), _keeps_one)),
    **_each("checkpoint.grace_s", _given(_EVERY), _given("checkpoint.on_interrupt")),
    **_each("data.train_size", _of("data.train", None)),
    **_each("data.truncation", _of("data.filter_overlong_prompts", False)),
    **_each("data.val data.val_size val.temperature", _given("val.every")),
    **_each("val.top_k val.top_p", _given("val.every"), _given("val.temperature")),
    **_each("val.n", _given("val.every"), _given("val.temperature"), _not("val.top_k", 1)),
    **_each("engine.in_flight", _not("engine.rollout", "hf")),
    **_each("engine.kv_cache_gb", _not("engine.rollout", "hf")),
    **_each(
        "engine.max_num_seqs",
        Beside(
            ("engine.rollout", "engine.replicas"),
            lambda _own, of: of("engine.rollout") != "hf" or of("engine.replicas") > 1,
        ),
    ),
    **_each(
        "engine.gpu_memory",
        _not("engine.rollout", "hf"),
        _given("ray.gpus_per_worker"),
        _of("engine.kv_cache_gb", None),
    ),
    **_each("engine.max_tokens", Beside(("tools.max_response_tokens",), _in_turns)),
    **_each("engine.restarts trainer.restarts ray.address ray.start_timeout", _of("executor", "ray")),
    **_each("ray.num_cpus", _of("executor", "ray"), _of("ray.address", None)),
    **_each("reward.restarts", _of("executor", "ray")),
    **_each("reward.backoff reward.max_backoff", _above("reward.tries", 1)),
    **_each("reward.floor", _given("reward.adaptive")),
    **_each("reward.hedge_after", _within("reward.timeout")),
    **_each("reward.ledger", _of("reward.cache", None)),
    **_each("reward.max_abandoned", _given("reward.timeout", "reward.deadline")),
    **_each("reward.max_failed_share", _not("reward.on_failure", "fail")),
    **_each("reward.model_tokenizer reward.router_address", _given("custom_reward_function.path")),
    **_each("samples.most", _given("samples.every")),
    **_each("tools.path tools.names", _above("tools.max_turns", 1)),
    **_each("tools.format tools.frozen_after tools.timeout", _given("tools.path", "tools.names")),
    **_each(
        "tools.max_response_tokens tools.max_tool_response_length tools.max_turns tools.tool_response_truncate_side",
        _given("tools.path", "tools.names"),
    ),
    **_each("tracking.project", _given("tracking.backends")),
    **_each("trainer.epochs_over", _above("trainer.epochs", 1)),
    **_each("trainer.balance_batch", _above("trainer.world_size", 1)),
    **_each("trainer.micro_batch_size", _of("trainer.max_tokens_per_gpu", None)),
    **{
        f"{section}.{key}": (_above("trainer.world_size", 1),)
        for section in ("trainer", "critic")
        for key in ("fsdp_size", "reshard_after_forward", "forward_prefetch")
    },
    **{
        f"{section}.betas": (_not(f"{section}.optimizer", "ASGD", "Adadelta", "Adagrad", "RMSprop", "SGD"),)
        for section in ("trainer", "critic")
    },
    # The stand-in reads the default prompt alone. Its delays are set for whatever scores.
    **_each("judge.latency judge.time_scale", _of("judge.url", None)),
    **_each(
        "judge.score_pattern judge.score_range judge.normalize judge.max_tokens judge.max_cost "
        "judge.price_per_million judge.url",
        _of("custom_reward_function.path", None),
    ),
    **_each("judge.method", _of("custom_reward_function.path", None), _of("judge.template", None)),
    **_each("judge.timeout", _of("custom_reward_function.path", None), _within("reward.timeout")),
    **_each(
        "judge.model judge.api_key_env judge.options judge.temperature judge.max_tokens_reply judge.template "
        "judge.system",
        _of("custom_reward_function.path", None),
        _given("judge.url"),
    ),
}
"""What a key needs to have an effect: all of these."""
_NUMBER = (("has", "it"), ("have", "them"))


def without_effect(
    config: BaseModel,
    given: Collection[str],
    agents: Mapping[str, Callable[[str], str]],
    settled: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Returns sentences about keys that were given, are not at their defaults, and have no effect.

    Args:
        config: of a run.
        given: the keys that the user gave, dotted.
        agents: what makes a key of section reward, judge or custom_reward_function one of each further agent, by name.
        settled: what the run makes of keys that leave it a choice, by key.
    """
    own = {key: needs for key, needs in EFFECTS.items() if key.startswith(("reward.", "judge."))}
    tables: list[tuple[Mapping[str, tuple[Beside, ...]], Callable[[str], str]]] = [(EFFECTS, str)]
    tables += [(own, named) for named in agents.values()]
    idle: dict[str, list[str]] = {}
    for table, named in tables:

        def of(key: str, named: Callable[[str], str] = named) -> Any:
            return settled[key] if key in settled else _value(config, named(key))

        for key, needs in table.items():
            if named(key) not in given or _at_default(config, named(key)):
                continue
            if (lost := next((need for need in needs if not need.met(of(key), of)), None)) is not None:
                beside = " and ".join(f"{named(other)}={yaml_values.inline(of(other))}" for other in lost.keys)
                idle.setdefault(beside, []).append(named(key))
    found = []
    for beside, keys in idle.items():
        have, them = _NUMBER[len(keys) > 1]
        found.append(f"{', '.join(keys)} {have} no effect with {beside}; leave {them} out, or change that.")
    return found


def _section(config: BaseModel, key: str) -> tuple[Any, str]:
    *path, name = key.split(".")
    return functools.reduce(getattr, path, config), name


def _value(config: BaseModel, key: str) -> Any:
    return getattr(*_section(config, key))


def _at_default(config: BaseModel, key: str) -> bool:
    section, name = _section(config, key)
    return bool(getattr(section, name) == type(section).model_fields[name].get_default(call_default_factory=True))
