"""What the conversions of verl's values share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dataflow.errors import ConfigError
from dataflow.importing.settings import Settings

Ours = Mapping[str, Any]
Conversion = Callable[[str, Any, Settings], Ours]


class NoCounterpart(Exception):
    """A value has no counterpart here although its key has one; the message says what to do instead.

    Args:
        reason: part of a sentence.
        ours: what is set nevertheless.
    """

    def __init__(self, reason: str, ours: Ours | None = None) -> None:
        super().__init__(reason)
        self.ours = ours or {}


def whole_number(key: str, settings: Settings, default: int | None = None) -> int:
    """Returns a number of a launch.

    Raises:
        ConfigError: it is none, or below 1.
    """
    value = settings.get(key, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{key}={value}: give a whole number of at least 1 in the launch.")
    return value


def gpus(settings: Settings) -> int:
    """Returns the number of verl's training processes."""
    return whole_number("trainer.nnodes", settings) * whole_number("trainer.n_gpus_per_node", settings)
