"""The reward stages: send responses off, take whole groups back as they are scored, score a validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dataflow.graph import stage
from dataflow.reward_agent import latency_summary

if TYPE_CHECKING:
    from dataflow.batch import Batch
    from dataflow.graph import TaskInfo
    from dataflow.reward_agent import RewardAgent, Ticket


@stage(writes="reward_ticket", on="controller", per_emission=True)
async def reward_request(responses: Batch, *, agent: RewardAgent, task: TaskInfo) -> Ticket:
    """Hands the responses to the agent and returns at once; the calls go on behind it."""
    return agent.submit(task.step, responses)


@stage(writes="rewards", on="reward", forms_parts=True)
async def reward_collect(reward_ticket: Ticket, *, agent: RewardAgent, task: TaskInfo) -> Batch:
    """Waits for the next groups of the step: their ids make up the part.

    Logs ``reward/latency_*`` and ``reward/scored`` over the whole step with its last part, since a step's
    metrics are averaged over its parts, and percentiles do not average.
    """
    rewards = await agent.collect(reward_ticket.step, task.take, order=task.order)
    _mark(rewards, task)
    if task.last:
        latency_s = rewards.meta["step_latency_s"]
        task.log({f"reward/latency_{name}": value for name, value in latency_summary(latency_s).items()})
        task.log({"reward/scored": float(len(latency_s))})
    return _bare(rewards)


@stage(writes="val_scores", on="reward")
async def val_score(val_responses: Batch, *, agent: RewardAgent, task: TaskInfo) -> Batch:
    """Scores the validation responses, behind every waiting training request.

    Logs verl's ``val-core/<data_source>/reward/mean@<n>``, n the responses of a prompt.
    """
    step = f"val:{task.step}"
    agent.submit(step, val_responses)
    scores = await agent.collect(step, order="index")
    _mark(scores, task, validation=True)
    # The scores come back by group id, whatever the order the responses stood in.
    sources = val_responses.select(scores.ids)["data_source"]
    n = len(scores) // len(scores.ids)
    by_source: dict[str, list[float]] = {}
    for source, score in zip(sources, scores["score"].tolist(), strict=True):
        by_source.setdefault(str(source), []).append(score)
    task.log({f"val-core/{source}/reward/mean@{n}": sum(got) / len(got) for source, got in sorted(by_source.items())})
    return scores


def _bare(rewards: Batch) -> Batch:
    """Returns the columns alone: what is marked need not travel on in the meta of every later batch."""
    from dataflow.batch import Batch

    return Batch(rewards.groups, rewards.columns)


def _mark(rewards: Batch, task: TaskInfo, **facts: Any) -> None:
    for record in rewards.meta["records"]:
        task.mark("reward", **record, step=task.step, **facts)
