"""The reward stages: send responses off, take whole groups back as they are scored, score a validation."""

from __future__ import annotations

import math
from typing import Any

from dataflow.batch import Batch
from dataflow.graph import TaskInfo, stage
from dataflow.reward_agent import RewardAgent, Ticket

_NOW = ("running", "waiting", "abandoned")
"""What of the agent's stats is logged with each step, as it stands then."""


@stage(writes="reward_ticket", on="controller", role="requests", per_chunk=True, replays=True)
async def reward_request(responses: Batch, *, agent: RewardAgent, extra_groups: int = 0, task: TaskInfo) -> Ticket:
    """Hands the responses to the agent and returns at once; the calls go on behind it. Where the rollout streams, they
    come in chunks.

    ``extra_groups`` of the groups replace failed ones; that many fewer are collected.
    """
    task.note(requests=len(responses))
    return agent.submit(task.step, responses, extra_groups=extra_groups, more=task.parts > 1)


@stage(writes="rewards", on="reward", role="collects")
async def reward_collect(reward_ticket: Ticket, *, agent: RewardAgent, task: TaskInfo) -> Batch:
    """Waits for the next groups of the step: their ids make up the part.

    With the step's last groups it logs, over the whole step since percentiles do not average, ``reward/latency_*`` and
    how many samples were ``reward/requested``, ``scored``, ``failed``, ``retried``, ``hedged`` and ``cached``; what the
    agent used since the step before, ``reward/tokens`` and the like; and as they stand then ``reward/running``,
    ``waiting``, ``abandoned`` and ``limit``.
    """
    rewards = await agent.collect(reward_ticket.step, task.take, order=task.order, last=task.last)
    _mark(rewards, task)
    if "step" in rewards.meta:
        task.log({f"reward/{name}": value for name, value in rewards.meta["step"].items()})
        stats = agent.stats()
        task.log({f"reward/{name}": float(stats[name]) for name in _NOW if name in stats})
        task.log({f"reward/{name}": value for name, value in agent.used(stats).items()})
        task.log({f"reward/limit{'/' + name if name else ''}": float(n) for name, n in stats["limit"].items()})
    return _bare(rewards)


@stage(writes="val_scores", on="reward", role="validates")
async def val_score(val_responses: Batch, *, agent: RewardAgent, task: TaskInfo) -> Batch:
    """Scores the validation responses, behind every waiting training request.

    Logs verl's ``val-core/<data_source>/reward/mean@<n>``, n the responses of a prompt; samples that the failure rule
    leaves out are in no mean, and are counted as ``val-aux/failed``.
    """
    step = f"val:{task.step}"
    task.note(requests=len(val_responses))
    agent.submit(step, val_responses)
    scores = await agent.collect(step, order="index")
    _mark(scores, task, validation=True)
    # The scores come back by group id, whatever the order the responses stood in.
    sources = val_responses.select(scores.ids)["data_source"]
    n = len(scores) // len(scores.ids)
    by_source: dict[str, list[float]] = {}
    for source, score in zip(sources, scores["score"].tolist(), strict=True):
        by_source.setdefault(str(source), []).append(score)
    kept = {source: [score for score in got if not math.isnan(score)] for source, got in sorted(by_source.items())}
    task.log({f"val-core/{source}/reward/mean@{n}": sum(got) / len(got) for source, got in kept.items() if got})
    if failed := scores.meta["step"]["failed"]:
        task.log({"val-aux/failed": failed})
    return scores


def _bare(rewards: Batch) -> Batch:
    """Returns the columns alone: what is marked need not travel on in the meta of every later batch."""
    return Batch(rewards.groups, rewards.columns)


def _mark(rewards: Batch, task: TaskInfo, **facts: Any) -> None:
    for record in rewards.meta["records"] + rewards.meta["replaced"]:
        task.mark("reward", **record, step=task.step, **facts)
    for at, endpoint, limit in rewards.meta["limits"]:
        task.level("reward limit" + (f" {endpoint}" if endpoint else ""), at, limit)
