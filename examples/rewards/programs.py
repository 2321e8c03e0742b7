"""Scores programs on test cases, in the sandbox of this machine: python examples/rewards/programs.py."""

from __future__ import annotations

import asyncio

from dataflow.batch import Batch
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.sandbox.manager import Sandbox

CASES = {"inputs": ["1 2\n", "10 -3\n"], "outputs": ["3", "7"]}
RESPONSES = [
    "```python\nprint(sum(map(int, input().split())))\n```",
    "```python\nprint(3)\n```",
    "```python\nwhile True: pass\n```",
    "Add them.",
]


async def main() -> None:
    """Prints the score of each response, and why it is that."""
    agent = RewardAgent(Sandbox(timeout=5.0))
    count = len(RESPONSES)
    columns = {"data_source": ["sums"] * count, "response_text": RESPONSES, "ground_truth": [CASES] * count}
    agent.submit(1, Batch([0] * count, columns))
    rewards = await agent.collect(1)
    await agent.close()
    for score, passed, cases, status in zip(
        *(rewards[name] for name in ("score", "passed", "cases", "status")), strict=True
    ):
        print(f"{score:.1f} {passed} of {cases}: {status}")


if __name__ == "__main__":
    asyncio.run(main())
