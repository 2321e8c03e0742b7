"""Pickles user code and its objects: the functions and classes of a pipeline's file are in no importable module."""

from __future__ import annotations

import functools
import io
import pickle
from collections import ChainMap
from collections.abc import Callable, Iterable
from types import CodeType
from typing import IO, Any, ClassVar


def dumps(value: Any) -> bytes:
    """Returns the pickle of a value, by cloudpickle or, where that is not installed, by pickle."""
    file = io.BytesIO()
    dump(value, file)
    return file.getvalue()


def dumps_each(values: Iterable[Any]) -> tuple[bytes, list[int]]:
    """Pickles values one after another, each on its own; returns the bytes, and the end of each value's in them."""
    file, ends = io.BytesIO(), []
    pickler = _pickler()(file, protocol=pickle.HIGHEST_PROTOCOL)
    for value in values:
        pickler.clear_memo()
        pickler.dump(value)
        ends.append(file.tell())
    return file.getvalue(), ends


def dump(value: Any, file: IO[bytes]) -> None:
    """Writes the pickle of a value to a file; as :func:`dumps`."""
    _pickler()(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)


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
