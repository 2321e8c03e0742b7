"""How values of verl's keys become values of ours, where the name is not all that differs.

Each conversion takes verl's key, its value and all settings, and returns our keys with their values; none if verl's
value sets nothing. The table (``dataflow/config/keys/verl_keys.yaml``) names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from dataflow.config.base import Backend
from dataflow.config.keys import verl_keys
from dataflow.errors import ConfigError, counted
from dataflow.files import no_file
from dataflow.importing.settings import Missing, Settings
from dataflow.rewards.gsm8k import VERLS

Ours = Mapping[str, Any]
Conversion = Callable[[str, Any, Settings], Ours]

_ROLLOUT = "actor_rollout_ref.rollout"
_ALL = 10**9
"""As many problems as there are."""
MODEL = "rm"
"""Name of the reward model that a launch of verl has, of which there is only one."""

_REWARD = "reward.reward_model"
_FUNCTION = "reward.custom_reward_function"


class NoCounterpart(Exception):
    """A value has no counterpart here although its key has one; the message says what to do instead.

    Args:
        reason: part of a sentence.
        ours: what is set nevertheless.
    """

    def __init__(self, reason: str, ours: Ours | None = None) -> None:
        super().__init__(reason)
        self.ours = ours or {}


def whole_number(key: str, settings: Settings) -> int:
    """Returns a number of a launch.

    Raises:
        ConfigError: it is none, or below 1.
    """
    value = settings.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{key}={value}: give a whole number of at least 1 in the launch.")
    return value


def gpus(settings: Settings) -> int:
    """Returns the number of verl's training processes."""
    return whole_number("trainer.nnodes", settings) * whole_number("trainer.n_gpus_per_node", settings)


def apart(settings: Settings) -> bool:
    """Whether verl's engines have GPUs of their own."""
    return settings.get("trainer.v1.trainer_mode") == "separate_async" and bool(settings.get("trainer.use_v1", True))


def rows_of(names: list[str], most: Any) -> int | None:
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


def training_steps(settings: Settings) -> int:
    """Returns the number of training steps.

    Raises:
        Missing: it follows from the number of rows, and the data is not on this machine.
    """
    if settings.get("trainer.total_training_steps") is not None:
        return whole_number("trainer.total_training_steps", settings)
    if not (value := settings.get("data.train_files", marked=True)):
        raise ConfigError("data.train_files names no file; add data.train_files=FILE to the launch.")
    names = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    rows = rows_of(names, settings.get("data.train_max_samples", -1))
    epochs, batch = (whole_number(key, settings) for key in ("trainer.total_epochs", "data.train_batch_size"))
    if rows is None:
        raise Missing(
            f"the rows of {', '.join(names)}, which cannot be read here, divided by data.train_batch_size={batch}, "
            f"times trainer.total_epochs={epochs}",
            "steps",
        )
    if not rows // batch:
        raise ConfigError(f"data.train_batch_size={batch}: data.train_files has only {counted(rows, 'row')}; lower it.")
    return rows // batch * epochs


def _below(key: str, value: Any, _settings: Settings) -> Ours:
    """Keys of a mapping: what verl's row, which ends with ``.*``, stands for has the same names below ours."""
    row = verl_keys.find(key)
    assert row is not None
    name, meaning = row
    return {f"{meaning.ours}{key[len(name) - 2 :]}": value}


def _steps(_key: str, _value: Any, settings: Settings) -> Ours:
    return {"steps": training_steps(settings)}


def _section(key: str) -> str:
    return "critic" if key.startswith("critic.") else "trainer"


def _warmup(key: str, _value: Any, settings: Settings) -> Ours:
    """verl: steps, or if there are none a share of all steps."""
    optimizer, section = key.rpartition(".")[0], _section(key)
    steps = settings.get(f"{optimizer}.lr_warmup_steps", -1)
    share = settings.get(f"{optimizer}.lr_warmup_steps_ratio", 0)
    if share and (steps or 0) <= 0:
        return {f"{section}.warmup_steps": None, f"{section}.warmup_ratio": share}
    return {f"{section}.warmup_steps": max(0, steps or 0)}


