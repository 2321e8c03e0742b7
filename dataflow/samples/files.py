"""The files of samples: one parquet file a step. A column is of one type, numbers or text; anything else is JSON text.

``runs/NAME/samples/step_000012.parquet`` holds a step's samples, ``val_000012.parquet`` an evaluation's (0 is before
training). Each file is written beside its place and renamed, so a killed run leaves only whole files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dataflow.errors import DataError
from dataflow.files import replaced

Kind: TypeAlias = Literal["step", "val"]
Row: TypeAlias = dict[str, Any]


def file_of(directory: Path, kind: Kind, step: int) -> Path:
    """Returns where the samples of a step, or of its evaluation, lie in a directory of samples."""
    return directory / f"{kind}_{step:06d}.parquet"


def steps_in(directory: Path, kind: Kind) -> list[int]:
    """Returns the steps whose samples are in a directory, in ascending order."""
    numbers = [path.stem.removeprefix(f"{kind}_") for path in directory.glob(f"{kind}_*.parquet")]
    return sorted(int(number) for number in numbers if number.isdecimal())


def write(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes columns of equal length, None where a row has no value, as one file, and makes its directory.

    The file is replaced atomically.
    """
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: _column(values) for name, values in columns.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary:
        pyarrow.parquet.write_table(table, temporary, compression="zstd")


def read(path: Path, groups: Sequence[int] | None = None) -> list[Row]:
    """Returns the rows of a file: of these groups, by id, or of all. DataError if it is no whole file of samples."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path).read()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"samples {path}: it is no whole parquet file; remove it.") from error
    if missing := {"step", "group", "sample"}.difference(table.column_names):
        raise DataError(f"samples {path}: it has no column '{min(missing)}', as samples do; remove it.")
    rows: list[Row] = table.to_pylist()
    return rows if groups is None else [row for row in rows if row["group"] in groups]


def _column(values: Sequence[Any]) -> Any:
    """Returns a column of pyarrow: of numbers, of truth values, or of texts, with JSON for all that is neither."""
    import pyarrow

    found = [value.item() if getattr(value, "shape", None) == () else value for value in values]  # numpy's, torch's
    kinds = {type(value) for value in found if value is not None}
    if kinds <= {int, float} or kinds == {bool}:
        try:
            return pyarrow.array(found, "float64" if float in kinds else None)
        except (OverflowError, pyarrow.ArrowInvalid):  # an integer of more than 64 bits
            pass
    return pyarrow.array([None if value is None else _text(value) for value in found], "string")


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_listed, skipkeys=True)
    return text.encode("utf-8", "replace").decode("utf-8")  # a half of a surrogate pair has no UTF-8


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
