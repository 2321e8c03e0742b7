"""Greedy baselines: their scores, their priority, and the stages that a pipeline gets for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.config.run import RunConfig, parse_overrides
from dataflow.graph import TaskInfo
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.running.sampling import greedy_stages, rollout_stages
from dataflow.stages.reward import greedy_score

pytestmark = pytest.mark.timeout(60)


def responses(groups: list[int], n: int = 1) -> Batch:
    rows = [group for group in groups for _ in range(n)]
    return Batch(
        rows,
        {
            "response_text": [f"answer {at}" for at in range(len(rows))],
            "data_source": ["math"] * len(rows),
            "ground_truth": [str(group) for group in rows],
            "extra_info": [{}] * len(rows),
        },
    )


def test_the_score_of_a_group_s_greedy_response_is_its_baseline() -> None:
    async def score(ground_truth: str, **_: Any) -> float:
        return float(ground_truth) / 2

    async def body() -> None:
        agent, task = RewardAgent(score), TaskInfo(step=3)
        found = await greedy_score(responses([4, 1, 2]), agent=agent, task=task)
        assert (found.ids, found["reward_baselines"].tolist()) == ((1, 2, 4), [0.5, 1.0, 2.0])
        assert found.names == ("reward_baselines",)
        assert task.metrics == {"reward/baseline": pytest.approx(7 / 6)}
        assert task.facts == {"requests": 3}
        assert [(m["name"], m["step"], m["group"], m["greedy"]) for m in task.marks] == [
            ("reward", 3, 1, True), ("reward", 3, 2, True), ("reward", 3, 4, True)
        ]  # fmt: skip

    asyncio.run(body())


def test_a_failed_one_is_marked_and_leaves_the_mean() -> None:
    async def score(ground_truth: str, **_: Any) -> float:
        if ground_truth == "1":
            raise ValueError("no answer")
        return 1.0

    async def body() -> None:
        agent, task = (
            RewardAgent(score, on_failure="drop_sample", max_failed_share=1.0, retry=Retry(tries=1)),
            TaskInfo(step=3),
        )
        found = await greedy_score(responses([1, 2]), agent=agent, task=task)
        assert found["baseline_kept"].tolist() == [False, True]
        assert found["reward_baselines"].tolist() == [0.0, 1.0]
        assert task.metrics == {"reward/baseline": 1.0}

    asyncio.run(body())


def test_baselines_are_scored_before_a_later_step_and_a_validation() -> None:
    seen: list[str] = []

    async def score(solution_str: str, ground_truth: str, **_: Any) -> float:
        seen.append(ground_truth)
        return 1.0

    async def body() -> None:
        agent = RewardAgent(score, limits=Limits(1))
        for step, group in (("val:1", 9), (2, 2), ("beside:1", 1), (1, 0)):
            agent.submit(step, responses([group]))
        await asyncio.gather(*(agent.collect(step) for step in (1, "beside:1", 2, "val:1")))

    asyncio.run(body())
    assert seen.index("1") < seen.index("2") < len(seen)
    assert seen.index("0") < seen.index("2")


def test_the_greedy_stage_reads_the_weights_of_the_responses() -> None:
    def stages(*args: str) -> list[Any]:
        config = parse_overrides(RunConfig, args)
        return greedy_stages(config, rollout_stages(config)[1], engine=None, agent=None, on="gpu")

    assert stages() == []
    greedy, scoring = stages("algorithm=remax", "engine.n=3", "engine.temperature=0.7", "engine.top_p=0.9")
    assert [(read.field, read.lag) for read in greedy.reads] == [("prompts", "none"), ("weights_version", "carried")]
    assert (greedy.writes, greedy.role, scoring.name) == (("greedy_responses",), None, "greedy_score")
    drawn = greedy.services["sampling"]
    assert (drawn.n, drawn.temperature, drawn.top_p) == (1, 0.0, 0.9)
