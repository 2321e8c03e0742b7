"""Checks whether a model can be trained as its section says, and read what the actor samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dataflow.config.training import LoraConfig, TrainedConfig
from dataflow.errors import ConfigError, ModelError, nearest
from dataflow.models.directory import headers, room_of


def check_trained(config: Any, name: str) -> None:
    """Checks that a model can be trained as its section says, with what the run samples.

    ``name`` is that of the section, such as ``trainer``. What of the run's models is not there yet is not checked.
    """
    section, actor = getattr(config, name), config.model.path
    own = getattr(section, "path", None)
    if name == "trainer" and config.engine.temperature == 0:
        raise ConfigError(
            "engine.temperature=0: training divides the logits by it, and greedy responses to a prompt are all the "
            "same; give more than 0."
        )
    check_training(section, own or actor)
    if own and actor and os.path.isdir(own) and os.path.isdir(actor):
        check_reader(config, own, f"{name}.path")


def check_training(options: TrainedConfig, model: str | Path | None) -> None:
    """Checks the options of a trained model, with its initial weights if they are there; see :func:`check_trained`."""
    if options.lora.rank is not None and model is not None and os.path.isdir(model):
        _check_names(options.lora, f"{options.section}.lora", Path(model))


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


def _check_names(lora: LoraConfig, key: str, model: Path) -> None:
    """Checks that each layer that is named is one of the model; peft ignores a name beside others that fit."""
    try:
        layers = {name.removesuffix(".weight") for name, shape in headers(model).items() if len(shape) == 2}
    except (ModelError, OSError):
        return  # the model's own check says so
    for name in ("target_modules", "exclude_modules"):
        wanted = getattr(lora, name)
        for each in wanted if isinstance(wanted, list) else ():
            if not any(f".{layer}".endswith(f".{each}") for layer in layers):
                known = sorted({layer.rpartition(".")[2] for layer in layers})
                hint = nearest(each, known) or f"; it has {', '.join(known)}."
                raise ConfigError(f"{key}.{name}: model {model} has no layer '{each}'{hint}")
