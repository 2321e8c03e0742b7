"""Values: what the critic expects each response to return, before the step's updates."""

from __future__ import annotations

from dataflow.batch import Batch
from dataflow.engines.base import Critic
from dataflow.graph import Latest, stage


@stage(writes="values", on="gpu")
def values(responses: Batch, critic: Latest, *, value_model: Critic) -> Batch:
    """Returns ``values`` float32 ``[rows, R]``: the return expected before each token.

    It needs no rewards, so it runs while they are awaited. ``critic`` is read from the previous step, whatever the
    staleness: advantages and clipping start from the values of the critic that this step trains.
    """
    return value_model.values(responses)
