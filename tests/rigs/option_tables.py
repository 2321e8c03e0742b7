"""Tables of options in the documents, by the docstrings of their sections."""

from __future__ import annotations

import re
from typing import Any

from dataflow.config.keys import yaml_values

TABLES = re.compile(r"(<!-- options: .*? -->\n)(.*?)(\n<!-- end of options -->)", re.DOTALL)
"""Where a document has its tables."""


def option_table(prefix: str, section: Any) -> str:
    """Returns the table of a section's keys, their defaults and what they do."""
    rows = [f"| key of `{prefix}` | default | what |", "|---|---|---|"]
    for name, info in type(section).model_fields.items():
        default = yaml_values.inline(_plain(getattr(section, name)))
        text = " ".join((info.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{prefix}.{name}` | `{default}` | {text} |")
    return "\n".join(rows)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value.model_dump(exclude_defaults=True) if hasattr(value, "model_dump") else value
