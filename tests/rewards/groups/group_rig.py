"""A scripted reward, and groups of it collected from an agent on a virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.errors import RewardFailed
from dataflow.reward_agent import Retry, RewardAgent
from tests.rigs.virtual_time import run_virtual

BROKEN = ValueError("broken")
NONE = float("nan")


class Reward:
    """Scores "group.sample" by a plan: a number, an exception, or a future that the test sets; else by its name."""

    def __init__(self, **plan: Any) -> None:
        self.plan = {name.strip("_").replace("_", "."): what for name, what in plan.items()}
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.posted: list[list[float]] = []

    async def compute_score(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        self.begun.append(solution_str)
        what = self.plan.get(solution_str, float(solution_str))
        if what == "never":
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.cancelled.append(solution_str)
                raise
        if isinstance(what, tuple) and what[0] == "after":
            await asyncio.sleep(what[1])
            what = what[2] if len(what) > 2 else float(solution_str)
        if isinstance(what, BaseException):
            raise what
        return what


def samples(groups: int, n: int = 2, first: int = 0) -> Batch:
    rows = [(g, i) for g in range(first, first + groups) for i in range(n)]
    return Batch(
        [g for g, _ in rows],
        {
            "response_text": [f"{g}.{i}" for g, i in rows],
            "data_source": ["d"] * len(rows),
            "ground_truth": ["t"] * len(rows),
        },
    )


def agent_of(reward: Any, rule: str = "fail", **options: Any) -> RewardAgent:
    retry = options.pop("retry", Retry(backoff_s=0.0, max_backoff_s=0.0))
    if post := options.pop("post_process_scores", None):
        reward.post_process_scores = post
    return RewardAgent(reward, on_failure=rule, retry=retry, **{"max_failed_share": 1.0, **options})


def scored(
    reward: Any, rule: str = "fail", groups: int = 3, step: int | str = 1, spare: int = 0, n: int = 2, **options: Any
) -> tuple[Batch, RewardAgent]:
    """Submits groups and collects them all."""

    async def body() -> tuple[Batch, RewardAgent]:
        agent = agent_of(reward, rule, **options)
        agent.submit(step, samples(groups, n), extra_groups=spare)
        rewards = await agent.collect(step)
        await agent.close()
        return rewards, agent

    return run_virtual(body)  # type: ignore[no-any-return]


def fails(reward: Any, rule: str = "fail", **options: Any) -> str:
    with pytest.raises(RewardFailed) as caught:
        scored(reward, rule, **options)
    return str(caught.value)


def numbers(rewards: Batch) -> list[Any]:
    return [pytest.approx(score, nan_ok=True) for score in rewards["score"].tolist()]
