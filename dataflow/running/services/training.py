"""Checks whether a model can be trained as its section says, and read what the actor samples; its profiler."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dataflow.config.training.trained import LoraConfig, TrainedConfig
from dataflow.engines.profiling import TaskProfiler
from dataflow.errors import ConfigError, ModelError, nearest
from dataflow.models.directory import headers, room_of

ALL_LINEAR = "all-linear"
_EMBEDDINGS = re.compile(r".*(?:embed|wte|wpe)[^.]*")
"""Two-dimensional weights that are no linear layer."""


def check_training(options: TrainedConfig, model: str | Path | None, device: str) -> None:
    """Checks the options of a trained model.

    Args:
        options: its section.
        model: directory of its initial weights; what is not there yet is not checked.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: an option needs GPUs, the optimizer is not there or takes no such argument, or the LoRA adapter
            does not fit the model.
    """
    options.check_device(device)
    if not options.in_torch or options.optimizer_kwargs:  # others were checked, and need no torch here
        from dataflow.engines.verl.worker import check_optimizer

        check_optimizer(options)
    lora, key = options.lora, f"{options.section}.lora"
    if lora.rank is None:
        return
    if lora.adapter is not None:
        _check_adapter(lora, key)
    if model is None or not Path(model).is_dir():
        return
    try:
        shapes = headers(Path(model))
    except (ModelError, OSError):
        return  # the model's own check says so
    layers = linear_layers(shapes)
    for name in ("target_modules", "exclude_modules"):
        _check_names(getattr(lora, name), layers, f"{key}.{name}", model)
    if layers:
        _check_adapted(lora, layers, key, model)
        _check_pattern(lora, _no_layers(shapes), key, model)


def check_reader(config: Any, path: str, key: str) -> None:
    """Checks that another model can read what the actor samples.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig` whose actor is a directory.
        path: the other model's directory.
        key: the key that gave it.

    Raises:
        ConfigError: it knows fewer tokens than the actor, or reads shorter texts than the actor may write.
    """
    other, actor = room_of(path), room_of(config.model.path)
    if other.vocabulary is not None and actor.vocabulary is not None and other.vocabulary < actor.vocabulary:
        raise ConfigError(
            f"{key}={path}: it knows {other.vocabulary} tokens, the actor {actor.vocabulary}; give a model with the "
            "same tokens."
        )
    longest = config.data.max_prompt_length + config.response_length
    longest = longest if actor.positions is None else min(longest, actor.positions)
    if other.positions is not None and other.positions < longest:
        raise ConfigError(
            f"{key}={path}: it reads {other.positions} tokens, a prompt and its response may have {longest}; give "
            "another model, or lower data.max_prompt_length or engine.max_tokens."
        )


def profiler_of(config: Any) -> TaskProfiler | None:
    """Returns what profiles the tasks of the chosen steps; None if there are none, or the run has no directory yet.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
    """
    directory = config.run_file("profile")
    if not config.profile.steps or directory is None:
        return None
    return TaskProfiler(frozenset(config.profile.steps), directory)


def linear_layers(shapes: dict[str, list[int]]) -> dict[str, tuple[int, int]]:
    """Returns the sizes, (out, in), of the layers that an adapter can be beside, by name; of all but the head.

    Args:
        shapes: of a model's weights, by name.
    """
    found = {}
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and len(shape) == 2 and not _EMBEDDINGS.fullmatch(layer):
            found[layer] = (shape[0], shape[1])
    return found


def adapted(lora: LoraConfig, layers: dict[str, tuple[int, int]]) -> list[str]:
    """Returns the names of the layers that get an adapter."""
    wanted = [name for name in layers if "." in name] if lora.target_modules == ALL_LINEAR else None
    chosen = [name for name in layers if _fits(name, lora.target_modules)] if wanted is None else wanted
    return [name for name in chosen if lora.exclude_modules is None or not _fits(name, lora.exclude_modules)]


def _fits(layer: str, wanted: str | list[str]) -> bool:
    """Whether a layer is one of those named; as peft decides it."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, layer) is not None
    return any(layer == each or layer.endswith(f".{each}") for each in wanted)


def _check_names(wanted: str | list[str] | None, layers: dict[str, tuple[int, int]], key: str, model: Any) -> None:
    if wanted is None or wanted == ALL_LINEAR:
        return
    if isinstance(wanted, str):
        try:
            fits = any(_fits(layer, wanted) for layer in layers)
        except re.error as error:
            raise ConfigError(
                f"{key}={wanted} is no regular expression ({error}); correct it, or give [NAME, ...]."
            ) from error
        if not fits:
            raise ConfigError(
                f"{key}={wanted} matches no linear layer of model {model} as a whole, such as "
                f"{min(layers, default='')}; give .*{wanted}, or [NAME, ...]."
            )
        return
    known = sorted({name.rpartition(".")[2] for name in layers})
    if missing := [each for each in wanted if not any(_fits(layer, [each]) for layer in layers)]:
        guess = nearest(missing[0], known)
        raise ConfigError(
            f"{key}: model {model} has no linear layer '{missing[0]}'{guess or ';'} it has {', '.join(known)}."
        )


def _check_adapted(lora: LoraConfig, layers: dict[str, tuple[int, int]], key: str, model: Any) -> None:
    """Checks that some layer gets an adapter, and that one of them can have its rank."""
    sizes = [min(layers[name]) for name in adapted(lora, layers)]
    if not sizes:
        raise ConfigError(
            f"{key}.target_modules={lora.target_modules} and {key}.exclude_modules={lora.exclude_modules} leave no "
            f"layer of model {model} for an adapter; name others."
        )
    if lora.rank is not None and lora.rank > max(sizes):
        raise ConfigError(
            f"{key}.rank={lora.rank} is above {max(sizes)}, the highest rank that a layer of model {model} with an "
            "adapter can have; lower it."
        )


def _no_layers(shapes: dict[str, list[int]]) -> list[str]:
    """Returns the names of modules that no adapter can be beside: those that hold others alone, and norms."""
    own = {name.rpartition(".")[0] for name in shapes}
    inner = {name[: dot.start()] for name in own for dot in re.finditer(r"\.", name)} | {""}
    norms = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 1 and "." in name}
    return sorted((inner - own) | (norms & own))


def _check_pattern(lora: LoraConfig, others: list[str], key: str, model: Any) -> None:
    """Checks that a regular expression matches layers alone: peft refuses to adapt anything else."""
    wanted, apart = lora.target_modules, lora.exclude_modules
    if wanted == ALL_LINEAR or not isinstance(wanted, str):
        return
    found = [name for name in others if _fits(name, wanted) and (apart is None or not _fits(name, apart))]
    if found:
        raise ConfigError(
            f"{key}.target_modules={wanted} also matches {found[0] or 'the whole'} of model {model}, which is no "
            "linear layer; give .*_proj, [NAME, ...] or all-linear."
        )


def _check_adapter(lora: LoraConfig, key: str) -> None:
    path = Path(str(lora.adapter))
    try:
        rank = json.loads((path / "adapter_config.json").read_text(encoding="utf-8")).get("r")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{key}.adapter={path} has no readable adapter_config.json; give a directory that peft or "
            "'dataflow export --adapter' wrote."
        ) from error
    if rank != lora.rank:
        raise ConfigError(f"{key}.adapter={path} is of rank {rank}, and {key}.rank is {lora.rank}; give the same.")
