"""The agent's latencies: bounded in size, percentiles within the stated accuracy."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.latencies import ACCURACY, Latencies
from tests.rigs.memory import size_of


@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=200))
def test_percentiles_are_within_the_stated_accuracy(seconds: list[float]) -> None:
    latencies = Latencies()
    for each in seconds:
        latencies.append(each)
    summary = latencies.summary()
    for percent in (50, 95, 99):
        exact = float(np.percentile(seconds, percent, method="lower"))
        assert summary[f"p{percent}"] == pytest.approx(exact, rel=ACCURACY + 1e-9)
    assert summary["max"] == max(seconds)
    assert summary["mean"] == pytest.approx(np.mean(seconds))


def test_its_size_does_not_grow_with_the_number_of_rewards() -> None:
    latencies = Latencies()
    for seconds in np.random.default_rng(0).lognormal(0.0, 4.0, 100_000):
        latencies.append(float(seconds))
    for odd in (0.0, -1.0, 1e300, float("inf")):
        latencies.append(odd)
    assert len(latencies) == 100_004
    assert size_of([latencies]) < 2 * 1800, "a number of a bucket, and how many durations it holds"


def test_neither_the_agent_nor_its_stats_grow_with_the_number_of_rewards() -> None:
    """A run of millions of rewards asks once a second for them."""

    async def score(**_: Any) -> dict[str, Any]:
        return {"score": 1.0, "tokens": 3}

    async def body() -> None:
        agent = RewardAgent(score)
        sizes = []
        for step in range(1, 10):
            groups = [group for group in range(100 if step > 1 else 10) for _ in range(2)]
            columns = ("data_source", "ground_truth", "response_text")
            agent.submit(step, Batch(groups, {name: ["x"] * len(groups) for name in columns}))
            await agent.collect(step)
            stats = agent.stats()
            if step in (2, 9):
                sizes.append((size_of([vars(agent)]), size_of([stats])))
        assert stats["scored"] == 20 + 8 * 200
        assert stats["tokens"] == 3 * stats["scored"]
        assert sizes[1][0] - sizes[0][0] < 400, sizes  # a number kept of each reward would add 1,400
        assert sizes[1][1] - sizes[0][1] < 20, sizes
        await agent.close()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_no_latencies_have_no_summary() -> None:
    assert Latencies().summary() == {}


@pytest.mark.parametrize("own", [{"lookups": 5}, {"lookups": 5, "tokens": 1}, {"lookups": 5, "waiting": 9}])
def test_the_usage_of_a_reward_class_joins_what_the_agent_counts(own: dict[str, int]) -> None:
    class Reward:
        calls = 0

        def compute_score(self, **_: Any) -> dict[str, Any]:
            self.calls += 1
            return {"score": 1.0, "tokens": 3}

        def usage(self) -> dict[str, int]:
            return {name: number * self.calls for name, number in own.items()}

    async def body() -> None:
        agent = RewardAgent(Reward())
        columns = {name: ["x", "y"] for name in ("data_source", "ground_truth", "response_text")}
        for step in (1, 2):
            agent.submit(step, Batch([0, 1], columns))
            await agent.collect(step)
            stats = agent.stats()
            tokens = 2 * own.get("tokens", 3)
            assert (stats["tokens"], stats["lookups"]) == (step * tokens, step * 10)
            used = agent.used(stats)  # of this step
            assert {"tokens": tokens, "lookups": 10}.items() <= used.items()
            assert not used.keys() & {"requested", "scored", "waiting", "running", "latency_s", "limit"}
        await agent.close()

    asyncio.run(body())
