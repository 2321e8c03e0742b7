"""What the reward class counts beside the agent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.reward_agent import RewardAgent


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
