"""Tools that the model may call in a multi-turn rollout: how they are written, loaded, called and shown to it."""

from __future__ import annotations

from dataflow.tools.reader import ToolCall
from dataflow.tools.tool import Tool, tool
from dataflow.tools.toolbox import Toolbox, toolbox_of

__all__ = ["Tool", "ToolCall", "Toolbox", "tool", "toolbox_of"]
