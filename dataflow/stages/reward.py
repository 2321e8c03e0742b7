"""The reward stages: submit responses, collect whole groups as they are scored, score greedy and held-out ones."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from dataflow.batch import Batch
from dataflow.graph import Hosted, Stage, TaskInfo, stage
from dataflow.reward_agent import BESIDE, MAIN, GroupFilter, RewardAgent, Ticket, metric
from dataflow.stages.validate import accuracies, mean_scores

_NOW = ("running", "waiting", "abandoned", "limit")
"""The agent's stats whose current values are logged with each step."""


def awake(sleeper: Any) -> AbstractAsyncContextManager[None]:
    """Returns a context in which a reward model on the GPUs of trainer and engine is awake.

    ``sleeper`` is a :class:`dataflow.rewards.models.server.Sleeper`; None if there is no such model.
    """
    return nullcontext() if sleeper is None else sleeper.awake()


@stage(writes="reward_ticket", on="controller", role="requests", per_chunk=True, replays=True)
async def reward_request(
    responses: Batch,
    *,
    agent: RewardAgent,
    extra_groups: int = 0,
    group_filter: GroupFilter | None = None,
    sleeper: Any = None,
    task: TaskInfo,
) -> Ticket:
    """Submits the responses to the agent and returns at once; a streaming rollout calls it with each chunk.

    ``extra_groups`` of the groups take the place of failed ones and of those that ``group_filter`` leaves out: that
    many fewer are collected, and what is not needed of them is cancelled. With a ``sleeper``, whose reward model is
    awake only meanwhile, it returns when all requests have ended.
    """
    task.note(requests=len(responses))
    more = task.parts > 1
    async with awake(sleeper):
        ticket = agent.submit(task.step, responses, extra_groups=extra_groups, more=more, group_filter=group_filter)
        if sleeper is not None:
            await agent.settled(task.step)
    return ticket


@stage(writes="rewards", on="reward", role="collects")
async def reward_collect(reward_ticket: Ticket, *, agent: RewardAgent, task: TaskInfo) -> Batch:
    """Waits for the next scored groups of the step, which form the part, or for those of a part formed by another.

    Columns beside those of the agent: ``request_begin`` and ``request_end``, float64 ``[rows]``, unix time in seconds;
    ``request_tries``, int64 ``[rows]``; ``request_failed_tries``, why its calls failed and the wait
    after each, or None; ``request_how`` it ended, if not with a score from a call of its own, or None.

    With the step's last groups it logs, for the whole step (percentiles of parts cannot be averaged),
    ``reward/latency_*`` and the numbers of samples ``reward/requested``, ``scored``, ``failed``, ``retried``,
    ``hedged`` and ``cached``; with a filter ``filtered_groups``, those left out, and ``equal_groups``, those collected
    for want of others, which train nothing; the agent's usage since the last step, such as ``reward/tokens`` and
    what the user's ``usage`` names; and the current values of ``reward/running``, ``waiting``, ``abandoned`` and
    ``limit``. Another agent than ``reward`` logs them as ``reward/NAME/...``.
    """
    rewards = await agent.collect(reward_ticket.step, task.take, order=task.order, last=task.last, groups=task.groups)
    mark_requests(rewards, agent.name, task)
    if "step" in rewards.meta:
        stats = agent.stats()
        found = {
            **agent.used(stats),  # first, as the user names some of these
            **rewards.meta["step"],
            **{name: float(stats[name]) for name in _NOW if name in stats},
        }
        task.log({metric(agent.name, name): value for name, value in found.items()})
    # Without meta: the marks are in the trace, and later batches need not carry them.
    return Batch(rewards.groups, {**rewards.columns, **_requests(rewards).columns})


def rewards_field(agent: str) -> str:
    """Returns the field with an agent's rewards.

    >>> rewards_field("reward"), rewards_field("style")
    ('rewards', 'style_rewards')
    """
    return "rewards" if agent == MAIN else f"{agent}_rewards"


def agent_stages(agent: Hosted, **options: Any) -> tuple[Stage, Stage]:
    """Returns the stages that request and that collect the rewards of one of several agents.

    They are named after the agent, as their fields are, and the rewards are collected on a resource of its name, so
    that it has a row of its own on the timeline: ``style_request``, ``style_collect`` on ``style``, ``style_rewards``.

    Args:
        agent: the hosted agent; ``reward`` has the stages :func:`reward_request` and :func:`reward_collect`.
        options: of :func:`reward_request`; ``extra_groups`` and ``group_filter`` are for the agent whose groups form
            the parts of a step, the first one listed.
    """
    name = agent.name
    renamed = {"reward_ticket": f"{name}_ticket", "rewards": rewards_field(name)}
    request = reward_request.bind(name=f"{name}_request", renamed=renamed, agent=agent, **options)
    return request, reward_collect.bind(name=f"{name}_collect", on=name, renamed=renamed, agent=agent)


@stage(writes="reward_baselines", on="reward")
async def greedy_score(greedy_responses: Batch, *, agent: RewardAgent, task: TaskInfo) -> Batch:
    """Scores the greedy responses of a step (ReMax's baselines), with the priority of its other requests.

    It logs ``reward/baseline``, the mean of the scores.

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


@stage(writes="val_scores", on="reward", role="validates")
async def val_score(val_responses: Batch, *, agent: RewardAgent, sleeper: Any = None, task: TaskInfo) -> Batch:
    """Scores the validation responses; queued training requests go first.

    Logs verl's ``val-core/<data_source>/reward/mean@<n>``, where n is the number of responses per prompt; with ``acc``
    instead of ``reward`` if the rewards have that column. Samples that the failure rule drops are left out of the means
    and counted as ``val-aux/failed``.
    """
    step = f"val:{task.step}"
    task.note(requests=len(val_responses))
    async with awake(sleeper):
        agent.submit(step, val_responses)
        scores = await agent.collect(step, order="index")
    mark_requests(scores, agent.name, task, validation=True)
    scores = scores.merge(_requests(scores))
    # The scores come back in the order of group ids, which may not be that of the responses.
    name, numbers = accuracies(scores)
    task.log(mean_scores(val_responses.select(scores.ids), numbers, name))
    if failed := scores.meta["step"]["failed"]:
        task.log({"val-aux/failed": failed})
    return scores


def _requests(rewards: Batch) -> Batch:
    """Returns how the request of each row went: its times by ``clock.now()``, its tries, and what else ended it."""
    import torch

    records = rewards.meta["records"]
    return rewards.like(
        request_begin=torch.tensor([record["begin"] for record in records], dtype=torch.float64),
        request_end=torch.tensor([record["end"] for record in records], dtype=torch.float64),
        request_tries=torch.tensor([record.get("tries", 1) for record in records], dtype=torch.int64),
        request_failed_tries=[record.get("failed_tries") for record in records],
        request_how=[record.get("how") for record in records],
    )


def mark_requests(rewards: Batch, agent: str, task: TaskInfo, **facts: Any) -> None:
    """Records the requests of collected rewards in the trace, with facts of each, and how the agent's limit varied."""
    for record in rewards.meta["records"] + rewards.meta["replaced"]:
        task.mark("reward", **record, step=task.step, **facts)
    for at, limit in rewards.meta["limits"]:
        task.level(f"{agent} limit", at, limit)
