"""Reward models: what the choice of a server costs, how even the load is, and what batching gains.

    python benchmarks/reward_models.py
    python benchmarks/reward_models.py balance          # or cost, engine, plan

``cost``: CPU time of a request through the agent and the router to four servers, less that of the same request to one
server without a router; and of the HTTP router's own process. The bounds were set on a machine where aiohttp alone
takes 0.13 ms for a request, and are multiplied by ``slower``, the ratio of its time here to that.
``balance``: four servers of unequal speed behind one agent. The makespan is relative to the ideal list schedule, in
which each request takes the slot that is free first; the table also has that of a fixed choice of server by a hash.
``engine``: rows a second of the transformers server with batches of up to 32, relative to one at a time.
``plan``: seconds a step of runs with one server and with three, each also predicted from the trace of the other; a
server computes what waits as one batch.
Prints tables, writes JSON, and exits with 1 if a bound is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import uvloop
from _run import begin, classifier, finish, start, table

from dataflow.batch import Batch
from dataflow.planning.config import PlanConfig
from dataflow.planning.simulation.simulate import simulate
from dataflow.planning.sources.trace import workload
from dataflow.policy import preset
from dataflow.reward_agent import Limits, RewardAgent
from dataflow.rewards.judge.server import JudgeProcess, serve, start_judge
from dataflow.rewards.models.router_keeper import RouterKeeper
from dataflow.rewards.models.served import ServedReward
from dataflow.system.address import listening
from dataflow.system.children import command
from dataflow.system.loopback import ADDRESS

DELAYS_S = (0.1, 0.15, 0.25, 0.5)
SLOTS = 16
REQUESTS = 5_120
AIOHTTP_MS = 0.13
START_S = 60.0
BATCH = (0.2, 0.06)  # of the servers of `plan`
REPLICAS = (1, 3)


def main(arguments: list[str]) -> int:
    """Runs the selected parts; returns 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ["cost", "balance", "engine", "plan"]
    parser.add_argument("what", nargs="*", default=parts, help=", ".join(parts))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("-o", "--output", type=Path, default=Path("reward_models.json"))
    parser.add_argument("--serve", type=float, nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve is not None:
        serve(application(*given.serve), listening(ADDRESS))
        return 0
    found: dict[str, dict[str, Any]] = {}
    if "cost" in given.what:
        found["cost"] = cost(given.rounds, given.requests)
    if "balance" in given.what:
        found["balance"] = balance(given.rounds, given.requests * 3 // 8)
    if "engine" in given.what:
        found["engine"] = engine(given.rounds, given.requests // 20)
    if "plan" in given.what:
        found["plan"] = plan(given.rounds)
    for part, row in found.items():
        shown = {name: value for name, value in row.items() if name not in ("bounds", "errors")}
        cells = tuple(f"{value:.3f}" if isinstance(value, float) else str(value) for value in shown.values())
        print(f"{part}\n{table([tuple(shown), cells])}", flush=True)
    given.output.write_text(json.dumps(found, indent=2) + "\n")
    short = [part for part, row in found.items() if not row["held"]]
    for part in short:
        print(f"falls short: {part}: {json.dumps(found[part])}", file=sys.stderr)
    return 1 if short else 0


def application(delay_s: float, each_s: float | None = None) -> Any:
    """Returns a server that scores each request after a delay, or batches of n in ``delay_s + each_s * n``."""
    from aiohttp import web

    waiting: list[asyncio.Future[None]] = []
    arrived = asyncio.Event()

    async def classify(request: web.Request) -> web.Response:
        await request.read()
        if each_s is not None:
            waiting.append(asyncio.get_running_loop().create_future())
            arrived.set()
            await waiting[-1]
        elif delay_s:
            await asyncio.sleep(delay_s)
        return web.json_response({"data": [{"probs": [1.0]}], "usage": {"total_tokens": 9}})

    async def batches(_app: web.Application) -> AsyncIterator[None]:
        async def compute() -> None:
            while each_s is not None:
                await arrived.wait()
                batch = waiting[:]
                waiting.clear()
                arrived.clear()
                await asyncio.sleep(delay_s + each_s * len(batch))
                for answer in batch:
                    answer.set_result(None)

        task = asyncio.create_task(compute())
        yield
        task.cancel()

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({})

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "rm", "object": "model"}]})

    app = web.Application()
    app.cleanup_ctx.append(batches)
    app.router.add_post("/classify", classify)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    return app


