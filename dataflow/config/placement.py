"""Placement: whether the rollout engine and the trainer take turns on the same GPUs or have their own.

The graph stays the same; only its resources differ. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

from dataflow.errors import PipelineError
from dataflow.graph import Pipeline
from dataflow.timeline.spans import POOLS

Placement: TypeAlias = Literal["colocated", "disaggregated"]
SHARED, ENGINE, TRAINER = POOLS


def placed(pipeline: Pipeline, placement: Placement) -> Pipeline:
    """Returns the same stages on the GPU pools of a placement.

    The stages on the engine's pool are those that read or write the weights that the rollout samples from. A pipeline
    without a stage that samples from weights of an earlier step, or without stages on GPUs, is a PipelineError.
    """
    weights = {read.field for s in pipeline.stages if s.streams for read in s.reads if read.lag == "carried"}
    if not weights or not any(s.on in POOLS for s in pipeline.stages):
        raise PipelineError(
            f"placement={placement}: the pipeline has no rollout on GPUs that reads its weights as Carried, so there "
            "is nothing to place."
        )
    of_engine = {
        s.name
        for s in pipeline.stages
        # A checkpoint reads all states, and is of the trainer.
        if s.role != "saves" and weights.intersection([*s.writes, *(read.field for read in s.reads)])
    }
    pools = (SHARED, SHARED) if placement == "colocated" else (TRAINER, ENGINE)
    stages = [replace(s, on=pools[s.name in of_engine]) if s.on in POOLS else s for s in pipeline.stages]
    others = {name: slots for name, slots in pipeline.resources.items() if name not in POOLS}
    return Pipeline(stages, pipeline.inputs, {**dict.fromkeys(pools, 1), **others})
