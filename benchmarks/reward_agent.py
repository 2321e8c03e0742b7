"""What the reward agent adds to the delays of the rewards: times as ratios to an ideal schedule, CPU per reward.

    python benchmarks/reward_agent.py
    python benchmarks/reward_agent.py http       # through the judge and an HTTP server in a process of its own

5,120 samples in groups of 5, responses of 1,024 tokens that are decoded on the way, delays uniform between 0.01 and
0.4 s. The ideal serves the same delays first come first served with as many servers and no work of its own; all
ratios are to that. CPU seconds are of 1,000 rewards, and depend on the machine: beside them stands what the same calls
cost in this run with no agent around them. The bounds on CPU time were set on a machine where aiohttp takes 0.13 ms for
a request (64 in flight, no delay); ``slower`` is how many times that it takes here, and the bounds grow by as much.
Each row is the median of several runs. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from _run import table

from dataflow.batch import Batch
from dataflow.executors.ray_host import settle_memory
from dataflow.reward_agent import Limits, RewardAgent
from dataflow.rewards.decode import decoder
from dataflow.rewards.judge import Judge, messages
from dataflow.rewards.judge_server import start_judge
from dataflow.rewards.ledger import Ledger

SAMPLES, GROUP, TOKENS, MINI_BATCHES = 5_120, 5, 1_024, 4
LOW, HIGH = 0.01, 0.4
AIOHTTP_MS = 0.13
BOUNDS = {
    ("async", 256): {"makespan": 1.03, "first": 1.10, "submit_s": 0.10, "cpu_s": 0.12},
    ("sync", 256): {"makespan": 1.06},
    ("async", 1024): {"makespan": 1.07},
    ("async", 4096): {"makespan": 1.5},
}


def ideal(delays: list[float], servers: int) -> tuple[float, float]:
    """Returns when the last request ends, and when the first mini-batch of whole groups is there, in seconds."""
    free = [0.0] * servers
    groups: dict[int, float] = {}
    for row, delay in enumerate(delays):
        end = heapq.heappop(free) + delay
        heapq.heappush(free, end)
        groups[row // GROUP] = max(groups.get(row // GROUP, 0.0), end)
    ends = sorted(groups.values())
    return ends[-1], ends[len(ends) // MINI_BATCHES - 1]


def samples(tokenizer: Any) -> Batch:
    """Responses as token ids, as a rollout engine hands them on."""
    import torch

    text = "Tom has 12 apples and buys 7 more. He gives 5 to Ann: 12 + 7 - 5 = 14. #### 14\n"
    ids = tokenizer(text)["input_ids"]
    long = torch.tensor((ids * (2 * TOKENS // len(ids) + 2))[: 2 * TOKENS])
    return Batch(
        [row // GROUP for row in range(SAMPLES)],
        {
            "responses": torch.stack([long[row % TOKENS : row % TOKENS + TOKENS] for row in range(SAMPLES)]),
            "response_mask": torch.ones(SAMPLES, TOKENS, dtype=torch.int64),
            "data_source": ["bench"] * SAMPLES,
            "ground_truth": ["0"] * SAMPLES,
            "extra_info": [{"row": row} for row in range(SAMPLES)],
        },
    )


def texts() -> Batch:
    """Responses as texts of about as many letters, for what needs no decoding."""
    return Batch(
        [row // GROUP for row in range(SAMPLES)],
        {
            "response_text": [f"{row} is it. {'x' * TOKENS}\n#### {row}" for row in range(SAMPLES)],
            "data_source": ["bench"] * SAMPLES,
            "ground_truth": ["#### 1"] * SAMPLES,
            "extra_info": [{"question": "How many?", "row": row} for row in range(SAMPLES)],
        },
    )


async def once(score: Any, batch: Batch, concurrency: int, decode: Any, ledger: Ledger | None) -> dict[str, float]:
    """One step through an agent of its own, collected in mini-batches."""
    agent = RewardAgent(score, limits=Limits(concurrency), decode=decode, ledger=ledger)
    cpu, begin = time.process_time(), time.perf_counter()
    agent.submit(1, batch)
    submitted = time.perf_counter() - begin
    take = len(batch.ids) // MINI_BATCHES
    await agent.collect(1, take)
    first = time.perf_counter() - begin
    for _ in range(MINI_BATCHES - 1):
        await agent.collect(1, take)
    end = time.perf_counter() - begin
    spent = time.process_time() - cpu
    stats = agent.stats()
    await agent.close()
    if stats["scored"] != SAMPLES:
        raise SystemExit(f"{stats['scored']} of {SAMPLES} rewards were scored")
    return {"submit_s": submitted, "first_s": first, "end_s": end, "cpu_s": spent / SAMPLES * 1000}


def scorers(delays: list[float]) -> dict[str, Callable[..., Any]]:
    """A reward function that waits, on the loop and in a thread."""

    async def waits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        await asyncio.sleep(delays[extra_info["row"]])
        return 1.0

    def blocks(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        time.sleep(delays[extra_info["row"]])
        return 1.0

    return {"async": waits, "sync": blocks}


def slowness() -> float:
    """Returns how many times slower this machine is now than the one where the bounds on CPU time were set."""
    with start_judge("0") as server:
        return statistics.median(uvloop.run(bare_http(server.url, SAMPLES, 64)) for _ in range(3)) / AIOHTTP_MS


def delayed(rounds: int, tokenizer: Any, ledger: Path | None, slower: float) -> list[dict[str, Any]]:
    """The rows with delays."""
    rng = random.Random(0)
    delays = [rng.uniform(LOW, HIGH) for _ in range(SAMPLES)]
    batch, decode, rows = samples(tokenizer), decoder(tokenizer), []
    for (kind, concurrency), bounds in BOUNDS.items():
        makespan, first = ideal(delays, concurrency)
        runs = []
        for _ in range(rounds):
            book = Ledger(ledger, f"bench-{time.time_ns()}") if ledger else None
            runs.append(uvloop.run(once(scorers(delays)[kind], batch, concurrency, decode, book)))
        middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        row = {
            "function": kind,
            "in flight": concurrency,
            "ideal_s": makespan,
            "makespan": middle["end_s"] / makespan,
            "first": middle["first_s"] / first,
            "submit_s": middle["submit_s"],
            "cpu_s": middle["cpu_s"],
            "bare_s": uvloop.run(bare(scorers(delays)["async"], concurrency)),
        }
        scaled = {name: bound * slower if name == "cpu_s" else bound for name, bound in bounds.items()}
        row["held"] = all(row[name] <= bound for name, bound in scaled.items())
        rows.append({**row, "bounds": scaled})
    return rows


async def bare(score: Any, concurrency: int) -> float:
    """Returns the CPU seconds of 1,000 calls with no agent around them: what the loop and the machine cost."""
    rows = iter(range(SAMPLES))

    async def work() -> None:
        for row in rows:
            await score("", "", "", {"row": row})

    begin = time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return (time.process_time() - begin) / SAMPLES * 1000


async def behind_a_straggler(delays: list[float], concurrency: int) -> float:
    """Returns a step's makespan over its ideal, while one request of the step before takes longer than all of it."""
    score = scorers([*delays, HIGH * 100])["async"]
    agent = RewardAgent(score, limits=Limits(concurrency))
    batch = texts()
    agent.submit(
        1,
        Batch([0], {name: [column[0]] for name, column in batch.columns.items()} | {"extra_info": [{"row": SAMPLES}]}),
    )
    begin = time.perf_counter()
    agent.submit(2, batch)
    await agent.collect(2)
    took = time.perf_counter() - begin
    await agent.close()
    return took / ideal(delays, concurrency - 1)[0]


