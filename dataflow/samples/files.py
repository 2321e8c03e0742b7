"""The files of samples: one parquet file a step. A column is of one type, numbers or text; anything else is JSON text.

``runs/NAME/samples/step_000012.parquet`` holds a step's samples, ``val_000012.parquet`` an evaluation's (0 is before
training). Each file is written beside its place and renamed, so a killed run leaves only whole files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dataflow.errors import DataError
from dataflow.files import replaced

Kind: TypeAlias = Literal["step", "val"]
Row: TypeAlias = dict[str, Any]

_LARGEST = 2**63 - 1
_IDS = ("step", "group", "sample")
"""Columns that each file has, and that every reader needs."""


def file_of(directory: Path, kind: Kind, step: int) -> Path:
    """Returns where the samples of a step, or of its evaluation, lie in a directory of samples."""
    return directory / f"{kind}_{step:06d}.parquet"


def steps_in(directory: Path, kind: Kind) -> list[int]:
    """Returns the steps whose samples are in a directory, in ascending order."""
    paths = {path: path.stem.removeprefix(f"{kind}_") for path in directory.glob(f"{kind}_*.parquet")}
    numbers = {path: int(number) for path, number in paths.items() if number.isdecimal()}
    return sorted(step for path, step in numbers.items() if path == file_of(directory, kind, step))


def write(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes columns of equal length as one file, and makes its directory.

    Args:
        path: of the file; replaced atomically.
        columns: values of each row, by name; None where a row has none.

    Raises:
        OSError: the file cannot be written.
    """
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: pyarrow.array(*plain(values)) for name, values in columns.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary:
        pyarrow.parquet.write_table(table, temporary, compression="zstd")


def read(path: Path, groups: Sequence[int] | None = None) -> list[Row]:
    """Returns the rows of a file.

    Args:
        path: of the file.
        groups: ids of the groups to read; None for all.

    Raises:
        DataError: there is no such file, it is no parquet file, or it does not say of which samples its rows are.
    """
    import pyarrow
    import pyarrow.compute
    import pyarrow.parquet

    try:
        # Not read_table: it would take "step_000012" in a name for a partition, and read other files beside it.
        table = pyarrow.parquet.ParquetFile(path).read()
        for name in _IDS if table.num_rows else ():
            if name not in table.column_names or not _are_ids(table[name]):
                raise DataError(
                    f"samples {path}: it has no column '{name}' of whole numbers, as samples do; remove it."
                )
        if groups is not None:
            table = table.filter(pyarrow.compute.is_in(table["group"], pyarrow.array(groups, "int64")))
        rows: list[Row] = table.to_pylist()
    except FileNotFoundError:
        raise DataError(f"samples {path}: there is no such file; give a step whose samples were kept.") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"samples {path}: it is no whole parquet file; remove it.") from error
    return rows


def _are_ids(column: Any) -> bool:
    from pyarrow.types import is_integer

    return bool(is_integer(column.type) and column.null_count == 0)


def plain(values: Sequence[Any]) -> tuple[list[Any], str]:
    """Returns values that a column of one type can hold, and this type, as pyarrow names it.

    >>> plain([1, None, 2.5]), plain(["a", {"b": 1}])
    (([1.0, None, 2.5], 'float64'), (['a', '{"b": 1}'], 'string'))
    """
    found = [_scalar(value) for value in values]
    kinds = {type(value) for value in found if value is not None}
    if kinds == {bool}:
        return found, "bool"
    if kinds == {int} and all(value is None or -_LARGEST <= value <= _LARGEST for value in found):
        return found, "int64"
    if kinds and kinds <= {int, float}:
        try:
            return [None if value is None else float(value) for value in found], "float64"
        except OverflowError:  # an integer beyond all floats
            pass
    return [None if value is None else _text(value) for value in found], "string"


def _scalar(value: Any) -> Any:
    """Returns the Python value of a number of numpy or torch; other values as they are."""
    if type(value) in (str, int, float, bool) or value is None:
        return value
    if hasattr(value, "tolist") and getattr(value, "shape", None) == ():
        return value.tolist()
    return value


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else _json(value)
    # A half of a surrogate pair has no UTF-8.
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_listed)
    except (TypeError, ValueError, RecursionError):  # keys that JSON does not have, a circle
        return repr(value)


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def number(value: Any) -> int | float | None:
    """Returns a value as a number to compare and to sort by; None if it is none, or not a number (NaN)."""
    if not isinstance(value, int | float) or math.isnan(value):
        return None
    return value