@contextmanager
def servers(each: Sequence[Sequence[float]]) -> Iterator[list[str]]:
    """Runs a server for each tuple of arguments of :func:`application`, in processes; yields their addresses."""
    with ExitStack() as stack:
        urls = []
        for times in each:
            arguments = [sys.executable, str(Path(__file__).resolve()), "--serve", *map(repr, times)]
            urls.append(stack.enter_context(JudgeProcess(arguments, START_S, what="a server")).url)
        yield urls


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


async def step(reward: Any, batch: Batch, concurrency: int) -> dict[str, Any]:
    """Runs one step through an agent of its own; returns its times, and its requests by server."""
    agent = RewardAgent(reward, limits=Limits(concurrency))
    agent.submit(0, batch.select(batch.ids[:concurrency]))  # opens the connections
    await agent.collect(0)
    cpu, begin = time.process_time(), time.perf_counter()
    agent.submit(1, batch)
    rewards = await agent.collect(1)
    seconds, spent = time.perf_counter() - begin, time.process_time() - cpu
    await agent.close()
    by_server = Counter(record.get("endpoint", "") for record in rewards.meta["records"])
    return {"end_s": seconds, "cpu_ms": spent / len(batch) * 1000, "by_server": by_server}


def slowness() -> float:
    """Returns how many times slower this machine is now than the one where the bounds on CPU time were set."""
    from reward_agent import SAMPLES, bare_http

    with start_judge("0") as server:
        return statistics.median(uvloop.run(bare_http(server.url, SAMPLES, 64)) for _ in range(3)) / AIOHTTP_MS


def cost(rounds: int, requests: int) -> dict[str, Any]:
    """Returns the CPU milliseconds of the router in one request."""
    batch, slower = samples(requests), slowness()
    alone, routed, spent = [], [], []
    with servers([(0.0,)] * 4) as urls:
        for _ in range(rounds):  # in turn, as the speed of a shared machine varies
            reward = ServedReward("rm", urls[:1], slots=64)
            alone.append(uvloop.run(step(_Unrouted(reward), batch, 64))["cpu_ms"])
            routed.append(uvloop.run(step(ServedReward("rm", urls, slots=16), batch, 64))["cpu_ms"])
            with RouterKeeper({"rm": {"url": urls, "slots": 16}}, print) as keeper:
                cpu = _cpu_s(keeper.pid)
                uvloop.run(step(_Unrouted(ServedReward("rm", keeper.url, slots=64)), batch, 64))
                spent.append((_cpu_s(keeper.pid) - cpu) / (requests + 64) * 1000)
    router_ms = min(routed) - min(alone)
    return {
        "slower": slower,
        "agent_ms": min(alone),
        "routed_ms": min(routed),
        "router_ms": router_ms,
        "http_process_ms": min(spent),
        "bounds": {"router_ms": 0.3 * slower},
        "held": router_ms <= 0.3 * slower,
    }


class _Unrouted:
    """A reward object without its router: all calls go to its only server."""

    def __init__(self, reward: ServedReward) -> None:
        self.compute_score, self.close = reward.compute_score, reward.close


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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


