"""Rewards, from the agent to the advantages: in the published agent they land on the wrong token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.reward_agent import Limits, RewardAgent
from tests.faults.rig.samples import run, samples, score_of

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]


def test_a_reward_stands_on_the_last_token_of_its_own_response() -> None:
    import torch

    from dataflow.graph import TaskInfo
    from dataflow.stages.advantage import advantage

    n, groups, width = 2, 6, 9

    async def body() -> Batch:
        async def last_come_first(
            data_source: str, solution_str: str, ground_truth: str, extra_info: Any
        ) -> dict[str, float]:
            await asyncio.sleep(0.01 * (groups - extra_info["at"][1]))
            return {"score": float(ground_truth), "length": extra_info["response_length"]}

        agent = RewardAgent(last_come_first, limits=Limits(64))
        agent.submit(1, responses)
        parts = [await agent.collect(1, 2) for _ in range(3)]
        assert sorted(group for part in parts for group in part.ids) == list(range(groups))
        await agent.close()
        return Batch.concat(parts)

    rows = samples(1, range(groups), n)
    lengths = torch.tensor([1 + (5 * row) % width for row in range(n * groups)])
    mask = (torch.arange(width) < lengths[:, None]).long()
    responses = Batch(
        rows.groups,
        {
            **rows.columns,
            "prompts": torch.ones(len(rows), 2, dtype=torch.long),
            "responses": mask,
            "response_mask": mask,
            "attention_mask": torch.cat([torch.ones(len(rows), 2, dtype=torch.long), mask], dim=1),
        },
    )
    rewards = run(body())
    mine = responses.select(rewards.ids)
    assert rewards["length"].tolist() == mine["response_mask"].sum(dim=-1).tolist()
    options = AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    found = advantage(mine, rewards, algorithm=options, task=TaskInfo(step=1))
    for row, (group, score) in enumerate(zip(rewards.groups.tolist(), rewards["score"].tolist(), strict=True)):
        baseline = sum(score_of(1, group, i) for i in range(n)) / n
        length = int(mine["response_mask"][row].sum())
        assert found["advantages"][row].tolist() == [score - baseline] * length + [0.0] * (width - length)
