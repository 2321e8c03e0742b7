"""GRPO on GSM8K (or on generated problems of its form) with a calculator: each response is a conversation.

All stages are those of pipelines/gsm8k_grpo.py; since tools are offered, its rollout is a conversation.

dataflow run examples/tools/calculator.py policy=both+stream
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.config.tools import ToolsConfig

BASE = load_pipeline_file(Path(__file__).parents[2] / "pipelines" / "gsm8k_grpo.py")
pipeline = BASE.pipeline


class Config(BASE.Config):  # type: ignore[name-defined,misc]
    """The options of the pipeline, with the calculator as a tool."""

    tools: ToolsConfig = Field(default_factory=lambda: ToolsConfig(names=["calculator"], max_response_tokens=96))
