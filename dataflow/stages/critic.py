"""The critic: what it expects each response to return, before the step's updates, and its own update."""

from __future__ import annotations

from typing import Any

from dataflow.batch import Batch
from dataflow.engines.base import Critic
from dataflow.graph import Latest, TaskInfo, stage
from dataflow.stages.update import TrainedGroups


@stage(writes="values", on="gpu")
def values(responses: Batch, critic: Latest, *, value_model: Critic) -> Batch:
    """Returns ``values`` float32 ``[rows, R]``: the return expected before each token.

    It needs no rewards, so it runs while they are awaited. ``critic`` is read from the previous step, whatever the
    staleness: advantages and clipping start from the values of the critic that this step trains.
    """
    return value_model.values(responses)


@stage(writes="critic", on="gpu", role="trains", per_mini_batch=True)
def critic_update(
    responses: Batch,
    values: Batch,
    advantages: Batch,
    critic: Latest,
    *,
    value_model: Critic,
    groups: int,
    max_skipped: int = 10,
    task: TaskInfo,
) -> TrainedGroups:
    """Takes one optimizer step of the critic on the mini-batch's whole groups; returns the step's record of groups.

    Args:
        responses: columns of a rollout.
        values: what the critic expected before the step's updates.
        advantages: with ``returns``; a ``response_mask`` in them replaces that of the responses.
        critic: the record so far; None for the initial weights.
        value_model: holds the weights.
        groups: prompt groups in a step.
        max_skipped: updates that may be skipped in a row before the run ends.
        task: takes the critic's metrics, and ``critic/skipped_updates`` of the step.

    Raises:
        RunError: a group is trained twice in a step or not at all, or too many updates were skipped.
    """
    batch = responses.merge(values, advantages)
    record: Any = critic
    trained = (record or TrainedGroups()).then(task, batch, groups)
    return trained.after(value_model.update(batch, last=task.last), batch, task, "critic", max_skipped)
