"""Draws that the simulations of a plan have in common: under every policy, a request takes the same time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable
from threading import Lock
from typing import Any

MOST = 4_000_000
"""Numbers that are kept, 8 bytes each: as many as 260 steps of 5,120 requests have, with their order."""


class Draws:
    """Keeps the numbers that were drawn first, up to a limit; the same key always has the same numbers.

    Simulations go through the same steps one after the other. If there are more steps than the limit allows, the first
    ones are kept: dropping the oldest would drop each step before the next simulation reads it.
    """

    def __init__(self, most: int = MOST) -> None:
        self._left = most
        self._kept: dict[Hashable, array[Any]] = {}
        self._lock = Lock()

    def get(self, key: Hashable, kind: str, draw: Callable[[], Iterable[Any]]) -> array[Any]:
        """Returns the numbers of a key; calls ``draw`` if they are not kept.

        Args:
            key: all that the numbers depend on.
            kind: "d" for floats, "l" for integers.
            draw: draws them.
        """
        found = self._kept.get(key)
        if found is None:
            found = array(kind, draw())
            with self._lock:
                if key not in self._kept and len(found) <= self._left:
                    self._left -= len(found)
                    self._kept[key] = found
        return found
