"""Copies of values for user code, so that its changes have no effect elsewhere."""

from __future__ import annotations

import copy
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from dataflow.errors import an

_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})
"""Immutable types, whose values are shared."""


def readable_once(value: Any) -> str | None:
    """Returns the description of a value that is empty after its first reader, such as a generator; None for others.

    >>> readable_once(n for n in range(3)), readable_once([0, 1, 2])
    ('a generator', None)
    """
    if isinstance(value, Coroutine):
        value.close()  # else Python warns that nobody awaited it
    once = isinstance(value, Iterator | AsyncIterator | Coroutine)
    return an(type(value).__name__.replace("_", " ")) if once else None


def own_copy(value: Any) -> Any:
    """Returns a copy that shares nothing mutable with the original.

    Dicts, lists and tuples are copied here, in a tenth of the time of ``copy.deepcopy``, which copies all else. Objects
    that cannot be copied, such as locks and open files, are shared.

    >>> chat = [{"role": "user", "content": "2 + 2?"}]
    >>> own_copy(chat) == chat, own_copy(chat)[0] is chat[0]
    (True, False)
    """
    return _copied(value, _deep)


def own_options(value: Any) -> Any:
    """Returns a copy of the dicts, lists and tuples in a configured option; other objects are shared.

    An option given from Python may be a client or a tokenizer that all calls share.

    >>> own_options({"urls": ["a"], "client": print})["client"] is print
    True
    """
    return _copied(value, lambda other: other)


def _copied(value: Any, others: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is dict:
        return {key: part if type(part) in _LEAVES else _copied(part, others) for key, part in value.items()}
    if kind is list or kind is tuple:
        # Token ids are long lists of one type.
        return kind(value) if {*map(type, value)} <= _LEAVES else kind([_copied(part, others) for part in value])
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and value.dtype == object:
        # Not as deepcopy, in whose copy equal rows would still share an object.
        copied = numpy.empty(value.size, dtype=object)
        for at, part in enumerate(value.flat):
            copied[at] = _copied(part, others)
        return copied.reshape(value.shape)
    return others(value)


def _deep(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever an object that cannot be copied raises
        return value
