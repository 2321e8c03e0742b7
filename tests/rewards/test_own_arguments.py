"""User code gets its own copies: no other sample, try, manager or caller sees its changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.functions import build_reward
from dataflow.rewards.managers import Manager, build_manager
from tests.rigs.virtual_time import run_virtual

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


class Slow:
    """Its second call fails while the first is running; all its methods change their arguments."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []
        self.calls = 0

    async def compute_score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
        sizes = spoil(ground_truth, extra_info)
        self.sizes.append(sizes)
        self.calls += 1
        if self.calls > 1:
            raise ConnectionError
        await asyncio.sleep(10.0)  # it is hedged
        return {"score": 1.0, "sizes": sizes}

    def endpoint(self, ground_truth: Any, extra_info: Any, **_rest: Any) -> str:
        self.sizes.append(spoil(ground_truth, extra_info))
        return "here"

    def tokens(self, ground_truth: Any, extra_info: Any, **_rest: Any) -> int:
        self.sizes.append(spoil(ground_truth, extra_info))
        return 1


async def rewarded(agent: RewardAgent, samples: Batch) -> Batch:
    agent.submit(1, samples)
    rewards = await agent.collect(1)
    await agent.close()
    return rewards


def rewards_of(agent: RewardAgent, samples: Batch) -> Batch:
    return asyncio.run(asyncio.wait_for(rewarded(agent, samples), 30))


def untouched(samples: Batch) -> bool:
    return all(
        (chat, facts, truth)
        == ([{"role": "user", "content": "2 + 2?"}], {"tags": ["easy"], "nested": {"seen": [0]}}, ["4"])
        for chat, facts, truth in zip(
            samples["raw_prompt"], samples["extra_info"], samples["ground_truth"], strict=True
        )
    )


@pytest.mark.parametrize("reward", [later, at_once, build_manager("naive", at_once)], ids=["async", "sync", "manager"])
def test_samples_of_a_group_and_their_caller(reward: Any) -> None:
    samples = one_chat()
    rewards = rewards_of(RewardAgent(reward, share_equal=True), samples)
    assert rewards["sizes"].tolist() == [CLEAN] * 4
    assert untouched(samples)


def test_tries_hedges_and_what_is_asked_in_passing() -> None:
    samples, reward = one_chat(1), Slow()
    limits = Limits(8, tpm=1e6, endpoints={"here": Limits(8)})
    retry = Retry(backoff_s=0.0, max_backoff_s=0.0)
    agent = RewardAgent(reward, limits=limits, retry=retry, hedge_after=2.0)
    rewards = run_virtual(lambda: rewarded(agent, samples))
    assert reward.sizes == [CLEAN] * len(reward.sizes)
    assert (reward.calls, len(reward.sizes)) == (2, 4), "a try and its hedge, endpoint and tokens"
    assert rewards["sizes"].tolist() == [CLEAN]
    assert untouched(samples)


class Counts(Manager):
    """Reads the arguments when the reward has spoilt them."""

    def finish(self, result: Any, arguments: Any) -> Any:
        return {**result, "after": spoil(arguments["ground_truth"], arguments["extra_info"])}


@pytest.mark.parametrize("reward", [later, at_once])
def test_a_manager_finds_the_arguments_as_they_were(reward: Any) -> None:
    rewards = rewards_of(RewardAgent(Counts(reward)), one_chat())
    assert rewards["sizes"].tolist() == rewards["after"].tolist() == [CLEAN] * 4


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
