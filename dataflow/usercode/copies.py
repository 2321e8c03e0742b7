"""Copies of arguments for user code, so that its changes have no effect elsewhere.

Most data of a run is JSON-like: dicts and lists of strings and numbers. These are copied here in a tenth of the time of
``copy.deepcopy``, which copies everything else.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Awaitable
from inspect import CO_ITERABLE_COROUTINE
from types import AsyncGeneratorType, CoroutineType, GeneratorType, MappingProxyType
from typing import Any

_LEAVES = frozenset({str, int, float, bool, bytes, type(None), complex, range})
"""Immutable types, whose values are shared. Not subclasses: their attributes may be mutable."""
_OWN_PICKLING = frozenset(
    {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__"}
)
"""Methods with which the pickle of an object may hold something else than its fields."""
_ONCE: dict[type, str] = {
    GeneratorType: "a generator",
    AsyncGeneratorType: "an async generator",
    CoroutineType: "a coroutine",
    **{kind: f"a {kind.__name__} object" for kind in (map, filter, zip, enumerate, reversed)},
}


def readable_once(value: Any) -> str | None:
    """Returns the description of a value that is empty after its first reader, such as a generator; None for others.

    >>> readable_once(n for n in range(3)), readable_once([0, 1, 2])
    ('a generator', None)
    """
    if isinstance(value, CoroutineType):
        value.close()  # else Python warns that nobody awaited it
    return _ONCE.get(type(value))


def is_coroutine(value: Any) -> bool:
    """As ``inspect.iscoroutine``, which also reads ``value.__class__``: that of a user's object may raise."""
    return issubclass(type(value), CoroutineType)


def is_awaitable(value: Any) -> bool:
    """As ``inspect.isawaitable``, which also reads ``value.__class__``: that of a user's object may raise."""
    if type(value) is GeneratorType:
        return bool(value.gi_code.co_flags & CO_ITERABLE_COROUTINE)
    return issubclass(type(value), Awaitable)


def own_copy(value: Any) -> Any:
    """Returns a copy that shares nothing mutable with the original.

    Dicts, lists, tuples, sets, arrays and tensors are copied recursively; an object that occurs twice is copied twice,
    unless it is part of a cycle. Only parts that cannot be copied, such as locks and open files, are shared.

    >>> chat = [{"role": "user", "content": "2 + 2?"}]
    >>> own_copy(chat) == chat, own_copy(chat)[0] is chat[0]
    (True, False)
    """
    try:
        return _copied(value)
    except RecursionError:  # the value contains itself or is nested very deeply
        return _unrolled(value)


def is_plain(value: Any) -> bool:
    """Whether a value consists of dicts, lists, tuples, sets, arrays, numbers and texts: nothing runs if it is copied.

    One that contains itself, or is nested very deeply, is not plain.

    >>> is_plain({"a": [1, ("b", None)]}), is_plain([print])
    (True, False)
    """
    try:
        return _plain(value)
    except RecursionError:
        return False


def is_immutable(value: Any) -> bool:
    """Whether nothing in a value can change, so that it can be shared: numbers, texts, frozen sets and dataclasses.

    One that contains itself, or is nested very deeply, does not count as immutable.

    >>> is_immutable((1, frozenset({"a"}))), is_immutable(([],))
    (True, False)
    """
    try:
        return _immutable(value)
    except RecursionError:
        return False


def _immutable(value: Any) -> bool:
    kind = type(value)
    if kind in _LEAVES:
        return True
    if kind is tuple or kind is frozenset:
        return {*map(type, value)} <= _LEAVES or all(map(_immutable, value))
    parameters = vars(kind).get("__dataclass_params__")
    if (
        parameters is None
        or not parameters.frozen
        or kind.__bases__ != (object,)
        or not _OWN_PICKLING.isdisjoint(vars(kind))
    ):
        return False
    # It may hold more than its fields, such as a cached property, or lack one.
    held = getattr(value, "__dict__", {})
    return held.keys() == {f.name for f in dataclasses.fields(value)} and all(map(_immutable, held.values()))


def _plain(value: Any) -> bool:
    kind, numpy = type(value), sys.modules.get("numpy")
    if kind in _LEAVES:
        return True
    if kind is dict:
        return all(map(_plain, value)) and all(map(_plain, value.values()))
    if kind is list or kind is tuple or kind is set:
        return {*map(type, value)} <= _LEAVES or all(map(_plain, value))
    if numpy is None or kind is not numpy.ndarray:
        return False
    return not value.dtype.hasobject or (value.dtype == object and all(map(_plain, value.flat)))


def own_options(value: Any) -> Any:
    """Returns a copy of the dicts, lists, tuples and sets in a configured option; other objects are shared.

    An option given from Python may be a client or a tokenizer that all calls share.

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
        # A fast path for token ids, which are long lists of one type.
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
        if value.dtype.names and value.dtype.hasobject:
            return _deep(value)
        array = value.copy()
        if array.dtype == object:
            flat = array.reshape(-1)
            for at, part in enumerate(flat):
                flat[at] = _copied(part)
        return array
    if torch is not None and kind is torch.Tensor:
        # deepcopy() raises for non-leaf tensors that require gradients.
        return value.clone() if value.grad_fn is not None else _deep(value)
    return None


def _unrolled(value: Any) -> Any:
    """Copies dicts and lists without recursion, including those that contain themselves."""
    kinds = {dict: dict, list: list}
    if type(value) not in kinds:
        return _deep(value)
    made: dict[int, Any] = {id(value): kinds[type(value)]()}
    ahead = [value]
    while ahead:
        source = ahead.pop()
        target = made[id(source)]
        for key, part in source.items() if type(source) is dict else enumerate(source):
            if type(part) in kinds:
                if id(part) not in made:
                    made[id(part)] = kinds[type(part)]()
                    ahead.append(part)
                part = made[id(part)]
            else:
                part = _part(part)
            if type(source) is dict:
                target[key] = part
            else:
                target.append(part)
    return made[id(value)]


def _part(value: Any) -> Any:
    try:
        return _copied(value)
    except RecursionError:
        return _deep(value)


def _deep(value: Any) -> Any:
    pandas = sys.modules.get("pandas")
    try:
        if pandas is not None and isinstance(value, pandas.DataFrame | pandas.Series | pandas.Index):
            return pickle.loads(pickle.dumps(value))  # their copy() shares the objects in the cells
        return copy.deepcopy(value)
    except Exception:  # copying runs the object's own code, which may raise anything
        return _around(value)


def _around(value: Any) -> Any:
    """Copies an object and shares the parts that cannot be copied."""
    try:
        if isinstance(value, MappingProxyType):
            return MappingProxyType(own_copy(dict(value)))
        if not isinstance(value, dict | list) and (isinstance(value, type) or not dataclasses.is_dataclass(value)):
            return value
        made = copy.copy(value)
        if isinstance(made, dict):
            for key, part in value.items():
                made[key] = own_copy(part)
        elif isinstance(made, list):
            made[:] = [own_copy(part) for part in value]
        else:
            for name, part in vars(value).items():
                vars(made)[name] = own_copy(part)
        return made
    except Exception:
        return value
