"""Compares the responses of a group with each other: the score is the share of comparisons that a response wins.

A model behind the run's router judges each pair, in both orders, since judges prefer what they read first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from dataflow.batch import Batch
from dataflow.reward_agent import Limits, RewardAgent
from dataflow.rewards.judge.judge import Judge

PROMPT = """<question>
{question}
</question>
{response}
Which response is better? Reply with one line: 'Score: 1' for the first, 'Score: 0' for the second, 'Score: 0.5' if \
neither is."""


class BestOf:
    """Asks the reward model ``model``; an agent of its own retries, and limits the comparisons in flight."""

    def __init__(self, reward_router_address: str, model: str = "judge", in_flight: int = 64) -> None:
        judge = Judge(f"http://{reward_router_address}", model=model, template=PROMPT)
        self._comparisons = RewardAgent(judge, limits=Limits(in_flight))
        self._numbers = itertools.count()

    def compute_score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> float:
        """Returns a score that compute_group replaces; what can be said of one response alone belongs here."""
        return 0.0

    async def compute_group(self, samples: Sequence[dict[str, Any]], scores: Sequence[float]) -> list[float]:
        """Returns the share of its comparisons that each response wins."""
        texts = [sample["solution_str"] for sample in samples]
        pairs = list(itertools.permutations(range(len(texts)), 2))
        if not pairs:
            return [0.5] * len(texts)
        columns = {
            "response_text": [f"<first>\n{texts[a]}\n</first>\n<second>\n{texts[b]}\n</second>" for a, b in pairs],
            "data_source": [samples[a]["data_source"] for a, _ in pairs],
            "ground_truth": [samples[a]["ground_truth"] for a, _ in pairs],
            "extra_info": [samples[a]["extra_info"] for a, _ in pairs],
        }
        number = next(self._numbers)
        self._comparisons.submit(number, Batch([0] * len(pairs), columns))
        rewards = await self._comparisons.collect(number)
        wins = [0.0] * len(texts)
        for (a, b), first in zip(pairs, rewards["score"].tolist(), strict=True):
            wins[a] += first
            wins[b] += 1.0 - first
        return [won / (2 * (len(texts) - 1)) for won in wins]

    async def close(self) -> None:
        """Called at the end of the run."""
        await self._comparisons.close()
