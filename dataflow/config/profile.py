"""Section ``profile``: which tasks torch.profiler records."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, PositiveInt

from dataflow.config.section import Section

Steps = Annotated[list[PositiveInt], BeforeValidator(lambda v: [v] if type(v) is int else v)]


class ProfileConfig(Section):
    """Profiles by torch.profiler."""

    steps: Steps = Field(default=[])
    """Steps, as [3,4], whose tasks of trainer, critic and transformers engine are profiled, into runs/NAME/profile."""
