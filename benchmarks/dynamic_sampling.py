"""Dynamic sampling: the first groups whose scores differ, against waiting for the rewards of all samples.

    python benchmarks/dynamic_sampling.py [--share 0.3] [--steps 3]

A step needs 64 groups of 8 responses whose scores differ, and samples 128. ``share`` of the groups have equal scores.
The judge takes as long as in a published run, 1 to 40 s, made 100 times shorter, with 64 requests in flight. Both ways
use the same reward agent and the same delays:

    all     waits for the rewards of all groups, and then leaves out those of equal scores
    first   collects the first 64 groups whose scores differ, and cancels the other requests

Prints a table and writes JSON; exits with 1 if ``first`` takes much more than it should: it needs 64 / (1 - share)
groups of 128, and the requests that are in flight when the last one of these arrives are paid for, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from _run import begin, table

from dataflow.batch import Batch
from dataflow.reward_agent import Limits, RewardAgent
from dataflow.rewards.steps import GroupFilter
from dataflow.system import clock

NEEDED, SAMPLED, RESPONSES, IN_FLIGHT, SHORTER = 64, 128, 8, 64, 100
SLACK = 1.15
"""Largest ratio of the measured shares to the ideal ones."""


class Judge:
    """Scores after a delay; the groups of ``equal`` get the same score for all of their samples."""

    def __init__(self, step: int, share: float) -> None:
        dice = random.Random(step)
        self.equal = set(dice.sample(range(SAMPLED), round(share * SAMPLED)))
        self.delays = [[dice.uniform(1, 40) / SHORTER for _ in range(RESPONSES)] for _ in range(SAMPLED)]
        self.asked = 0

    async def compute_score(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> float:
        group, sample = map(int, solution_str.split("."))
        self.asked += 1
        await asyncio.sleep(self.delays[group][sample])
        return 1.0 if group in self.equal else float(sample % 2)


def samples() -> Batch:
    rows = [(group, sample) for group in range(SAMPLED) for sample in range(RESPONSES)]
    return Batch(
        [group for group, _ in rows],
        {
            "response_text": [f"{group}.{sample}" for group, sample in rows],
            "data_source": ["d"] * len(rows),
            "ground_truth": ["t"] * len(rows),
        },
    )


async def measure(step: int, share: float, first: bool) -> tuple[float, int]:
    """Returns the seconds until a step has its groups, and the number of requests that the judge got."""
    judge = Judge(step, share)
    agent = RewardAgent(judge, limits=Limits(IN_FLIGHT))
    begin = clock.now()
    if first:
        agent.submit(step, samples(), extra_groups=SAMPLED - NEEDED, group_filter=GroupFilter(SAMPLED - NEEDED))
    else:
        agent.submit(step, samples())
    rewards = await agent.collect(step)
    scores = rewards["score"].view(-1, RESPONSES)
    differ = int((scores.min(dim=1).values != scores.max(dim=1).values).sum())
    taken = clock.now() - begin
    if differ < NEEDED:
        sys.exit(f"only {differ} of the {NEEDED} groups needed have scores that differ; give a smaller --share.")
    await agent.close()
    return taken, judge.asked


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.3, help="of groups whose scores are equal, 0 to 0.5")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("-o", dest="out", default="dynamic_sampling.json")
    options = parser.parse_args(arguments)
    if not 0 <= options.share <= 0.5:
        parser.error("--share: give 0 to 0.5, so that enough groups are left.")
    found: dict[str, list[tuple[float, int]]] = {"all": [], "first": []}
    for step in range(options.steps):
        for way, results in found.items():
            results.append(asyncio.run(measure(step, options.share, way == "first")))
    seconds = {way: statistics.median(taken for taken, _ in results) for way, results in found.items()}
    asked = {way: statistics.median(count for _, count in results) for way, results in found.items()}
    needed = NEEDED / (1 - options.share) / SAMPLED
    ideal = {"seconds": needed, "requests": min(1.0, needed + IN_FLIGHT / (SAMPLED * RESPONSES))}
    shares = {"seconds": seconds["first"] / seconds["all"], "requests": asked["first"] / asked["all"]}
    rows = [("", "seconds", "requests", "of all: time", "requests")]
    rows += [("all", f"{seconds['all']:.2f}", f"{asked['all']:.0f}", "", "")]
    rows += [
        (
            "first",
            f"{seconds['first']:.2f}",
            f"{asked['first']:.0f}",
            f"{shares['seconds']:.2f}",
            f"{shares['requests']:.2f}",
        ),
        ("ideal", "", "", f"{ideal['seconds']:.2f}", f"{ideal['requests']:.2f}"),
    ]
    print(table(rows))
    holds = all(shares[what] <= SLACK * ideal[what] for what in ideal)
    report = {"seconds": seconds, "requests": asked, "shares": shares, "ideal": ideal, "holds": holds}
    Path(options.out).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if not holds:
        print(f"a share is more than {SLACK:g} times the ideal one", file=sys.stderr)
    return 0 if holds else 1


if __name__ == "__main__":
    begin(main, ["--steps", "1"])
