"""What a run does otherwise than its settings say: keys whose effect other keys, the data or the model take away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dataflow.config.engine import EngineConfig
from dataflow.config.keys.effects import without_effect
from dataflow.config.reward import sources_of
from dataflow.config.run import RunConfig
from dataflow.config.toy import toy_critic, toy_trainer
from dataflow.config.training.critic import CriticConfig
from dataflow.data.rows import GSM8K
from dataflow.errors import UserError, counted
from dataflow.models.directory import chat_template
from dataflow.models.size import size_of
from dataflow.rewards.gsm8k import VERLS, VERLS_STRICT

if TYPE_CHECKING:
    from dataflow.data.prompts import Problems
    from dataflow.tools import Toolbox

_TINY = 20_000_000
"""Weights below which a model is a tiny one; those of the recipes have about a million."""


def remarks(
    config: RunConfig, problems: tuple[Problems, Problems] | None = None, toolbox: Toolbox | None = None
) -> list[str]:
    """Returns a sentence for each setting that has no effect, or another one than it seems.

    Args:
        config: of the run.
        problems: the training and the held-out ones, if they could be read.
        toolbox: the tools that the run offers, if any.
    """
    found = [*toy_settings(config), *without_effect(config, config.given_keys)]
    found += _of_template(config)
    if toolbox is not None and toolbox.guessed:
        found.append(
            "tools.format=auto: the chat template describes the tools, but does not show how the model writes its "
            "calls; they are read as those of hermes, and calls in another form count as answers: give tools.format."
        )
    return found if problems is None else found + list(_of_data(config, *problems))


def toy_settings(config: RunConfig) -> Iterator[str]:
    """Yields a sentence for each setting left at the tiny models' default in a run with a real model."""
    path, given = config.model.path, config.given_keys
    if path is None or _tiny(path):
        return
    for name, section in config.trained.items():
        toy = toy_critic() if isinstance(section, CriticConfig) else toy_trainer()
        if f"{name}.lr" not in given and section.lr == toy.lr:
            usual = type(section).model_fields["lr"].default if section.lora.rank is None else 3e-5
            yield (
                f"{name}.lr={section.lr:g} is the default for the tiny model, and too high for a real one such as "
                f"model.path={path}; give {name}.lr={usual:g} or the like."
            )
    tokens = config.engine.max_tokens
    if "engine.max_tokens" not in given and tokens == EngineConfig.model_fields["max_tokens"].default:
        yield (
            f"engine.max_tokens={tokens} is the default for the tiny model, and cuts off the responses of a real one "
            f"such as model.path={path}; give engine.max_tokens=1024 or the like."
        )


def _tiny(path: str) -> bool:
    try:
        return size_of(Path(path)).parameters < _TINY
    except UserError:
        return False  # a model that is still to be downloaded, or of another form


def _of_template(config: RunConfig) -> Iterator[str]:
    """Yields what is said of options that the chat template does not read: Jinja takes any name."""
    options, model = config.data.apply_chat_template_kwargs, config.model.path or ""
    template = chat_template(Path(model)) if options and Path(model).is_dir() else ""
    for name in options if template else ():
        if not re.search(rf"\b{re.escape(name)}\b", template):
            yield (
                f"data.apply_chat_template_kwargs.{name} has no effect: the chat template of model.path={model} does "
                "not read it; leave it out, or take a model whose template does."
            )


def _of_data(config: RunConfig, train: Problems, val: Problems) -> Iterator[str]:
    data, there, most = config.data, len(val.rows), config.data.val_size
    sources = {row.get("data_source") for part in (train, val) for row in part.rows}
    if GSM8K in sources and any(s.custom.path == VERLS for s in sources_of(config)):
        yield f"{VERLS_STRICT}."
    if config.val.every and data.val is None and data.train is not None:
        yield (
            f"data.val: no file is given, so that evaluations (val.every={config.val.every}) use "
            f"{counted(there, 'generated word problem')}, not problems like those of data.train; give data.val=FILE, "
            "or val.every=0."
        )
    if config.val.every and data.val is not None and most < there and "data.val_size" not in config.given_keys:
        yield (
            f"data.val_size={most}: of the {there:,} problems of {val.name}, evaluations use the first {most:,}; give "
            f"data.val_size={there} to use all."
        )
