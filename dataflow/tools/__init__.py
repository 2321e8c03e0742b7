"""Tools that the model may call in a multi-turn rollout: how they are written, loaded, called and shown to it."""

from __future__ import annotations

from dataflow.tools.formats import ToolCall
from dataflow.tools.registry import Tool, load_tools, tool
from dataflow.tools.toolbox import Toolbox, toolbox_of

__all__ = ["Tool", "ToolCall", "Toolbox", "load_tools", "tool", "toolbox_of"]
