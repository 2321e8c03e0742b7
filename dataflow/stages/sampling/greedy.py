"""Greedy baselines: one response a prompt at temperature 0, scored beside those that are trained on (ReMax).

prompts -> rollout        -> responses        -> reward_request -> reward_collect -> rewards ---------> advantage
   +-----> greedy_rollout -> greedy_responses -> greedy_score -> reward_baselines ------------------------^
"""

from __future__ import annotations

from dataflow.batch import Batch
from dataflow.graph import TaskInfo, stage
from dataflow.reward_agent import BESIDE, RewardAgent
from dataflow.stages.reward import mark_requests


@stage(writes="reward_baselines", on="reward")
async def greedy_score(greedy_responses: Batch, *, agent: RewardAgent, task: TaskInfo) -> Batch:
    """Scores the greedy responses of a step, with the priority of its other requests.

    Args:
        greedy_responses: one a prompt.
        agent: scores them.
        task: takes ``reward/baseline``, the mean of the scores.

    Returns:
        A row for each group: ``reward_baselines`` float32, and under a failure rule that drops samples
        ``baseline_kept``, bool.
    """
    step = f"{BESIDE}{task.step}"
    task.note(requests=len(greedy_responses))
    agent.submit(step, greedy_responses)
    scores = await agent.collect(step, order="index")
    mark_requests(scores, agent.name, task, greedy=True)
    kept = scores.columns.get("kept")
    if kept is None:
        task.log({"reward/baseline": float(scores["score"].mean())})
        return Batch(scores.groups, {"reward_baselines": scores["score"]})
    if kept.any():
        task.log({"reward/baseline": float(scores["score"][kept].mean())})
    baselines = scores["score"].masked_fill(~kept, 0.0)  # NaN otherwise
    return Batch(scores.groups, {"reward_baselines": baselines, "baseline_kept": kept})