def _optimizer(key: str, value: Any, _settings: Settings) -> Ours:
    return {f"{_section(key)}.optimizer": "AdamW" if value in ("adam", "adamw", None) else value}


def _scheduler(key: str, _value: Any, settings: Settings) -> Ours:
    kind = _schedule(key, settings)
    if kind not in ("constant", "cosine"):
        raise NoCounterpart(f"{_section(key)}.lr_scheduler is constant or cosine")
    return {f"{_section(key)}.lr_scheduler": kind}


def _cosine(key: str, value: Any, settings: Settings) -> Ours:
    ours = {"min_lr_ratio": "min_lr_ratio", "num_cycles": "lr_cycles"}[key.rpartition(".")[2]]
    if value is None or _schedule(key, settings) != "cosine":
        return {}
    return {f"{_section(key)}.{ours}": value}


def _schedule(key: str, settings: Settings) -> Any:
    """Returns the name of the schedule; warmup_style is that of earlier versions."""
    optimizer = key.rpartition(".")[0]
    return settings.get(f"{optimizer}.warmup_style") or settings.get(f"{optimizer}.lr_scheduler_type") or "constant"


def _lora(key: str, value: Any, settings: Settings) -> Ours:
    model, _, leaf = key.rpartition(".")
    rank, section = settings.get(f"{model}.lora_rank", 0), f"{_section(key)}.lora"
    if not rank:
        return {f"{section}.rank": None} if leaf == "lora_rank" else {}
    ours = {"lora_rank": "rank", "lora_alpha": "alpha", "lora_adapter_path": "adapter"}.get(leaf, leaf)
    return {} if value is None else {f"{section}.{ours}": value}


def _on_gpus(key: str, value: Any, _settings: Settings) -> Ours:
    return {f"{_section(key)}.gradient_checkpointing": None if value else False}


def _offload_policy(key: str, value: Any, _settings: Settings) -> Ours:
    section = _section(key)
    return {f"{section}.param_offload": True, f"{section}.optimizer_offload": True} if value else {}


def _fsdp_size(key: str, value: Any, settings: Settings) -> Ours:
    whole = type(value) is not int or value < 1 or value >= gpus(settings)
    return {f"{_section(key)}.fsdp_size": None if whole else value}


def _dtype(key: str, value: Any, _settings: Settings) -> Ours:
    leaf, section = key.rpartition(".")[2], _section(key)
    known = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    if value is None:
        return {}
    if value not in known:
        raise NoCounterpart(f"{section}.{leaf} is float32 or bfloat16")
    auto = leaf == "dtype" and known[value] == "bfloat16"
    return {f"{section}.{leaf}": "auto" if auto else known[value]}


