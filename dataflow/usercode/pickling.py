"""Pickles user code and its objects: the functions and classes of a pipeline's file are in no importable module."""

from __future__ import annotations

import functools
import io
import pickle
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import IO, Any, ClassVar

_LARGE = ("numpy", "torch", "ray")
"""Modules whose objects are pickled in their own way."""


def dumps(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Returns the pickle of a value; ``pickle.loads`` reads it.

    Args:
        value: of any type that cloudpickle pickles; that pickle does, where cloudpickle is not installed.
        buffer_callback: is called with each buffer that stays out of the pickle, as ``pickle.dumps`` does.
    """
    file = io.BytesIO()
    dump(value, file, buffer_callback)
    return file.getvalue()


def dump(value: Any, file: IO[bytes], buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> None:
    """Writes the pickle of a value to a file; as :func:`dumps`."""
    _pickler()(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffer_callback).dump(value)


def why_not_pickled(value: Any, known: tuple[type, ...] = ()) -> str:
    """Returns why a value cannot be pickled; "" if it can be. Nothing is kept of the pickle.

    Args:
        value: of any type.
        known: types that can be; objects of these, arrays and tensors are not looked at, as they may be large.
    """
    try:
        _probe(known)(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@functools.cache
def _probe(known: tuple[type, ...]) -> type[pickle.Pickler]:
    class Probe(_pickler()):  # type: ignore[misc]
        def persistent_id(self, part: Any) -> int | None:
            kind = type(part)
            large = kind in known or (kind.__module__.partition(".")[0] in _LARGE and not isinstance(part, type))
            return 0 if large else None

    return Probe


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


@functools.cache
def _pickler() -> type[pickle.Pickler]:
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return pickle.Pickler

    reduce: Callable[[CodeType], tuple[Any, ...]] = cloudpickle.Pickler.dispatch_table[CodeType]

    def with_its_file(code: CodeType) -> tuple[Any, ...]:
        make, parts, *_ = reduce(code)
        return _in_file, (make, parts, code.co_filename)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """cloudpickle 3.1.3 leaves out the names of files, without which a traceback shows no line of the code."""

        dispatch_table: ClassVar = ChainMap({CodeType: with_its_file}, cloudpickle.Pickler.dispatch_table)

    return Pickler


def _in_file(make: Callable[..., CodeType], parts: tuple[Any, ...], file: str) -> CodeType:
    return make(*parts).replace(co_filename=file)
