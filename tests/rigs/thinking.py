"""A model whose chat template has an option, as Qwen3's has: whether it thinks before it answers."""

from __future__ import annotations

import shutil
from pathlib import Path

THOUGHT = "<think>\n\n</think>\n\n"
"""What the template puts in place of a thought with ``enable_thinking=False``."""


def thinking_model(plain: Path, directory: Path) -> Path:
    """Returns a copy of a model whose template reads ``enable_thinking``."""
    shutil.copytree(plain, directory)
    template = directory / "chat_template.jinja"
    option = "{% if enable_thinking is defined and not enable_thinking %}{{ '" + THOUGHT + "' }}{% endif %}"
    text = template.read_text(encoding="utf-8")
    assert text.endswith("{% endif %}"), "the last block is the generation prompt"
    template.write_text(text.removesuffix("{% endif %}") + option + "{% endif %}", encoding="utf-8")
    return directory
