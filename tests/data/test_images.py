"""Prompts with images: verl's column, its places in the messages, and what is refused before anything starts."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from dataflow.data.pictures import opened
from dataflow.data.rows import load_rows
from dataflow.errors import DataError

PLAIN: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "<image>What is it?"}],
    "data_source": "s",
    "reward_model": {"ground_truth": "1"},
}


def png(colour: str = "red", kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(file, kind)
    return file.getvalue()


def write(file: Path, column: str, *values: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**PLAIN, column: value} for value in values]), file)
    return file


def lines(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_a_row_that_shows_a_video_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "train.parquet", "videos", [], [{"path": "a.mp4"}])
    with pytest.raises(DataError, match=r"row 2: the prompt has videos, which .*; leave out rows with videos\."):
        load_rows(file)


def test_an_empty_column_is_left_out(tmp_path: Path) -> None:
    rows, _labels = load_rows(write(tmp_path / "train.parquet", "images", []))
    assert rows == [PLAIN]


def test_bytes_and_paths_of_parquet_become_pictures(tmp_path: Path) -> None:
    (tmp_path / "blue.jpg").write_bytes(png("blue", "JPEG"))
    cells = [[{"bytes": png(), "path": None}], [{"bytes": None, "path": "blue.jpg"}]]
    rows, labels = load_rows(write(tmp_path / "train.parquet", "pictures", *cells), "pictures")
    found = [opened(row["images"], label)[0] for row, label in zip(rows, labels, strict=True)]
    assert [(picture.mode, picture.size) for picture in found] == [("RGB", (40, 30))] * 2
    assert found[0].getpixel((1, 1)) == (255, 0, 0)
    assert found[1].getpixel((1, 1))[2] > 250


def test_lines_of_json_hold_verls_rows_with_paths_and_base64(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png())
    coded = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    file = lines(tmp_path / "train.jsonl", *({**PLAIN, "images": [cell]} for cell in ("red.png", {"image": coded})))
    rows, labels = load_rows(file)
    assert [opened(row["images"], label)[0].getpixel((0, 0)) for row, label in zip(rows, labels, strict=True)] == [
        (255, 0, 0)
    ] * 2


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["a.png", "b.png"], r"line 1: the prompt has 2 images and 1 place for them; write <image> once .*"),
        ([7], r"line 1: image 1 is an int; give 'bytes' or 'path'"),
        ([{"url": "x"}], r"line 1: image 1 has neither 'bytes' nor 'path'"),
        (["https://example.org/a.png"], r"line 1: image 1 is at https://.*; nothing is downloaded"),
        (["data:image/png;base64,?"], r"line 1: image 1 is no base64"),
        ("a.png", r"line 1: 'images' is not a list"),
    ],
)
def test_a_wrong_column_is_one_sentence(cells: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(lines(tmp_path / "train.jsonl", {**PLAIN, "images": cells}))


def test_a_video_beside_an_image_is_refused(tmp_path: Path) -> None:
    row = {**PLAIN, "prompt": [{"role": "user", "content": "<image> <video>"}], "images": ["a.png"]}
    with pytest.raises(DataError, match=r"line 1: the prompt shows more than images"):
        load_rows(lines(tmp_path / "train.jsonl", row))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"row 1: .*a\.png cannot be read \(No such file or directory\); put it back"),
        (b"text", r"row 1: .*a\.png is no image that can be read; save it as PNG or JPEG"),
        (png()[:70], r"row 1: .*a\.png cannot be read \("),
    ],
    ids=["missing", "no image", "cut off"],
)
def test_an_unreadable_file_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.png").write_bytes(content)
    rows, labels = load_rows(write(tmp_path / "train.parquet", "images", [{"path": "a.png"}]))
    with pytest.raises(DataError, match=message):
        opened(rows[0]["images"], labels[0])


def test_bytes_that_are_no_image_are_counted_from_one() -> None:
    with pytest.raises(DataError, match=r"row 3: image 2 is no image"):
        opened([{"bytes": png()}, {"bytes": b"x"}], "f, row 3")
