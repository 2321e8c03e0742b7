"""The real workloads of benchmarks/auto.py: a tiny model on this machine's CPU, rewards that take a given time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from _run import finish, start

from dataflow.planning.auto.window import step_ends
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
    """Returns when the steps of the first workloads ended, and how long the GPU pool had worked then, by policy.

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
            found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in (*PRESETS, "auto")}
            for number in range(ROUNDS):
                for name, of in found.items():
                    of.append(_run(runs, name, number, function))
                if _length(found["baseline"][0]) >= SHORT_S:
                    break
            middle = {name: sorted(of, key=_length)[len(of) // 2] for name, of in found.items()}
            rows.append({"waits_s": waits, "rounds": len(found["auto"]), "runs": middle})
    return rows


def _length(run: dict[str, list[float]]) -> float:
    return run["ends"][-1]


def _run(runs: Path, policy: str, number: int, function: Path) -> dict[str, list[float]]:
    keys = {"engine__rollout": "hf", "val__every": 0, "steps": STEPS, "reward__concurrency": CONCURRENCY}
    name = f"{policy}-{number}"
    finish(start(runs, name, policy=policy, custom_reward_function__path=function, **keys))
    trace = perfetto.load(str(runs / name))
    ends = step_ends(trace)
    busy = [span for span in trace.spans if span.resource == "gpu"]
    worked = {at: sum(min(s.end, end) - s.begin for s in busy if s.begin < end) for at, end in ends.items()}
    return {"ends": [ends[at] for at in sorted(ends)], "worked": [worked[at] for at in sorted(ends)]}
