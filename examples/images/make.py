"""Writes what is needed to try prompts with images on a CPU: a tiny random model, and pictures to count squares in.

python examples/images/make.py shapes
dataflow run pipelines/gsm8k_grpo.py model.path=shapes/model data.train=shapes/train.parquet data.val=shapes/val.parquet
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image, ImageDraw

from dataflow.models.tiny_vision import write_tiny_vision

SIDE = 112
"""Width and height of a picture in pixels."""


def picture(squares: int, colour: tuple[int, int, int]) -> bytes:
    """Returns a PNG with this many squares, at most 9."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    draw, step = ImageDraw.Draw(image), SIDE // 3
    for at in range(squares):
        x, y = at % 3 * step + 6, at // 3 * step + 6
        draw.rectangle((x, y, x + step - 12, y + step - 12), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns rows of verl's schema."""
    draw = random.Random(seed)
    found = []
    for index in range(count):
        squares = draw.randint(1, 9)
        colour = (draw.randint(0, 200), draw.randint(0, 200), draw.randint(0, 200))
        found.append(
            {
                "data_source": "openai/gsm8k",  # its rule reads the number behind ####
                "prompt": [{"role": "user", "content": "<image>\nHow many squares are there? End with #### N."}],
                "images": [{"bytes": picture(squares, colour)}],
                "reward_model": {"style": "rule", "ground_truth": str(squares)},
                "extra_info": {"index": index},
            }
        )
    return found


def main(place: Path) -> None:
    """Writes model and data to a folder."""
    place.mkdir(parents=True, exist_ok=True)
    write_tiny_vision(place / "model")
    for name, count, seed in (("train", 256, 0), ("val", 32, 1)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(count, seed)), place / f"{name}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "shapes"))
