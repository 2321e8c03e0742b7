"""Nested values by their dotted keys."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and values; an empty mapping is a value.

    >>> dict(flat({"trainer": {"lr": 0.1, "lora": {}}, "seed": 1}))
    {'trainer.lr': 0.1, 'trainer.lora': {}, 'seed': 1}
    """
    for name, inner in values.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(inner, Mapping) and inner:
            yield from flat(inner, key)
        else:
            yield key, inner


def at(values: Any, key: str) -> Any:
    """Returns what a section or a mapping has at a dotted key; None for a name that a mapping has not."""

    def inner(held: Any, name: str) -> Any:
        return held.get(name) if isinstance(held, Mapping) else getattr(held, name, None)

    return functools.reduce(inner, key.split("."), values)
