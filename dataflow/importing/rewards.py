"""Conversions of verl's section ``reward``: the function, its manager, the reward model, the sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dataflow.errors import ConfigError
from dataflow.importing.facts import Conversion, NoCounterpart, Ours, gpus, whole_number
from dataflow.importing.settings import Settings
from dataflow.rewards.gsm8k import VERLS

MODEL = "rm"
"""Name of the reward model that a launch of verl has, of which there is only one."""

_REWARD = "reward.reward_model"
_FUNCTION = "reward.custom_reward_function"


def _reward_function(_key: str, _value: Any, settings: Settings) -> Ours:
    path = settings.get(f"{_FUNCTION}.path", marked=True)
    if path is not None:
        named = settings.get(f"{_FUNCTION}.name", "compute_score", marked=True)
        return {"custom_reward_function.path": str(path), "custom_reward_function.name": str(named)}
    if settings.get(f"{_REWARD}.enable") or settings.get("reward.sandbox_fusion.url", marked=True):
        return {}
    return {
        "custom_reward_function.path": VERLS,
        "custom_reward_function.name": "default_compute_score",
    }


def _manager(_key: str, value: Any, settings: Settings) -> Ours:
    if settings.get("reward.reward_manager.module.path", marked=True) is not None:
        return {"reward.manager": settings.get("reward.reward_manager.module.name", value)}
    if settings.get("reward.sandbox_fusion.url", marked=True):
        return {"reward.manager": "sandbox"}
    if value not in ("naive", "dapo", "rate_limited", "remote"):
        raise NoCounterpart(
            "there is no manager of that name; reward.manager_path names a file with a class of verl's kind "
            "(docs/rewards.md)"
        )
    return {"reward.manager": value}


def _overlong(_key: str, _value: Any, settings: Settings) -> Ours:
    buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    if not settings.get(f"{buffer}.enable") or settings.get("reward.reward_manager.name") != "dapo":
        return {}
    found = {"reward.manager_kwargs.overlong_buffer_len": whole_number(f"{buffer}.len", settings)}
    for theirs, ours in (("penalty_factor", "overlong_penalty_factor"), ("log", "log")):
        if (value := settings.get(f"{buffer}.{theirs}")) is not None:
            found[f"reward.manager_kwargs.{ours}"] = value
    if (longest := settings.get("reward.reward_kwargs.max_resp_len")) is not None:
        found["reward.manager_kwargs.max_response_length"] = longest
    return found


def _sandbox(_key: str, _value: Any, settings: Settings) -> Ours:
    sandbox = "reward.sandbox_fusion"
    if not settings.get(f"{sandbox}.url", marked=True):
        return {}
    names = ("url", "max_concurrent", "memory_limit_mb")
    return {f"reward.manager_kwargs.{name}": settings.get(f"{sandbox}.{name}", marked=True) for name in names}


def _served(_key: str, _value: Any, settings: Settings) -> Ours:
    """verl's reward model: a classifier unless a function of the user's asks it."""
    if not settings.get(f"{_REWARD}.enable"):
        return {}
    path = settings.get(f"{_REWARD}.model_path", marked=True)
    if path is None:
        raise ConfigError(f"{_REWARD}.enable=true needs {_REWARD}.model_path; add it to the launch.")
    rollout = f"{_REWARD}.rollout"
    split = whole_number(f"{rollout}.tensor_model_parallel_size", settings)
    own = bool(settings.get(f"{_REWARD}.enable_resource_pool"))
    total = gpus(settings)
    if own:
        nodes = whole_number(f"{_REWARD}.nnodes", settings)
        total = nodes * whole_number(f"{_REWARD}.n_gpus_per_node", settings)
    dtype = settings.get(f"{rollout}.dtype", "auto")
    values = {
        "path": str(path),
        "kind": "chat" if settings.get(f"{_FUNCTION}.path", marked=True) else "classify",
        "placement": "own" if own else "colocated",
        "replicas": max(1, total // split),
        "tensor_parallel": split,
        "gpu_memory": settings.get(f"{rollout}.gpu_memory_utilization", 0.5),
        "max_num_seqs": settings.get(f"{rollout}.max_num_seqs", 1024),
        "max_model_len": settings.get(f"{rollout}.max_model_len"),
        "dtype": dtype if re.fullmatch(r"bfloat16|float16|float32", str(dtype)) else "auto",
    }
    return {f"reward.models.{MODEL}.{name}": value for name, value in values.items() if value is not None}


REWARDS: Mapping[str, Conversion] = {
    "manager": _manager,
    "overlong": _overlong,
    "reward_function": _reward_function,
    "sandbox": _sandbox,
    "served": _served,
}
"""The conversions by the names that the table uses (``how``)."""
