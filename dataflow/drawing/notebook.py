"""What objects show of themselves in a notebook: a picture and a text, as one piece of HTML without scripts."""

from __future__ import annotations

import base64
import html
import tempfile
from collections.abc import Callable
from pathlib import Path

Draw = Callable[[Path], object]


def shown(text: str, draw: Draw | None = None, what: str = "") -> str:
    """Returns HTML of a text, in a font of even width, below a picture that ``draw`` writes into a ``.png`` file.

    ``what`` says what the picture shows, for those who cannot see it.
    """
    picture = ""
    if draw is not None:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "picture.png")
            draw(path)
            data = base64.b64encode(path.read_bytes()).decode()
        alt = html.escape(what, quote=True)
        picture = f'<img alt="{alt}" style="max-width: 100%" src="data:image/png;base64,{data}">\n'
    return f'<div>\n{picture}<pre style="line-height: 1.3">{html.escape(text)}</pre>\n</div>'
