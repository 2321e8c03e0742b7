"""The overhead of the reward agent: times as ratios to an ideal schedule, and CPU time per reward.

    python benchmarks/reward_agent.py
    python benchmarks/reward_agent.py actor      # the agent in a process of its own, as in a run on Ray
    python benchmarks/reward_agent.py http       # through the judge and an HTTP server in a process of its own

5,120 samples in groups of 5, responses of 1,024 tokens with their texts, delays uniform between 0.01 and 0.4 s.
The ideal schedule serves the same delays first come, first served, with the same number of servers and no overhead; all
ratios are relative to it. CPU seconds are for 1,000 rewards and depend on the machine, so the table also has the CPU
time of the same calls without an agent. The bounds on CPU time were set on a machine where aiohttp takes 0.13 ms per
request (64 in flight, no delay); on a slower machine they are multiplied by ``slower``, the ratio of its time to that.
Each row is the median of several runs. The times of ``actor`` start with the samples in this process and end with all
rewards in it, so they include the transfers through Ray's object store. Prints a table, writes JSON, and exits with 1
if a bound is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import uvloop
from _run import begin, table

import dataflow
from dataflow import Batch, Carried, Hosted, Latest, Pipeline, RewardAgent, stage
from dataflow.executors.ray.host import settle_memory
from dataflow.reward_agent import Limits
from dataflow.rewards.judge.judge import Judge
from dataflow.rewards.judge.rubric import messages
from dataflow.rewards.judge.server import start_judge
from dataflow.rewards.ledger import Ledger
from dataflow.stages.reward import reward_collect, reward_request

SAMPLES, GROUP, PROMPT, TOKENS, MINI_BATCHES = 5_120, 5, 200, 1_024, 4
LOW, HIGH = 0.01, 0.4
AIOHTTP_MS = 0.13


@dataclass(frozen=True)
class Case:
    """A row: the kind of function, the number of calls in flight and of samples, and the bounds."""

    kind: str
    concurrency: int
    bounds: dict[str, float]
    samples: int = SAMPLES


HERE = [
    Case("async", 256, {"makespan": 1.05, "first": 1.20, "submit_s": 0.10, "cpu_s": 0.3}),
    Case("sync", 256, {"makespan": 1.06}),
    Case("async", 1024, {"makespan": 1.1}, samples=4 * SAMPLES),
]
ACTOR = [
    Case("async", 256, {"makespan": 1.05, "first": 1.20, "cpu_s": 0.3}),
]


def limited(cases: list[Case], most: int) -> list[Case]:
    """Returns the rows with at most so many samples."""
    return [replace(case, samples=min(case.samples, most)) for case in cases]


def ideal(delays: list[float], servers: int) -> tuple[float, float]:
    """Returns the times, in seconds, when the last request ends and when the first mini-batch of groups is complete."""
    free = [0.0] * servers
    groups: dict[int, float] = {}
    for row, delay in enumerate(delays):
        end = heapq.heappop(free) + delay
        heapq.heappush(free, end)
        groups[row // GROUP] = max(groups.get(row // GROUP, 0.0), end)
    ends = sorted(groups.values())
    return ends[-1], ends[len(ends) // MINI_BATCHES - 1]


def samples(count: int) -> Batch:
    """Returns prompts and responses as a rollout engine does: token ids, and the responses' texts."""
    import torch

    text = "Tom has 12 apples and buys 7 more. He gives 5 to Ann: 12 + 7 - 5 = 14. #### 14\n" * 40
    long = torch.arange(2 * TOKENS)
    return Batch(
        [row // GROUP for row in range(count)],
        {
            "prompts": long[:PROMPT].repeat(count, 1),
            "responses": torch.stack([long[row % TOKENS : row % TOKENS + TOKENS] for row in range(count)]),
            "response_text": [f"{row} {text}" for row in range(count)],
            "response_mask": torch.ones(count, TOKENS, dtype=torch.int64),
            "data_source": ["bench"] * count,
            "ground_truth": ["0"] * count,
            "extra_info": [{"row": row} for row in range(count)],
        },
    )


def texts(count: int) -> Batch:
    """Returns responses as texts of about as many letters, for rows without decoding."""
    return Batch(
        [row // GROUP for row in range(count)],
        {
            "response_text": [f"{row} is it. {'x' * TOKENS}\n#### {row}" for row in range(count)],
            "data_source": ["bench"] * count,
            "ground_truth": ["#### 1"] * count,
            "extra_info": [{"question": "How many?", "row": row} for row in range(count)],
        },
    )


async def once(score: Any, batch: Batch, concurrency: int, ledger: Ledger | None) -> dict[str, float]:
    """Runs one step through an agent of its own, collected in mini-batches."""
    agent = RewardAgent(score, limits=Limits(concurrency), ledger=ledger)
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
    if stats["scored"] != len(batch):
        raise SystemExit(f"{stats['scored']} of {len(batch)} rewards were scored")
    return {"submit_s": submitted, "first_s": first, "end_s": end, "cpu_s": spent / len(batch) * 1000}


def scorers(delays: list[float]) -> dict[str, Callable[..., Any]]:
    """A reward function that waits, on the loop and in a thread."""

    async def waits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        await asyncio.sleep(delays[extra_info["row"]])
        return 1.0

    def blocks(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        time.sleep(delays[extra_info["row"]])
        return 1.0

    return {"async": waits, "sync": blocks}


def slowness(requests: int = SAMPLES) -> float:
    """Returns how many times slower this machine is now than the one of the bounds on CPU time; 1 if it is faster."""
    with start_judge("0") as server:
        now = statistics.median(uvloop.run(bare_http(server.url, requests, 64)) for _ in range(3))
    return max(1.0, now / AIOHTTP_MS)


def delays_of(count: int) -> list[float]:
    rng = random.Random(0)
    return [rng.uniform(LOW, HIGH) for _ in range(count)]


def delayed(rounds: int, most: int, ledger: Path | None, slower: float) -> list[dict[str, Any]]:
    """Returns the rows with delays, with the agent in this process."""
    rows = []
    for case in limited(HERE, most):
        delays = delays_of(case.samples)
        batch = samples(case.samples)
        runs = []
        for _ in range(rounds):
            book = Ledger(f"{ledger}-{time.time_ns()}") if ledger else None
            runs.append(uvloop.run(once(scorers(delays)[case.kind], batch, case.concurrency, book)))
        bare_s = uvloop.run(bare(scorers(delays)["async"], case.concurrency, case.samples))
        rows.append({**judged(case, runs, slower), "bare_s": bare_s})
    return rows


def judged(case: Case, runs: list[dict[str, float]], slower: float) -> dict[str, Any]:
    """Returns the row of a case: medians of its runs, as ratios to the ideal, and whether they hold."""
    makespan, first = ideal(delays_of(case.samples), case.concurrency)
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    row = {
        "function": case.kind,
        "in flight": case.concurrency,
        "samples": case.samples,
        "ideal_s": makespan,
        "makespan": middle["end_s"] / makespan,
        "first": middle["first_s"] / first,
        "submit_s": middle["submit_s"],
        "cpu_s": middle["cpu_s"],
    }
    scaled = {name: bound * slower if name == "cpu_s" else bound for name, bound in case.bounds.items()}
    return {**row, "bounds": scaled, "held": all(row[name] <= bound for name, bound in scaled.items())}


def in_actor(rounds: int, most: int, slower: float) -> list[dict[str, Any]]:
    """Returns the rows with the agent in an actor: a run on Ray with a step for each round, after one to warm up."""
    rows = []
    for case in limited(ACTOR, most):
        with tempfile.TemporaryDirectory() as runs:
            run = dataflow.run(
                one_step(case), inputs={"prompts": lambda step: step}, executor="ray", policy="mini-batch",
                steps=1 + rounds, groups=case.samples // GROUP, mini_batches=MINI_BATCHES, runs=runs,
            )  # fmt: skip
            tasks = {(span.stage, span.step, span.part): span for span in run.trace.spans}
            spent = {row["step"]: row["reward/cpu_s"] / case.samples * 1000 for row in run.metrics if row["step"]}
        rows.append(judged(case, [times(tasks, n) | {"cpu_s": spent[n]} for n in range(2, rounds + 2)], slower))
    return rows


@stage(writes="responses", on="gpu", role="samples")
def rollout(prompts: int, version: Annotated[int, Carried], *, batch: Batch) -> Batch:
    return batch


@stage(writes="actor", on="gpu", role="trains", per_mini_batch=True)
def update(responses: Batch, rewards: Batch, actor: Annotated[int | None, Latest]) -> int:
    if len(responses) != len(rewards["score"]):
        raise SystemExit(f"{len(rewards)} of {len(responses)} rewards were scored")
    return (actor or 0) + 1


@stage(writes="version", on="gpu", role="syncs")
def sync(actor: int) -> int:
    return actor


def one_step(case: Case) -> Pipeline:
    """Returns a pipeline whose steps hand the same samples to the agent and wait for their rewards."""
    agent = Hosted("reward", partial(agent_there, case), concurrent=True)
    batch = samples(case.samples)
    return Pipeline(
        [rollout.bind(batch=batch), reward_request.bind(agent=agent), reward_collect.bind(agent=agent), update, sync],
        inputs=["prompts"],
    )


def times(tasks: dict[tuple[str, int, int], Any], step: int) -> dict[str, float]:
    """Returns the seconds from the end of a step's rollout until its rewards have been read where it trains."""
    begin = tasks["rollout", step, 0].end
    parts = [tasks["update", step, part].end - begin for part in range(MINI_BATCHES)]
    return {
        "submit_s": tasks["reward_request", step, 0].end - begin,
        "first_s": parts[0],
        "end_s": parts[-1],
    }


class Metered:
    """A reward function that tells the CPU time of its process, which is logged with each step."""

    def __init__(self, compute_score: Callable[..., Any]) -> None:
        self.compute_score = compute_score

    def usage(self) -> dict[str, float]:
        return {"cpu_s": time.process_time()}


def agent_there(case: Case) -> RewardAgent:
    """Builds the agent in its actor."""
    score = Metered(scorers(delays_of(case.samples))[case.kind])
    return RewardAgent(score, limits=Limits(case.concurrency))


async def bare(score: Any, concurrency: int, samples: int) -> float:
    """Returns the CPU seconds of 1,000 calls without an agent: the cost of the event loop on this machine."""
    rows = iter(range(samples))

    async def work() -> None:
        for row in rows:
            await score("", "", "", {"row": row})

    begin = time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return (time.process_time() - begin) / samples * 1000


async def behind_a_straggler(delays: list[float], concurrency: int) -> float:
    """Returns a step's makespan over its ideal, while one request of the previous step takes longer than all of it."""
    score = scorers([*delays, HIGH * 100])["async"]
    agent = RewardAgent(score, limits=Limits(concurrency))
    batch = texts(len(delays))
    agent.submit(
        1,
        Batch(
            [0], {name: [column[0]] for name, column in batch.columns.items()} | {"extra_info": [{"row": len(delays)}]}
        ),
    )
    begin = time.perf_counter()
    agent.submit(2, batch)
    await agent.collect(2)
    took = time.perf_counter() - begin
    await agent.close()
    return took / ideal(delays, concurrency - 1)[0]


def over_http(rounds: int, samples: int, slower: float, delay_s: float = 0.5, concurrency: int = 256) -> dict[str, Any]:
    """Returns the rows of the judge's client with a server that takes half a second."""
    with start_judge(str(delay_s)) as server:
        batch = texts(samples)
        runs = [uvloop.run(once(Judge(server.url), batch, concurrency, None)) for _ in range(rounds)]
        alone = uvloop.run(bare_http(server.url, samples, concurrency))
    best = concurrency / delay_s
    rate = samples / statistics.median(run["end_s"] for run in runs)
    cpu_ms = statistics.median(run["cpu_s"] for run in runs)
    share = rate / best
    return {
        "requests_per_s": rate,
        "of_ideal": share,
        "cpu_ms": cpu_ms,
        "aiohttp_alone_ms": alone,
        "bounds": {"of_ideal": 0.9, "cpu_ms": 0.45 * slower},
        "held": share >= 0.9 and cpu_ms <= 0.45 * slower,
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


NAMES = ("function", "in flight", "samples", "ideal_s", "makespan", "first", "submit_s", "cpu_s", "held")


def main(arguments: list[str]) -> int:
    """Runs the selected rows; returns 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", default=["delays", "actor", "http"], help="delays, actor, http")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4 * SAMPLES, help="at most, of each row")
    parser.add_argument("--ledger", type=Path, help="journal into this file, too")
    parser.add_argument("-o", "--output", type=Path, default=Path("reward_agent.json"))
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    count = min(SAMPLES, given.samples)
    uvloop.run(once(scorers([0.0] * count)["async"], texts(count), 256, None))
    # As in the process that hosts an agent: exclude all imported objects from garbage collection.
    settle_memory()
    found["slower"] = slowness(count)
    print(f"{found['slower']:.2f} times slower than where the bounds on CPU time were set", flush=True)
    if "delays" in given.what:
        found["delays"] = delayed(given.rounds, given.samples, given.ledger, found["slower"])
        print("in this process\n" + _table(found["delays"], *NAMES[:-1], "bare_s", NAMES[-1]), flush=True)
        rng = random.Random(1)
        waits = [rng.uniform(LOW, HIGH) for _ in range(count)]
        ratio = statistics.median(uvloop.run(behind_a_straggler(waits, 256)) for _ in range(given.rounds))
        found["straggler"] = {"makespan": ratio, "bounds": {"makespan": 1.1}, "held": ratio <= 1.1}
        print(f"a step behind a straggler, relative to its ideal: {json.dumps(found['straggler'])}", flush=True)
    if "actor" in given.what:
        found["actor"] = in_actor(given.rounds, given.samples, found["slower"])
        print("in an actor, from another process and back\n" + _table(found["actor"], *NAMES), flush=True)
    if "http" in given.what:
        found["http"] = over_http(min(3, given.rounds), count, found["slower"])
        print(json.dumps(found["http"]))
    given.output.write_text(json.dumps(found, indent=2) + "\n")
    short = [row for part in found.values() for row in _rows(part) if not row["held"]]
    for row in short:
        print(f"falls short: {json.dumps(row)}", file=sys.stderr)
    return 1 if short else 0


def _rows(part: Any) -> list[dict[str, Any]]:
    rows = part if isinstance(part, list) else [part]
    return [row for row in rows if isinstance(row, dict)]


def _table(rows: list[dict[str, Any]], *names: str) -> str:
    return table([names, *(tuple(_cell(row[name]) for name in names) for row in rows)])


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    begin(main, ["--rounds", "1", "--samples", "160"])