def without_delay(rounds: int) -> dict[str, Any]:
    """Rewards a second where a reward takes no time; texts, since nothing is to be decoded."""

    async def at_once(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        return 1.0

    runs = [uvloop.run(once(at_once, texts(), 256, None, None)) for _ in range(rounds)]
    rate = SAMPLES / statistics.median(run["end_s"] for run in runs)
    return {"rewards_per_s": rate, "bound": 15_000, "held": rate >= 15_000}


def over_http(rounds: int, slower: float, delay_s: float = 0.5, concurrency: int = 256) -> dict[str, Any]:
    """The judge's client against a server that takes half a second."""
    with start_judge(str(delay_s)) as server:
        batch = texts()
        runs = [uvloop.run(once(Judge(server.url), batch, concurrency, None, None)) for _ in range(rounds)]
        alone = uvloop.run(bare_http(server.url, SAMPLES, concurrency))
    best = concurrency / delay_s
    rate = SAMPLES / statistics.median(run["end_s"] for run in runs)
    cpu_ms = statistics.median(run["cpu_s"] for run in runs)
    share = rate / best
    return {
        "requests_per_s": rate,
        "of_ideal": share,
        "cpu_ms": cpu_ms,
        "aiohttp_alone_ms": alone,
        "bounds": {"of_ideal": 0.9, "cpu_ms": 0.35 * slower},
        "held": share >= 0.9 and cpu_ms <= 0.35 * slower,
    }


async def bare_http(url: str, requests: int, concurrency: int) -> float:
    """Returns the CPU milliseconds of a request by aiohttp alone, the same bodies to the same server."""
    import aiohttp

    rows = iter(range(requests))
    body = json.dumps({"model": "judge", "messages": messages("How many?", "#### 1", "x" * TOKENS)}).encode()

    async def work(session: aiohttp.ClientSession) -> None:
        for _ in rows:
            async with session.post(f"{url}/v1/chat/completions", data=body) as reply:
                await reply.read()

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"}) as session:
        begin = time.process_time()
        await asyncio.gather(*(work(session) for _ in range(concurrency)))
        return (time.process_time() - begin) / requests * 1000


def main() -> int:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", default=["delays", "rate", "http"], help="delays, rate, http")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ledger", type=Path, help="journal into this file, too")
    parser.add_argument("-o", "--output", type=Path, default=Path("reward_agent.json"))
    given = parser.parse_args()
    found: dict[str, Any] = {}
    uvloop.run(once(scorers([0.0] * SAMPLES)["async"], texts(), 256, None, None))
    # As in the process that hosts an agent: what was imported is walked by no garbage collection.
    settle_memory()
    found["slower"] = slowness()
    print(f"{found['slower']:.2f} times slower than where the bounds on CPU time were set", flush=True)
    if "delays" in given.what:
        from transformers import AutoTokenizer

        from dataflow.models.tiny import tiny_model

        tokenizer = AutoTokenizer.from_pretrained(str(tiny_model()))
        found["delays"] = delayed(given.rounds, tokenizer, given.ledger, found["slower"])
        names = ["function", "in flight", "ideal_s", "makespan", "first", "submit_s", "cpu_s", "bare_s", "held"]
        print(table([tuple(names), *(tuple(_cell(row[name]) for name in names) for row in found["delays"])]))
        rng = random.Random(1)
        waits = [rng.uniform(LOW, HIGH) for _ in range(SAMPLES)]
        found["straggler"] = statistics.median(uvloop.run(behind_a_straggler(waits, 256)) for _ in range(given.rounds))
        print(f"a step behind a straggler: {found['straggler']:.3f} of its own ideal (bound 1.1)")
    if "rate" in given.what:
        found["rate"] = without_delay(given.rounds)
        print(json.dumps(found["rate"]))
    if "http" in given.what:
        found["http"] = over_http(min(3, given.rounds), found["slower"])
        print(json.dumps(found["http"]))
    given.output.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
