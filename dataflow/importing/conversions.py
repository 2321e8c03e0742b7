"""How values of verl's keys become values of ours, where the name is not all that differs.

Each function takes verl's key, its value and all settings, and returns our keys with their values; none if verl's value
sets nothing. A function that reads several of verl's keys is called for each of them, and returns the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from dataflow.config.base import Backend
from dataflow.config.keys.verl_keys import twins
from dataflow.errors import ConfigError, counted
from dataflow.files import no_file
from dataflow.importing.settings import Missing, Settings
from dataflow.rewards.gsm8k import VERLS

Ours = Mapping[str, Any]
Conversion = Callable[[str, Any, Settings], Ours]
CONVERSIONS: dict[str, Conversion] = {}
"""The conversions by verl's keys; a key that ends with ``*`` stands for all that begin like it."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_REWARD, _FUNCTION, _SANDBOX = "reward.reward_model", "reward.custom_reward_function", "reward.sandbox_fusion"
_BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"
_ALL = 10**9
"""As many problems as there are."""


class NoCounterpart(Exception):
    """A value has no counterpart here although its key has one.

    The reason is part of a sentence and says what to do instead; ``ours`` is what is set nevertheless.
    """

    def __init__(self, reason: str, ours: Ours | None = None) -> None:
        super().__init__(reason)
        self.ours = ours or {}


def _of(*keys: str) -> Callable[[Conversion], Conversion]:
    """Declares which of verl's keys a function converts."""

    def declare(convert: Conversion) -> Conversion:
        CONVERSIONS.update(dict.fromkeys(keys, convert))
        return convert

    return declare


def conversion_of(key: str) -> Conversion | None:
    """Returns the function that converts a key; None if ours takes verl's value."""
    wide = (each for name, each in CONVERSIONS.items() if name.endswith("*") and key.startswith(name[:-1]))
    return CONVERSIONS.get(key) or next(wide, None)


def apart(settings: Settings) -> bool:
    """Whether verl's engines have GPUs of their own."""
    return settings.get("trainer.v1.trainer_mode") == "separate_async" and bool(settings.get("trainer.use_v1", True))


def _gpus(settings: Settings, of: str = "trainer") -> int:
    return settings.number(f"{of}.nnodes") * settings.number(f"{of}.n_gpus_per_node")


def _section(key: str) -> str:
    return "critic" if key.startswith("critic.") else "trainer"


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


# The length of the run, and its data.


def _rows_of(names: list[str], most: Any) -> int | None:
    """Returns the number of rows, at most ``most`` if that is positive; None if a file is not on this machine."""
    total = 0
    for path in (Path(name).expanduser() for name in names):
        if no_file(path) is not None:
            return None
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            try:
                total += pq.ParquetFile(path).metadata.num_rows
            except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
                raise ConfigError(f"data.train_files: {path} is no parquet file ({error}); correct it.") from error
        else:
            with path.open("rb") as lines:
                total += sum(1 for line in lines if line.strip())
    return min(total, most) if type(most) is int and most > 0 else total


