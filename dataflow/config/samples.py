"""The configuration of the samples that a run keeps to be read."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from dataflow.config.section import Section


class SamplesConfig(Section):
    """Prompts, responses and scores, saved in the run's directory (dataflow samples)."""

    every: NonNegativeInt = 1
    """Steps from one that is kept to the next; 0 keeps none, those of evaluations included."""
    most: PositiveInt | None = 2048
    """Samples kept of a step, at most: whole groups, the lowest ids first; null keeps all."""
