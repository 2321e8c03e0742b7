"""Weight sync: one stage gathers the trainer's weights, another loads them into the rollout engine.

The first runs on all ranks of the trainer (``engines/verl/model.py:TrainedModel.weights``); Ray's store has its value.
The second runs in the engine's process (``engines/rollout.py:Rollout.sync``, then the engine's ``_load``).
"""

from __future__ import annotations

from typing import Any

from dataflow.engines.base import RolloutEngine, Trainer
from dataflow.graph import TaskInfo, stage


@stage(writes="actor_weights", on="gpu", role="syncs")
def gather_weights(actor: Any, *, trainer: Trainer) -> dict[str, Any]:
    """Returns the full weights on CPU by parameter name, gathered over the ranks, after the step's last update."""
    return trainer.weights()


@stage(writes="weights_version", on="gpu", role="syncs", replays=True)
async def sync_weights(actor_weights: dict[str, Any], *, engine: RolloutEngine, task: TaskInfo) -> int:
    """Loads the weights into the rollout engine; returns their version, the number of the step that made them."""
    await engine.sync(actor_weights, task.step)
    return task.step