@_of("trainer.total_training_steps", "trainer.total_epochs")
def _steps(_key: str, _value: Any, settings: Settings) -> Ours:
    if settings.get("trainer.total_training_steps") is not None:
        return {"steps": settings.number("trainer.total_training_steps")}
    if not (value := settings.get("data.train_files", marked=True)):
        raise ConfigError("data.train_files names no file; add data.train_files=FILE to the launch.")
    names = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    epochs, batch = settings.number("trainer.total_epochs"), settings.number("data.train_batch_size")
    rows = _rows_of(names, settings.get("data.train_max_samples", -1))
    if rows is None:
        raise Missing(
            f"the rows of {', '.join(names)}, which cannot be read here, divided by data.train_batch_size={batch}, "
            f"times trainer.total_epochs={epochs}"
        )
    if not rows // batch:
        raise ConfigError(f"data.train_batch_size={batch}: data.train_files has only {counted(rows, 'row')}; lower it.")
    return {"steps": rows // batch * epochs}


@_of("data.val_max_samples")
def _val_size(_key: str, value: Any, settings: Settings) -> Ours:
    if not settings.get("data.val_files", marked=True):
        return {}
    return {"data.val_size": value if type(value) is int and value > 0 else _ALL}


@_of("data.gen_batch_size")
def _gen_batch_size(_key: str, value: Any, settings: Settings) -> Ours:
    if value is None or not settings.get("algorithm.filter_groups.enable"):
        return {}
    if value <= settings.number("data.train_batch_size"):
        raise NoCounterpart(
            "a step samples once, more groups than it trains on; verl samples again until it has enough. Twice "
            "data.prompts are sampled, give data.gen_batch_size for another number"
        )
    return {"data.gen_batch_size": value}


@_of("trainer.test_freq", "trainer.save_freq")
def _every(key: str, value: Any, settings: Settings) -> Ours:
    every = value if type(value) is int and value > 0 else 0
    if key == "trainer.save_freq":
        return {"checkpoint.every": every}
    return {"val.every": every if settings.get("data.val_files", marked=True) else 0}


@_of("trainer.resume_mode")
def _resume(_key: str, value: Any, settings: Settings) -> Ours:
    if value not in ("auto", "disable"):
        raise NoCounterpart("'dataflow resume runs/NAME' resumes from that run's last checkpoint")
    if "trainer.experiment_name" not in settings.given:  # a run without a name is always a new one
        return {}
    return {"resume.mode": "auto" if value == "auto" else "never"}


@_of("trainer.experiment_name")
def _run_name(key: str, value: Any, settings: Settings) -> Ours:
    # Under verl's default every launch has the same name.
    return {"name": str(value).replace("/", "-")} if value and key in settings.given else {}


@_of("trainer.default_local_dir")
def _runs(key: str, value: Any, settings: Settings) -> Ours:
    names = [settings.get(f"trainer.{name}_name", marked=True) for name in ("project", "experiment")]
    default = f"checkpoints/{names[0]}/{names[1]}"
    return {"runs": value} if key in settings.given and value not in (None, default) else {}


@_of("trainer.logger")
def _backends(_key: str, value: Any, _settings: Settings) -> Ours:
    named = value if isinstance(value, list) else [value] if value else []
    known = [str(each) for each in named if each in get_args(Backend)]
    if missing := [str(each) for each in named if each not in get_args(Backend)]:
        raise NoCounterpart(f"there is no backend {', '.join(missing)}", {"tracking.backends": known})
    return {"tracking.backends": known}


# The optimizer, the mini-batches and the precision of actor and critic.


@_of(*twins("optim.lr_warmup_steps"), *twins("optim.lr_warmup_steps_ratio"))
def _warmup(key: str, _value: Any, settings: Settings) -> Ours:
    """verl: steps, or if there are none a share of all steps."""
    optimizer, section = key.rpartition(".")[0], _section(key)
    steps = settings.get(f"{optimizer}.lr_warmup_steps", -1)
    share = settings.get(f"{optimizer}.lr_warmup_steps_ratio", 0)
    if share and steps <= 0:
        return {f"{section}.warmup_steps": None, f"{section}.warmup_ratio": share}
    return {f"{section}.warmup_steps": max(0, steps)}


@_of(*twins("optim.optimizer"))
def _optimizer(key: str, value: Any, _settings: Settings) -> Ours:
    return {f"{_section(key)}.optimizer": "AdamW" if value in ("adam", "adamw", None) else value}


@_of(*(each for leaf in ("lr_scheduler_type", "warmup_style", "min_lr_ratio", "num_cycles")
       for each in twins(f"optim.{leaf}")))  # fmt: skip
def _scheduler(key: str, value: Any, settings: Settings) -> Ours:
    optimizer, section = key.rpartition(".")[0], _section(key)
    # warmup_style is the name of earlier versions.
    kind = settings.get(f"{optimizer}.warmup_style") or settings.get(f"{optimizer}.lr_scheduler_type") or "constant"
    if ours := {"min_lr_ratio": "min_lr_ratio", "num_cycles": "lr_cycles"}.get(_leaf(key)):
        return {} if value is None or kind != "cosine" else {f"{section}.{ours}": value}
    if kind not in ("constant", "cosine"):
        raise NoCounterpart(f"{section}.lr_scheduler is constant or cosine")
    return {f"{section}.lr_scheduler": kind}


@_of(*(each for leaf in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
       for each in twins(f"model.{leaf}")))  # fmt: skip
def _lora(key: str, value: Any, settings: Settings) -> Ours:
    model, _, leaf = key.rpartition(".")
    section = f"{_section(key)}.lora"
    if not settings.get(f"{model}.lora_rank", 0):
        return {f"{section}.rank": None} if leaf == "lora_rank" else {}
    ours = {"lora_rank": "rank", "lora_alpha": "alpha", "lora_adapter_path": "adapter"}.get(leaf, leaf)
    return {} if value is None else {f"{section}.{ours}": value}


@_of(*twins("fsdp_config.fsdp_size"))
def _fsdp_size(key: str, value: Any, settings: Settings) -> Ours:
    whole = type(value) is not int or value < 1 or value >= _gpus(settings)
    return {f"{_section(key)}.fsdp_size": None if whole else value}


@_of(*twins("fsdp_config.model_dtype"), *twins("fsdp_config.dtype"))
def _dtype(key: str, value: Any, _settings: Settings) -> Ours:
    name = f"{_section(key)}.{_leaf(key)}"
    known = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    if value is None:
        return {}
    if value not in known:
        raise NoCounterpart(f"{name} is float32 or bfloat16")
    return {name: "auto" if _leaf(key) == "dtype" and known[value] == "bfloat16" else known[value]}


@_of(*twins("ppo_mini_batch_size"))
def _mini_batches(key: str, _value: Any, settings: Settings) -> Ours:
    batch, mini = settings.number("data.train_batch_size"), settings.number(key)
    if batch % mini:
        raise ConfigError(f"{key}={mini} does not divide data.train_batch_size={batch}; give a divisor of it.")
    same = key.startswith("critic.") and settings.get(f"{_ACTOR}.ppo_mini_batch_size") == mini
    return {f"{_section(key)}.mini_batches": None if same else batch // mini}


@_of(*twins("ppo_micro_batch_size"))
def _rows_per_rank(key: str, value: Any, settings: Settings) -> Ours:
    if value is None:
        return {}
    return {f"{_section(key)}.micro_batch_size": max(1, settings.number(key) // _gpus(settings))}


@_of(f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_max_token_len_per_gpu")
def _dynamic(_key: str, _value: Any, settings: Settings) -> Ours:
    if not settings.get(f"{_ACTOR}.use_dynamic_bsz"):
        return {}
    return {"trainer.max_tokens_per_gpu": settings.number(f"{_ACTOR}.ppo_max_token_len_per_gpu")}


@_of(f"{_ACTOR}.ppo_epochs")
def _epochs(_key: str, value: Any, _settings: Settings) -> Ours:
    # One pass is the same in either order.
    return {"trainer.epochs": value, **({"trainer.epochs_over": "step"} if value != 1 else {})}


@_of("trainer.critic_warmup")
def _critic_warmup(_key: str, value: Any, _settings: Settings) -> Ours:
    return {"critic.warmup": max(0, int(value or 0) - 1)}


@_of("algorithm.adv_estimator")
def _estimator(_key: str, value: Any, _settings: Settings) -> Ours:
    return {"algorithm.adv_estimator": value, **({"algorithm.whiten": "step"} if value == "gae" else {})}


@_of("algorithm.filter_groups.metric")
def _metric(_key: str, value: Any, _settings: Settings) -> Ours:
    return {"algorithm.filter_groups.metric": "score" if value in (None, "reward", "seq_reward") else value}


# The rollout, the GPUs and the order of work.


@_of(f"{_ROLLOUT}.temperature", f"{_ROLLOUT}.do_sample", f"{_ROLLOUT}.val_kwargs.temperature",
     f"{_ROLLOUT}.val_kwargs.do_sample")  # fmt: skip
def _temperature(key: str, _value: Any, settings: Settings) -> Ours:
    section, val = key.rpartition(".")[0], ".val_kwargs." in key
    drawn = settings.get(f"{section}.do_sample", not val)
    temperature = settings.get(f"{section}.temperature", 0 if val else 1.0)
    return {f"{'val' if val else 'engine'}.temperature": temperature if drawn else 0.0}


@_of(f"{_ROLLOUT}.name")
def _engine(_key: str, value: Any, _settings: Settings) -> Ours:
    if value in (None, "???", "vllm", "hf"):
        return {"engine.rollout": value} if value in ("vllm", "hf") else {}
    raise NoCounterpart("the engine is vLLM", {"engine.rollout": "vllm"})


@_of(*(f"{_ROLLOUT}.{leaf}" for leaf in ("tensor_model_parallel_size", "data_parallel_size", "nnodes",
                                         "n_gpus_per_node")))  # fmt: skip
def _engines(_key: str, _value: Any, settings: Settings) -> Ours:
    split = settings.number(f"{_ROLLOUT}.tensor_model_parallel_size")
    try:
        total = _gpus(settings, _ROLLOUT if apart(settings) else "trainer")
    except Missing as missing:
        reason = f"{missing}: the GPUs divided by engine.tensor_parallel={split}"
        raise Missing(reason, "engine.replicas", {"engine.tensor_parallel": split}) from missing
    if total % split:
        raise ConfigError(
            f"{_ROLLOUT}.tensor_model_parallel_size={split} does not divide the {total} GPUs; give a divisor of them."
        )
    return {"engine.tensor_parallel": split, "engine.replicas": total // split}


@_of("trainer.nnodes", "trainer.n_gpus_per_node")
def _world(_key: str, _value: Any, settings: Settings) -> Ours:
    return {"trainer.world_size": _gpus(settings)}


@_of("trainer.device")
def _device(_key: str, value: Any, _settings: Settings) -> Ours:
    return {"ray.gpus_per_worker": 0.0 if value == "cpu" else 1.0}


@_of("trainer.v1.trainer_mode")
def _policy(_key: str, value: Any, settings: Settings) -> Ours:
    if not settings.get("trainer.use_v1", True) or value == "sync":
        return {"policy.preset": "baseline"}
    return {"policy.preset": "off-policy", **({"placement": "disaggregated"} if apart(settings) else {})}


# Rewards.


@_of(f"{_FUNCTION}.path", f"{_FUNCTION}.name")
def _reward_function(_key: str, _value: Any, settings: Settings) -> Ours:
    path = settings.get(f"{_FUNCTION}.path", marked=True)
    if path is None and (settings.get(f"{_REWARD}.enable") or settings.get(f"{_SANDBOX}.url", marked=True)):
        return {}
    named = settings.get(f"{_FUNCTION}.name", "compute_score", marked=True) if path else "default_compute_score"
    return {"custom_reward_function.path": str(path or VERLS), "custom_reward_function.name": str(named)}


@_of("reward.reward_manager.name")
def _manager(_key: str, value: Any, settings: Settings) -> Ours:
    if settings.get("reward.reward_manager.module.path", marked=True) is not None:
        return {"reward.manager": settings.get("reward.reward_manager.module.name", value)}
    if settings.get(f"{_SANDBOX}.url", marked=True):
        return {"reward.manager": "sandbox"}
    if value not in ("naive", "dapo", "rate_limited", "remote"):
        raise NoCounterpart(
            "there is no manager of that name; reward.manager_path names a file with a class of verl's kind "
            "(docs/rewards.md)"
        )
    return {"reward.manager": value}


@_of(f"{_BUFFER}.*", "reward.reward_kwargs.max_resp_len")
def _overlong(_key: str, _value: Any, settings: Settings) -> Ours:
    if not settings.get(f"{_BUFFER}.enable") or settings.get("reward.reward_manager.name") != "dapo":
        return {}
    found = {
        "overlong_buffer_len": settings.number(f"{_BUFFER}.len"),
        "overlong_penalty_factor": settings.get(f"{_BUFFER}.penalty_factor"),
        "log": settings.get(f"{_BUFFER}.log"),
        "max_response_length": settings.get("reward.reward_kwargs.max_resp_len"),
    }
    return {f"reward.manager_kwargs.{name}": value for name, value in found.items() if value is not None}


@_of(*(f"{_SANDBOX}.{name}" for name in ("url", "max_concurrent", "memory_limit_mb")))
def _sandbox(key: str, value: Any, settings: Settings) -> Ours:
    return {f"reward.manager_kwargs.{_leaf(key)}": value} if settings.get(f"{_SANDBOX}.url", marked=True) else {}


@_of(*(f"{_REWARD}.{leaf}" for leaf in ("enable", "model_path", "enable_resource_pool", "nnodes", "n_gpus_per_node")),
     *(f"{_REWARD}.rollout.{leaf}" for leaf in ("tensor_model_parallel_size", "gpu_memory_utilization", "max_num_seqs",
                                                "max_model_len", "dtype")))  # fmt: skip
def _served(_key: str, _value: Any, settings: Settings) -> Ours:
    """verl's reward model, of which there is one: a classifier unless a function of the user's asks it."""
    if not settings.get(f"{_REWARD}.enable"):
        return {}
    path = settings.get(f"{_REWARD}.model_path", marked=True)
    if path is None:
        raise ConfigError(f"{_REWARD}.enable=true needs {_REWARD}.model_path; add it to the launch.")
    rollout = f"{_REWARD}.rollout"
    split = settings.number(f"{rollout}.tensor_model_parallel_size")
    own = bool(settings.get(f"{_REWARD}.enable_resource_pool"))
    dtype = settings.get(f"{rollout}.dtype", "auto")
    values = {
        "path": str(path),
        "kind": "chat" if settings.get(f"{_FUNCTION}.path", marked=True) else "classify",
        "placement": "own" if own else "colocated",
        "replicas": max(1, _gpus(settings, _REWARD if own else "trainer") // split),
        "tensor_parallel": split,
        "gpu_memory": settings.get(f"{rollout}.gpu_memory_utilization", 0.5),
        "max_num_seqs": settings.get(f"{rollout}.max_num_seqs", 1024),
        "max_model_len": settings.get(f"{rollout}.max_model_len"),
        "dtype": dtype if re.fullmatch(r"bfloat16|float16|float32", str(dtype)) else "auto",
    }
    return {f"reward.models.rm.{name}": value for name, value in values.items() if value is not None}
