"""Pictures of prompts: verl's column ``images``, read and put in the place of ``<image>`` in the messages."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.errors import DataError, counted

MARK = "<image>"
"""The place of an image in the text of a message."""


@dataclass(frozen=True, eq=False)
class Shown:
    """What a model that takes images reads of a prompt beside its token ids. The rows of a group share one.

    Attributes:
        inputs: ``pixel_values`` float32 ``[patches, values]`` and ``image_grid_thw`` int64 ``[images, 3]``, as verl's
            ``multi_modal_inputs``; empty for a prompt without images.
        positions: of the prompt's tokens in time, height and width, int64 ``[3, tokens]``.
    """

    inputs: Mapping[str, Any]
    positions: Any

    def __deepcopy__(self, _memo: dict[int, Any]) -> Shown:
        return self  # nothing changes it, and pixels are large


def images_of(row: Mapping[str, Any], key: str, label: str, home: Path) -> list[dict[str, Any]]:
    """Returns the images in a column of a row, each as ``bytes`` or ``path``, after a check of their form and number.

    Relative paths count from ``home``, the folder of the data file.
    """
    cells = row.get(key) or []
    try:
        found = [_image_of(cell, home) for cell in (cells if isinstance(cells, list) else [None])]
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"{label}: {key!r} is not a list of images ({error}); give each with 'bytes' or 'path', or as a path."
        ) from error
    places = sum(message["content"].count(MARK) for message in row["prompt"] if isinstance(message.get("content"), str))
    if found and places != len(found):
        raise DataError(
            f"{label}: the prompt has {counted(len(found), 'image')} and {counted(places, 'place')} for them; write "
            f"{MARK} once in its messages for each image."
        )
    return found


def _image_of(cell: Any, home: Path) -> dict[str, Any]:
    given: Any = {"path": cell} if isinstance(cell, str) else cell
    if given.get("bytes"):
        return {"bytes": bytes(given["bytes"])}
    path = given.get("path") or given.get("image")
    if path.startswith("data:"):
        return {"bytes": base64.b64decode(path.partition(",")[2], validate=True)}
    return {"path": str(home / Path(path.removeprefix("file://")).expanduser())}


def opened(images: Sequence[Mapping[str, Any]], label: str) -> list[Any]:
    """Returns the images as PIL's, in RGB; a DataError names the file of one, or its number in the row."""
    from PIL import Image

    pictures = []
    for at, image in enumerate(images):
        name = str(image.get("path") or f"image {at + 1}")
        source: Any = io.BytesIO(image["bytes"]) if image.get("bytes") else image["path"]
        try:
            with Image.open(source) as picture:
                pictures.append(picture.convert("RGB"))
        # Of a broken file, each format's decoder raises its own kinds; a bomb of pixels is one of PIL's.
        except Exception as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200] or type(error).__name__
            raise DataError(f"{label}: {name} cannot be read ({reason}); put it back, or leave out the row.") from error
    return pictures


def with_pictures(chat: Sequence[Mapping[str, Any]], pictures: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the messages with the pictures in their places, as verl's data set does; text stays text without any."""
    left, found = iter(pictures), []
    for message in chat:
        content = message["content"]
        if pictures and isinstance(content, str):
            content = [
                {"type": "image", "image": next(left)} if part == MARK else {"type": "text", "text": part}
                for part in re.split(f"({MARK})", content)
                if part
            ]
        found.append({**message, "content": content})
    return found
