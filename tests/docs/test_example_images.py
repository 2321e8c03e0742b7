"""The example of prompts with images, from its files to a trained model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pyarrow
import pyarrow.parquet

from dataflow.data.pictures import opened
from dataflow.data.rows import load_rows

ROOT = Path(__file__).parents[2]
MAKE = ROOT / "examples" / "images" / "make.py"


def test_its_pictures_show_as_many_squares_as_the_rows_say(tmp_path: Path) -> None:
    make = runpy.run_path(str(MAKE), run_name="example")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(make["rows"](4, 0)), tmp_path / "train.parquet")
    rows, labels = load_rows(tmp_path / "train.parquet")
    for row, label in zip(rows, labels, strict=True):
        (picture,) = opened(row["images"], label)
        step = make["SIDE"] // 3
        centres = [(at % 3 * step + step // 2, at // 3 * step + step // 2) for at in range(9)]
        coloured = sum(picture.getpixel(centre) != (255, 255, 255) for centre in centres)
        assert str(coloured) == row["reward_model"]["ground_truth"]
