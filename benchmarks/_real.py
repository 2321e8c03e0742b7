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

REWARD = """
import asyncio, itertools, random

calls = itertools.count()

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    mean = {later} if next(calls) >= {half} else {first}
    await asyncio.sleep(mean * random.Random(solution_str).uniform(0.1, 1.9))
    return float(len(solution_str) % 2)
"""


def measure(count: int) -> list[dict[str, Any]]:
    """Returns when the steps of the first workloads ended, and how long the GPU pool had worked then, by policy."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, waits in enumerate(WAITS[:count]):
            runs = Path(temporary, str(number))
            runs.mkdir()
            first, later = (wait * CONCURRENCY / SAMPLES for wait in waits)
            function = runs / "reward.py"
            function.write_text(REWARD.format(first=first, later=later, half=STEPS // 2 * SAMPLES))
            rows.append({"waits_s": waits, "runs": {name: _run(runs, name, function) for name in (*PRESETS, "auto")}})
    return rows


def _run(runs: Path, policy: str, function: Path) -> dict[str, list[float]]:
    keys = {"engine__rollout": "hf", "val__every": 0, "steps": STEPS, "reward__concurrency": CONCURRENCY}
    finish(start(runs, policy, policy=policy, custom_reward_function__path=function, **keys))
    trace = perfetto.load(str(runs / policy))
    ends = step_ends(trace)
    busy = [span for span in trace.spans if span.resource == "gpu"]
    worked = {at: sum(min(s.end, end) - s.begin for s in busy if s.begin < end) for at, end in ends.items()}
    return {"ends": [ends[at] for at in sorted(ends)], "worked": [worked[at] for at in sorted(ends)]}
