"""Finds defaults that are meant for the tiny models of the recipes in a run with a real model."""

from __future__ import annotations

from pathlib import Path

from dataflow.config.engine import EngineConfig
from dataflow.config.run import RunConfig
from dataflow.config.toy import toy_critic, toy_trainer
from dataflow.config.training.critic import CriticConfig
from dataflow.errors import UserError
from dataflow.models.size import size_of

_TINY = 20_000_000
"""Weights below which a model is a tiny one; those of the recipes have about a million."""
_LORA_LR = 3e-5
_MAX_TOKENS = 1024
"""As in the recipes."""


def toy_settings(config: RunConfig) -> list[str]:
    """Returns a sentence for each setting left at the tiny models' default, with the value that is usual."""
    path = config.model.path
    if path is None or _tiny(path):
        return []
    found = []
    for name, section in config.trained.items():
        critic, lora = isinstance(section, CriticConfig), section.lora.rank is not None
        if f"{name}.lr" in config.given_keys or section.lr != (toy_critic() if critic else toy_trainer()).lr:
            continue
        usual = _LORA_LR if lora else type(section).model_fields["lr"].default
        harm = "is high for adapters of a real one" if lora else "would ruin a real one"
        found.append(
            f"{name}.lr={section.lr:g} is the default for the tiny model, and {harm} such as model.path={path}; "
            f"give {name}.lr={usual:g} or the like."
        )
    given = "engine.max_tokens" in config.given_keys
    if not given and config.engine.max_tokens == EngineConfig.model_fields["max_tokens"].default:
        found.append(
            f"engine.max_tokens={config.engine.max_tokens} is the default for the tiny model, and cuts off the "
            f"responses of a real one such as model.path={path}; give engine.max_tokens={_MAX_TOKENS} or the like."
        )
    return found


def _tiny(path: str) -> bool:
    try:
        return size_of(Path(path)).parameters < _TINY
    except UserError:
        return False  # a model that is still to be downloaded, or of another form
