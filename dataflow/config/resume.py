"""The configuration of going on with an earlier run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from dataflow.config.section import Section, Text

Keys = Annotated[list[Text], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class ResumeConfig(Section):
    """Going on from the last checkpoint of the run of the same name."""

    shorthand = "mode"

    mode: Literal["never", "auto"] = "never"
    """auto goes on if runs/NAME exists, from its last whole checkpoint, or without one from the beginning with its
    ledger; never says that it exists."""
    allow: Keys = Field(default=[])
    """Keys that may differ from those of the run although they change what it trains on, such as policy."""
