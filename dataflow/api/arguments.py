"""Keyword arguments of a call as the ``key=value`` arguments of the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def arguments_of(overrides: tuple[str, ...], keys: Mapping[str, Any]) -> list[str]:
    """Returns ``key=value`` arguments.

    Args:
        overrides: arguments in this form already.
        keys: values by key; a mapping for a section.

    >>> arguments_of(("seed=1",), {"policy": "both", "trainer": {"lr": 1e-4, "betas": (0.9, 0.99)}, "name": None})
    ['seed=1', 'policy=both', 'trainer.lr=0.0001', 'trainer.betas=[0.9, 0.99]', 'name=null']
    """
    return [*overrides, *_flat(keys, "")]


def _flat(keys: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in keys.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value if isinstance(value, str) else json.dumps(value, default=str)}"
