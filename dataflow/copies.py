"""Copies for user code: what a function is given is its own, so that what it changes there is changed nowhere else.

Data of a run is mostly what JSON holds: dicts and lists of texts and numbers. These are copied here, at a tenth of what
``copy.deepcopy`` takes, and everything else by ``copy.deepcopy``.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

_LEAVES = frozenset({str, int, float, bool, bytes, type(None), complex, range})
"""Types whose values cannot change; they are shared. Subclasses may have attributes, which can."""


def own_copy(value: Any) -> Any:
    """Returns a copy that shares nothing that can change with the original.

    Dicts, lists, tuples, sets, arrays and tensors are copied with all that they hold; an object inside that occurs
    twice becomes two, unless it is part of a cycle. A value that cannot be copied, such as a lock or an open file, is
    returned as it is.

    >>> chat = [{"role": "user", "content": "2 + 2?"}]
    >>> own_copy(chat) == chat, own_copy(chat)[0] is chat[0]
    (True, False)
    """
    try:
        return _copied(value)
    except RecursionError:  # a value that holds itself, or one that is nested very deeply
        return _deep(value)


def own_options(value: Any) -> Any:
    """Returns a copy of the dicts, lists, tuples and sets of a configured option; other objects are shared.

    An option given from Python may be a client or a tokenizer, which belongs to all calls.

    >>> own_options({"urls": ["a"], "client": print})["client"] is print
    True
    """
    kind = type(value)
    if kind is dict:
        return {key: own_options(part) for key, part in value.items()}
    if kind is list or kind is tuple or kind is set:
        return kind(own_options(part) for part in value)
    return value


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is dict:
        return {key: part if type(part) in _LEAVES else _copied(part) for key, part in value.items()}
    if kind is list:
        # Token ids are long lists of one type.
        if {*map(type, value)} <= _LEAVES:
            return value.copy()
        return [_copied(part) for part in value]
    if kind is tuple:
        return tuple([_copied(part) for part in value])
    if kind is set:
        return {_copied(part) for part in value}
    if (array := _array(value, kind)) is not None:
        return array
    return _deep(value)


def _array(value: Any, kind: type) -> Any:
    """Returns the copy of an array or tensor; None for a value of another type."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and kind is numpy.ndarray:
        array = value.copy()
        if array.dtype == object:
            flat = array.reshape(-1)
            for at, part in enumerate(flat):
                flat[at] = _copied(part)
        return array
    if torch is not None and kind is torch.Tensor:
        # deepcopy refuses a tensor that is the result of a computation with gradients.
        return value.clone() if value.grad_fn is not None else _deep(value)
    return None


def _deep(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # copying runs the object's own code, and there is no list of what cannot be copied
        return value
