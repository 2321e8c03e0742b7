"""Prompts with images: verl's column, its places in the messages, and what is refused before anything starts."""

from __future__ import annotations

import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from dataflow.batch import Batch
from dataflow.data.pictures import Shown, opened, with_pictures
from dataflow.data.rows import load_rows
from dataflow.engines.samples import with_shown
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
        ([7], r"line 1: 'images' is not a list of images \('int' .*; give each with 'bytes' or 'path'"),
        (["data:image/png;base64,?"], r"line 1: 'images' is not a list of images"),
        ("a.png", r"line 1: 'images' is not a list"),
    ],
)
def test_a_wrong_column_is_one_sentence(cells: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(lines(tmp_path / "train.jsonl", {**PLAIN, "images": cells}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"row 1: .*a\.png cannot be read \(No such file or directory\); put it back"),
        (png()[:70], r"row 1: .*a\.png cannot be read \("),
    ],
    ids=["missing", "cut off"],
)
def test_an_unreadable_file_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.png").write_bytes(content)
    rows, labels = load_rows(write(tmp_path / "train.parquet", "images", [{"path": "a.png"}]))
    with pytest.raises(DataError, match=message):
        opened(rows[0]["images"], labels[0])


def test_what_a_prompt_shows_is_kept_and_sent_once_for_all_rows_of_its_group() -> None:
    shown = Shown({"pixel_values": torch.rand(64, 1176)}, torch.zeros(3, 4, dtype=torch.int64))
    rows = Batch([0], {"multi_modal_inputs": [shown]}).repeat(8)
    assert all(one is shown for one in rows["multi_modal_inputs"])
    sent = pickle.dumps(rows, 5)
    assert len(sent) < 1.5 * 64 * 1176 * 4
    there = pickle.loads(sent)["multi_modal_inputs"]
    assert all(one is there[0] for one in there)


def test_a_response_counts_on_from_the_largest_position_of_its_prompt() -> None:
    # Two tokens of text, an image of 2 x 2 patches, and one more of text; then a response of two tokens.
    image = torch.tensor([[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]])
    text = torch.tensor([[0, 0, 1, 2, 3, 4, 5, 6, 7, 8]])  # padded by one on the left
    (found,) = with_shown(text, [Shown({}, image)], 8)
    assert found[0].tolist() == text[0].tolist()
    assert found[1:, 1:8].tolist() == image.tolist()
    assert found[1:, 8:].tolist() == [[5, 6]] * 3


def test_pictures_come_in_their_places() -> None:
    chat = [{"role": "user", "content": "<image>Is it <image>?"}]
    (message,) = with_pictures(chat, ["a", "b"])
    assert [part.get("image", part.get("text")) for part in message["content"]] == ["a", "Is it ", "b", "?"]
    assert with_pictures([{"role": "user", "content": "?"}], []) == [{"role": "user", "content": "?"}]
