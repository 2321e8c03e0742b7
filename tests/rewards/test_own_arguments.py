"""User code gets its own copies: no other sample, try, manager or caller sees its changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.functions import build_reward
from dataflow.rewards.managers import build_manager

pytestmark = pytest.mark.timeout(60)


def one_chat(rows: int = 4) -> Batch:
    """Samples of one group, all with the same objects, as a caller may well make them."""
    chat, facts = [{"role": "user", "content": "2 + 2?"}], {"tags": ["easy"], "nested": {"seen": [0]}}
    return Batch(
        [0] * rows,
        {
            "response_text": [f"it is {row}" for row in range(rows)],
            "data_source": ["d"] * rows,
            "ground_truth": [["4"]] * rows,
            "extra_info": [facts] * rows,
            "raw_prompt": [chat] * rows,
        },
    )


def spoil(ground_truth: Any, extra_info: Any) -> list[int]:
    """Returns the lengths of its arguments, then appends to all of them, as code that builds a chat does."""
    found = [extra_info["raw_prompt"], extra_info["tags"], extra_info["nested"]["seen"], ground_truth]
    sizes = [len(each) for each in found]
    for each in found:
        each.append({"role": "assistant", "content": "spoilt"})
    extra_info["raw_prompt"][0]["content"] += " spoilt"
    extra_info.clear()
    return sizes


CLEAN = [1, 1, 1, 1]


async def later(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, Any]:
    return {"score": 1.0, "sizes": spoil(ground_truth, extra_info)}


def at_once(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, Any]:
    return {"score": 1.0, "sizes": spoil(ground_truth, extra_info)}


def rewards_of(agent: RewardAgent, samples: Batch) -> Batch:
    async def body() -> Batch:
        agent.submit(1, samples)
        rewards = await agent.collect(1)
        await agent.close()
        return rewards

    return asyncio.run(body())


@pytest.mark.parametrize("reward", [later, at_once, build_manager("naive", at_once)], ids=["async", "sync", "manager"])
def test_samples_of_a_group_and_their_caller(reward: Any) -> None:
    samples = one_chat()
    rewards = rewards_of(RewardAgent(reward, share_equal=True), samples)
    assert rewards["sizes"].tolist() == [CLEAN] * 4
    for name, value in one_chat().columns.items():
        assert list(samples[name]) == list(value)


def test_columns_of_requests_that_shared_a_call() -> None:
    samples = one_chat()
    samples = samples.merge(samples.like(response_text=["the same"] * 4))
    agent = RewardAgent(later, share_equal=True)
    rewards = rewards_of(agent, samples)
    assert agent.steps.counts["shared"] == 3
    rewards["sizes"][0].append("spoilt")
    assert rewards["sizes"].tolist()[1:] == [CLEAN] * 3


async def pops(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, weights: list[int]) -> Any:
    return {"score": 1.0, "weight": weights.pop()}


class Pops:
    def __init__(self, weights: list[int]) -> None:
        weights.pop()

    async def compute_score(self, **_arguments: Any) -> float:
        return 1.0


def test_configured_keywords_are_those_of_each_call() -> None:
    given = {"weights": [1, 2, 3, 4, 5]}
    rewards = rewards_of(RewardAgent(build_reward(pops, given)), one_chat())
    assert rewards["weight"].tolist() == [5] * 4
    build_reward(Pops, given)
    assert given == {"weights": [1, 2, 3, 4, 5]}
