"""Reward models: how evenly vllm-router divides the requests among equal servers of unequal speed.

    python benchmarks/reward_models.py

Four servers behind a run's router and one agent. The makespan is relative to the ideal list schedule, in which each
request takes the slot that is free first; the table also has that of a fixed choice of server by a hash, and the CPU
time of a request in the agent's process. Prints a table, writes JSON, and exits with 1 if the bound is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from _run import begin, table

from dataflow.batch import Batch
from dataflow.config.run import RunConfig
from dataflow.executors.inline import InlineExecutor
from dataflow.reward_agent import Limits, RewardAgent
from dataflow.rewards.judge.server import serve
from dataflow.rewards.models.served import ServedReward
from dataflow.running.services.served_models import ServedModels
from dataflow.system.serving import Child, Port

DELAYS_S = (0.1, 0.15, 0.25, 0.5)
SLOTS = 16
REQUESTS = 1_920
MOST = 1.5
START_S = 60.0


def main(arguments: list[str]) -> int:
    """Runs the benchmark; returns 1 if the bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("-o", "--output", type=Path, default=Path("reward_models.json"))
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve is not None:
        serve(application(given.serve), given.host, given.port)
        return 0
    found = balance(given.rounds, given.requests)
    cells = tuple(f"{value:.3f}" if isinstance(value, float) else str(value) for value in found.values())
    print(table([tuple(found), cells]), flush=True)
    given.output.write_text(json.dumps(found, indent=2) + "\n")
    if not found["held"]:
        print(f"falls short: {json.dumps(found)}", file=sys.stderr)
    return 0 if found["held"] else 1


def application(delay_s: float) -> Any:
    """Returns a server that scores each request after a delay, with :data:`SLOTS` at a time, as vLLM would."""
    from aiohttp import web

    slots = asyncio.Semaphore(SLOTS)

    async def classify(request: web.Request) -> web.Response:
        await request.read()
        async with slots:
            await asyncio.sleep(delay_s)
        return web.json_response({"data": [{"probs": [delay_s]}], "usage": {"total_tokens": 9}})

    app = web.Application()
    app.router.add_post("/classify", classify)
    return app


@contextmanager
def servers(delays_s: Sequence[float]) -> Iterator[list[str]]:
    """Runs a server for each delay, in processes; yields their addresses."""
    with ExitStack() as stack:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        children = [Child([*command, repr(s)], Port(), None, None, START_S, "a server") for s in delays_s]
        yield [stack.enter_context(child).url for child in children]


def samples(count: int, letters: int = 1_000) -> Batch:
    """Returns responses of about so many letters."""
    return Batch(
        range(count),
        {
            "response_text": [f"{row} is it. {'x' * letters}" for row in range(count)],
            "data_source": ["bench"] * count,
            "ground_truth": ["1"] * count,
            "extra_info": [{"question": "How many?"}] * count,
        },
    )


def ideal(delays_s: Sequence[float], requests: int) -> float:
    """Returns the makespan of the list schedule: each request takes the slot that is free first."""
    free = [(0.0, delay_s) for delay_s in delays_s for _ in range(SLOTS)]
    heapq.heapify(free)
    end = 0.0
    for _ in range(requests):
        begin, delay_s = heapq.heappop(free)
        end = max(end, begin + delay_s)
        heapq.heappush(free, (begin + delay_s, delay_s))
    return end


async def steps(urls: Sequence[str], batch: Batch, rounds: int) -> list[tuple[float, float, Counter[float]]]:
    """Returns of each step its seconds, CPU milliseconds a request, and the requests by the server's delay."""
    config = RunConfig.model_validate({"reward": {"models": {"rm": {"url": list(urls)}}}})
    found = []
    with tempfile.TemporaryDirectory() as place, ServedModels(config, Path(place), print) as served:
        await served.open(InlineExecutor())
        reward = ServedReward(**config.reward.models["rm"].client_options("rm"))
        agent = RewardAgent(reward, limits=Limits(SLOTS * len(urls)))
        for step in range(rounds):
            cpu, begin = time.process_time(), time.perf_counter()
            agent.submit(step, batch)
            rewards = await agent.collect(step)
            seconds, spent = time.perf_counter() - begin, time.process_time() - cpu
            by_server = Counter(round(score, 3) for score in rewards["score"].tolist())
            found.append((seconds, spent / len(batch) * 1000, by_server))
        await agent.close()
        await served.close()
    return found


def balance(rounds: int, requests: int, delays_s: Sequence[float] = DELAYS_S) -> dict[str, Any]:
    """Returns the makespan over servers of unequal speed, relative to the ideal."""
    batch, best = samples(requests), ideal(delays_s, requests)
    with servers(delays_s) as urls:
        runs = asyncio.run(steps(urls, batch, rounds))
    hashed = Counter(crc32(text.encode()) % len(delays_s) for text in batch["response_text"])
    by_hash = max(-(-hashed[at] // SLOTS) * delay_s for at, delay_s in enumerate(delays_s))
    makespan = statistics.median(seconds for seconds, _cpu, _by in runs) / best
    return {
        "requests": requests,
        "ideal_s": best,
        "makespan": makespan,
        "by_a_hash": by_hash / best,
        "cpu_ms": min(cpu for _seconds, cpu, _by in runs),
        "by_server": "/".join(str(runs[-1][2][delay_s]) for delay_s in delays_s),
        "bound": MOST,
        "held": makespan <= MOST,
    }


if __name__ == "__main__":
    begin(main, ["--rounds", "1", "--requests", "24"])