def balance(rounds: int, requests: int, delays_s: Sequence[float] = DELAYS_S) -> dict[str, Any]:
    """Returns the makespan over servers of unequal speed, relative to the ideal."""
    batch, best = samples(requests), ideal(delays_s, requests)
    with servers([(delay_s,) for delay_s in delays_s]) as urls:
        runs = [
            uvloop.run(step(ServedReward("rm", urls, slots=SLOTS), batch, SLOTS * len(urls))) for _ in range(rounds)
        ]
    hashed = Counter(crc32(text.encode()) % len(delays_s) for text in batch["response_text"])
    by_hash = max(-(-hashed[at] // SLOTS) * delay_s for at, delay_s in enumerate(delays_s))
    makespan = statistics.median(run["end_s"] for run in runs) / best
    return {
        "requests": requests,
        "ideal_s": best,
        "makespan": makespan,
        "by_a_hash": by_hash / best,
        "by_server": "/".join(str(runs[-1]["by_server"][url]) for url in urls),
        "bounds": {"makespan": 1.05},
        "held": makespan <= 1.05,
    }


def engine(rounds: int, requests: int) -> dict[str, Any]:
    """Returns the rows a second of the transformers server, in batches and one at a time."""
    batch, rates = samples(requests, letters=40), {}
    with tempfile.TemporaryDirectory() as directory:
        model = classifier(Path(directory))
        for most in (1, 32):
            name = "dataflow.rewards.models.hf.server"
            options = ["--model", model, "--served-model-name", "rm", "--kind", "classify", "--port", "0"]
            arguments = command(name, *options, "--max-num-seqs", str(most))
            with JudgeProcess(arguments, START_S, what="the transformers server") as server:
                rates[most] = max(rate(server, batch) for _ in range(rounds))
    gain = rates[32] / rates[1]
    return {
        "one_at_a_time_per_s": rates[1],
        "batched_per_s": rates[32],
        "gain": gain,
        "bounds": {"gain": 1.0},
        "held": gain >= 1.0,
    }


def rate(server: JudgeProcess, batch: Batch) -> float:
    """Returns the rows a second of one step."""
    return len(batch) / float(uvloop.run(step(ServedReward("rm", server.url, slots=64), batch, 64))["end_s"])


def plan(rounds: int) -> dict[str, Any]:
    """Returns the median seconds of a step with each number of servers, measured and as planned from the other run."""
    keys: dict[str, Any] = {"engine.rollout": "hf", "executor": "inline", "steps": 8, "policy": "baseline"}
    keys |= {"data.prompts": 8, "data.train_size": 200, "engine.n": 8, "engine.max_tokens": 8}
    keys |= {"val.every": 0, "checkpoint.every": 0, "checkpoint.export": "false", "reward.models.rm.max_num_seqs": 8}
    measured, predicted, errors = ({count: [] for count in REPLICAS} for _ in range(3))
    with tempfile.TemporaryDirectory() as directory, servers([BATCH] * sum(REPLICAS)) as urls:
        own = (urls[: REPLICAS[0]], urls[REPLICAS[0] :])
        for at in range(rounds):
            runs = Path(directory, str(at))
            # Side by side, as the speed of a shared machine varies.
            both = [
                start(runs, str(len(some)), **keys, **{"reward.models.rm.url": f"[{','.join(some)}]"}) for some in own
            ]
            for process in both:
                finish(process)
            for count, other in (REPLICAS, REPLICAS[::-1]):
                load = workload(runs / str(count), PlanConfig())
                assert load.logged is not None
                measured[count].append(load.logged[1] / load.steps)
                config = PlanConfig.model_validate({"reward": {"models": {"rm": {"replicas": other}}}})
                load = workload(runs / str(count), config)
                account, _costs = simulate(load, preset("baseline", 1))
                predicted[other].append((account.end - account.begin) / load.steps)
            for count in REPLICAS:
                errors[count].append(predicted[count][-1] / measured[count][-1] - 1)
    found: dict[str, Any] = {}
    for count in REPLICAS:
        found[f"{count}_measured_s"] = statistics.median(measured[count])
        found[f"{count}_predicted_s"] = statistics.median(predicted[count])
        found[f"{count}_error"] = statistics.median(errors[count])
    held = all(abs(found[f"{count}_error"]) <= 0.05 for count in REPLICAS)
    return {**found, "errors": errors, "bounds": {"error": 0.05}, "held": held}


if __name__ == "__main__":
    begin(main, ["balance", "--rounds", "1", "--requests", "24"])
