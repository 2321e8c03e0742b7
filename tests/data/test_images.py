"""Prompts with images or videos are refused, rather than trained on without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from dataflow.data.rows import load_rows
from dataflow.errors import DataError

PLAIN: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "<image>What is it?"}],
    "data_source": "s",
    "reward_model": {"ground_truth": "1"},
}


def write(file: Path, column: str, *values: list[dict[str, str]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**PLAIN, column: value} for value in values]), file)
    return file


@pytest.mark.parametrize("column", ["images", "videos"])
def test_a_row_that_shows_something_is_refused(column: str, tmp_path: Path) -> None:
    file = write(tmp_path / "train.parquet", column, [], [{"path": "a.png"}])
    with pytest.raises(DataError, match=rf"row 2: the prompt has {column}, which .*; leave out rows with {column}\."):
        load_rows(file)


def test_an_empty_column_is_left_out(tmp_path: Path) -> None:
    rows, _labels = load_rows(write(tmp_path / "train.parquet", "images", []))
    assert rows == [PLAIN]
