"""Sections ``samples`` and ``profile``: what a run keeps of some of its steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from dataflow.config.section import Section

Steps = Annotated[list[PositiveInt], BeforeValidator(lambda v: [v] if type(v) is int else v)]


class SamplesConfig(Section):
    """Prompts, responses and scores, saved in the run's directory (dataflow samples)."""

    every: NonNegativeInt = 1
    """Steps from one that is kept to the next; 0 keeps none, those of evaluations included."""
    most: PositiveInt | None = 2048
    """Samples kept of a step, at most: whole groups, the lowest ids first; null keeps all."""


class ProfileConfig(Section):
    """Profiles by torch.profiler."""

    steps: Steps = Field(default=[])
    """Steps, as [3,4], whose tasks of trainer, critic and transformers engine are profiled, into runs/NAME/profile."""
