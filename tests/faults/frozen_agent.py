"""A program with an agent that scores two groups of two, of which the second sample of the first freezes it.

Run as ``python frozen_agent.py FUNCTION DIRECTORY AFTER_S``; prints ``scoring`` when the bad sample's call has begun,
and at the end the scores.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
import sys
import time
from pathlib import Path
from typing import Any

from dataflow.batch import Batch
from dataflow.config.reward import RewardConfig
from dataflow.running.agent import build_agent


def begin() -> None:
    print("scoring", flush=True)


def backtrack() -> None:
    begin()
    re.match("(a+)+$", "a" * 60 + "b")


def sleep_in_c() -> None:
    begin()
    ctypes.PyDLL(None).sleep(1000)


def is_bad(extra_info: Any) -> bool:
    return bool(extra_info["bad"])


def spins(ground_truth: str, extra_info: Any, **_: Any) -> float:
    if is_bad(extra_info):
        backtrack()
    return float(ground_truth)


def sleeps(ground_truth: str, extra_info: Any, **_: Any) -> float:
    if is_bad(extra_info):
        time.sleep(0.3)  # until the others are in their calls, too
        sleep_in_c()
    time.sleep(0.6)
    return float(ground_truth)


async def spins_on_the_loop(ground_truth: str, extra_info: Any, **_: Any) -> float:
    await asyncio.sleep(0.01)
    if is_bad(extra_info):
        backtrack()
    return float(ground_truth)


async def spins_in_a_task(**keywords: Any) -> float:
    return await asyncio.create_task(spins_on_the_loop(**keywords))


async def blocks_the_loop(ground_truth: str, extra_info: Any, **_: Any) -> float:
    await asyncio.sleep(0.01)
    if is_bad(extra_info):
        begin()
        time.sleep(1000)
    return float(ground_truth)


class FreezesAGroup:
    def compute_score(self, ground_truth: str, **_: Any) -> float:
        return float(ground_truth)

    def post_process_scores(self, scores: list[float]) -> list[float]:
        if scores[0] == 0.0:
            backtrack()
        return scores


async def main(function: str, directory: str, after_s: float) -> None:
    custom = {"path": __file__, "name": function}
    options = RewardConfig(frozen_after=after_s, on_failure="drop_sample", max_failed_share=1)
    agent = build_agent(custom, {}, options, ledger=str(Path(directory) / "rewards.sqlite"))
    rows = {
        "data_source": ["d"] * 4,
        "response_text": [f"response {row}" for row in range(4)],
        "ground_truth": [str(row) for row in range(4)],
        "extra_info": [{"bad": row == 1} for row in range(4)],
    }
    agent.submit(1, Batch([0, 0, 1, 1], rows))
    try:
        rewards = await agent.collect(1)
        print("kept", rewards["kept"].tolist(), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    await agent.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