def _mini_batches(key: str, _value: Any, settings: Settings) -> Ours:
    batch, mini = whole_number("data.train_batch_size", settings), whole_number(key, settings)
    if batch % mini:
        raise ConfigError(f"{key}={mini} does not divide data.train_batch_size={batch}; give a divisor of it.")
    if key.startswith("critic."):
        same = settings.get("actor_rollout_ref.actor.ppo_mini_batch_size") == mini
        return {"critic.mini_batches": None if same else batch // mini}
    return {"trainer.mini_batches": batch // mini}


def _rows_per_rank(key: str, value: Any, settings: Settings) -> Ours:
    if value is None:
        return {}
    return {f"{_section(key)}.micro_batch_size": max(1, whole_number(key, settings) // gpus(settings))}


def _dynamic(_key: str, _value: Any, settings: Settings) -> Ours:
    actor = "actor_rollout_ref.actor"
    if not settings.get(f"{actor}.use_dynamic_bsz"):
        return {}
    return {"trainer.max_tokens_per_gpu": whole_number(f"{actor}.ppo_max_token_len_per_gpu", settings)}


def _epochs(_key: str, value: Any, _settings: Settings) -> Ours:
    # One pass is the same in either order.
    return {"trainer.epochs": value, **({"trainer.epochs_over": "step"} if value != 1 else {})}


def _val_size(_key: str, value: Any, settings: Settings) -> Ours:
    if not settings.get("data.val_files", marked=True):
        return {}
    return {"data.val_size": value if type(value) is int and value > 0 else _ALL}


def _gen_batch_size(_key: str, value: Any, settings: Settings) -> Ours:
    filtered = settings.get("algorithm.filter_groups.enable")
    if value is None or not filtered:
        return {}
    if value <= whole_number("data.train_batch_size", settings):
        raise NoCounterpart(
            "a step samples once, more groups than it trains on; verl samples again until it has enough. Twice "
            "data.prompts are sampled, give data.gen_batch_size for another number"
        )
    return {"data.gen_batch_size": value}


def _temperature(_key: str, _value: Any, settings: Settings) -> Ours:
    drawn = settings.get(f"{_ROLLOUT}.do_sample", True)
    return {"engine.temperature": settings.get(f"{_ROLLOUT}.temperature", 1.0) if drawn else 0.0}


def _val_temperature(_key: str, _value: Any, settings: Settings) -> Ours:
    drawn = settings.get(f"{_ROLLOUT}.val_kwargs.do_sample", False)
    return {"val.temperature": settings.get(f"{_ROLLOUT}.val_kwargs.temperature", 0) if drawn else 0.0}


def _engine(_key: str, value: Any, _settings: Settings) -> Ours:
    if value in ("vllm", "hf"):
        return {"engine.rollout": value}
    if value in (None, "???"):
        return {}
    raise NoCounterpart("the engine is vLLM", {"engine.rollout": "vllm"})


def _engines(_key: str, _value: Any, settings: Settings) -> Ours:
    split = whole_number(f"{_ROLLOUT}.tensor_model_parallel_size", settings)
    try:
        total = gpus(settings)
        if apart(settings):
            nodes = whole_number(f"{_ROLLOUT}.nnodes", settings)
            total = nodes * whole_number(f"{_ROLLOUT}.n_gpus_per_node", settings)
    except Missing as missing:
        reason = f"{missing}: the GPUs divided by engine.tensor_parallel={split}"
        raise Missing(reason, "engine.replicas", {"engine.tensor_parallel": split}) from missing
    if total % split:
        raise ConfigError(
            f"{_ROLLOUT}.tensor_model_parallel_size={split} does not divide the {total} GPUs; give a divisor of them."
        )
    return {"engine.tensor_parallel": split, "engine.replicas": total // split}


def _multi_turn(key: str, value: Any, settings: Settings) -> Ours:
    if not settings.get(f"{_ROLLOUT}.multi_turn.enable"):
        return {}
    leaf, longest = key.rpartition(".")[2], settings.get("data.max_response_length", 512)
    found: dict[str, Any] = {
        "tools.max_response_tokens": longest,
        **{
            f"tools.{name}": settings.get(f"{_ROLLOUT}.multi_turn.{name}", default)
            for name, default in (("max_tool_response_length", 256), ("tool_response_truncate_side", "middle"))
        },
    }
    if leaf == "max_assistant_turns" and value is not None:
        found["tools.max_turns"] = value
    if leaf == "enable":
        raise NoCounterpart(
            "without tools a response is one turn; write them as functions marked with @tool in a Python file, and add "
            "tools.path=FILE (docs/tools.md)",
            found,
        )
    return found


def _estimator(_key: str, value: Any, _settings: Settings) -> Ours:
    return {"algorithm.adv_estimator": value, **({"algorithm.whiten": "step"} if value == "gae" else {})}


def _metric(_key: str, value: Any, _settings: Settings) -> Ours:
    return {"algorithm.filter_groups.metric": "score" if value in (None, "reward", "seq_reward") else value}


def _run_name(key: str, value: Any, settings: Settings) -> Ours:
    # Under verl's default every launch has the same name.
    return {"name": str(value).replace("/", "-")} if value and key in settings.given else {}


def _backends(_key: str, value: Any, _settings: Settings) -> Ours:
    named = value if isinstance(value, list) else [value] if value else []
    known = [str(each) for each in named if each in get_args(Backend)]
    if missing := [str(each) for each in named if each not in get_args(Backend)]:
        raise NoCounterpart(f"there is no backend {', '.join(missing)}", {"tracking.backends": known})
    return {"tracking.backends": known}


def _every(key: str, value: Any, settings: Settings) -> Ours:
    ours = {"test_freq": "val.every", "save_freq": "checkpoint.every"}[key.rpartition(".")[2]]
    if ours == "val.every" and not settings.get("data.val_files", marked=True):
        return {ours: 0}
    return {ours: value if type(value) is int and value > 0 else 0}


def _world(_key: str, _value: Any, settings: Settings) -> Ours:
    return {"trainer.world_size": gpus(settings)}


def _device(_key: str, value: Any, _settings: Settings) -> Ours:
    if value not in ("cuda", "cpu"):
        raise NoCounterpart("runs take NVIDIA's GPUs or CPUs", {"ray.gpus_per_worker": 1.0})
    return {"ray.gpus_per_worker": 0.0 if value == "cpu" else 1.0}


def _keep_last(_key: str, value: Any, settings: Settings) -> Ours:
    if value is None and settings.get("trainer.save_freq", -1) > 0:
        raise NoCounterpart("verl keeps all checkpoints; here checkpoint.keep_last=2 and the best are kept, give more")
    return {} if value is None else {"checkpoint.keep_last": value}


def _resume(_key: str, value: Any, settings: Settings) -> Ours:
    if value not in ("auto", "disable"):
        raise NoCounterpart("'dataflow resume runs/NAME' resumes from that run's last checkpoint")
    if "trainer.experiment_name" not in settings.given:  # a run without a name is always a new one
        return {}
    return {"resume.mode": "auto" if value == "auto" else "never"}


def _runs(key: str, value: Any, settings: Settings) -> Ours:
    names = [settings.get(f"trainer.{name}_name", marked=True) for name in ("project", "experiment")]
    default = f"checkpoints/{names[0]}/{names[1]}"
    return {"runs": value} if key in settings.given and value not in (None, default) else {}


def _critic_warmup(_key: str, value: Any, _settings: Settings) -> Ours:
    return {"critic.warmup": max(0, int(value or 0) - 1)}


def _policy(_key: str, value: Any, settings: Settings) -> Ours:
    if not settings.get("trainer.use_v1", True) or value == "sync":
        return {"policy.preset": "baseline"}
    placement = {"placement": "disaggregated"} if apart(settings) else {}
    return {"policy.preset": "off-policy", **placement}


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


_ALL_CONVERSIONS: tuple[Conversion, ...] = (
    _backends, _below, _cosine, _critic_warmup, _device, _dtype, _dynamic, _engine, _engines, _epochs,
    _estimator, _every, _fsdp_size, _gen_batch_size, _keep_last, _lora, _manager, _metric, _mini_batches,
    _multi_turn, _offload_policy, _on_gpus, _optimizer, _overlong, _policy, _resume, _reward_function,
    _rows_per_rank, _run_name, _runs, _sandbox, _scheduler, _served, _steps, _temperature, _val_size,
    _val_temperature, _warmup, _world,
)  # fmt: skip
CONVERSIONS: Mapping[str, Conversion] = {each.__name__.removeprefix("_"): each for each in _ALL_CONVERSIONS}
"""The conversions by the names that the table uses (``how``)."""
