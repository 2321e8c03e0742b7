"""How much an object holds."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any


def size_of(roots: Iterable[Any], but: Iterable[Any] = ()) -> int:
    """Returns the number of objects that can be reached, apart from code and from what only ``but`` leads to."""
    seen: dict[int, Any] = {id(one): one for one in but}
    ahead, known = list(roots), len(seen)
    while ahead:
        one = ahead.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
            seen[id(one)] = one
            ahead += gc.get_referents(one)
    return len(seen) - known
