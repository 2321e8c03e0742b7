"""Keyword arguments of a call as the ``key=value`` arguments of the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dataflow.config.keys.nested import flat


def arguments_of(overrides: tuple[str, ...], keys: Mapping[str, Any]) -> list[str]:
    """Returns ``key=value`` arguments.

    Args:
        overrides: arguments in this form already.
        keys: values by key; a mapping for a section.

    >>> arguments_of(("seed=1",), {"policy": "both", "trainer": {"lr": 1e-4, "betas": (0.9, 0.99)}, "name": None})
    ['seed=1', 'policy=both', 'trainer.lr=0.0001', 'trainer.betas=[0.9, 0.99]', 'name=null']
    """
    return [*overrides, *(f"{key}={_text(value)}" for key, value in flat(keys))]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
