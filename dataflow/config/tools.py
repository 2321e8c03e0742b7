"""The configuration of tools: which are offered, and how long a conversation with them may be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from dataflow.config.section import Section, Text, Texts


class ToolsConfig(Section):
    """Tools that the model may call while it answers; with none, each response is one turn."""

    path: Text | None = None
    """Python file that defines tools with @tool; null for only those that come with dataflow."""
    names: Texts = Field(default=[])
    """Tools to offer, from the file or built in (calculator); empty offers all that are marked in the file."""
    max_turns: PositiveInt = 4
    """Turns of the model in a conversation; a call in the last one is not answered."""
    max_response_tokens: PositiveInt = 256
    """Tokens of all turns together, including the tools' answers; engine.max_tokens bounds each turn."""
    timeout: PositiveFloat = 10.0
    """Seconds that a call may take; after that the model gets an error message."""
    frozen_after: NonNegativeFloat | None = None
    """Seconds that a call may block its process (ray); null for timeout, but at least 60; 0 for no limit."""
    max_tool_response_length: PositiveInt = 4096
    """Characters of a tool's answer that the model reads; a longer one is cut, with a note that says so."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Side of a longer answer that is cut; left keeps its end."""
    format: Text = "auto"
    """How the model writes calls: auto, a family of renderers, hermes, or a class of the file."""

    @property
    def offered(self) -> bool:
        """Whether any tool is offered."""
        return bool(self.path or self.names)
