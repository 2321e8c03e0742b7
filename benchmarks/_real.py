"""The real workloads of benchmarks/auto.py: a tiny model on this machine's CPU, rewards that take a given time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from _run import finish, start

from dataflow.policy import PRESETS
from dataflow.timeline import perfetto

STEPS, SAMPLES = 20, 256
CONCURRENCY = 64
WAITS = ((1.0, 6.0), (0.1, 0.1), (1.0, 1.0), (3.0, 3.0), (8.0, 8.0), (6.0, 1.0))
"""Seconds that a step's rewards take, about, in the first and the second half of a run."""
SHORT_S, ROUNDS = 60.0, 3
"""A workload whose baseline takes less time runs so often: its times vary by more than the bounds."""

REWARD = """
import asyncio, itertools, random

calls = itertools.count()

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    mean = {later} if next(calls) >= {half} else {first}
    await asyncio.sleep(mean * random.Random(solution_str).uniform(0.1, 1.9))
    return float(len(solution_str) % 2)
"""


def measure(count: int) -> list[dict[str, Any]]:
    """Returns the seconds that the first workloads took, by policy.

    Of a workload that runs several times, each policy in its turn, the run of median length counts.
    """
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for place, waits in enumerate(WAITS[:count]):
            runs = Path(temporary, str(place))
            runs.mkdir()
            first, later = (wait * CONCURRENCY / SAMPLES for wait in waits)
            function = runs / "reward.py"
            function.write_text(REWARD.format(first=first, later=later, half=STEPS // 2 * SAMPLES))
            found: dict[str, list[float]] = {name: [] for name in (*PRESETS, "auto")}
            for number in range(ROUNDS):
                for name, of in found.items():
                    of.append(_run(runs, name, number, function))
                if found["baseline"][0] >= SHORT_S:
                    break
            middle = {name: sorted(of)[len(of) // 2] for name, of in found.items()}
            rows.append({"waits_s": waits, "rounds": len(found["auto"]), "runs": middle})
    return rows


def _run(runs: Path, policy: str, number: int, function: Path) -> float:
    keys = {"engine__rollout": "hf", "val__every": 0, "steps": STEPS, "reward__concurrency": CONCURRENCY}
    name = f"{policy}-{number}"
    finish(start(runs, name, policy=policy, custom_reward_function__path=function, **keys))
    return perfetto.load(str(runs / name)).wall
