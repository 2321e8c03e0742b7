"""Traces of runs whose rewards come from emulated model servers of known service times, on a loop whose clock jumps."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from random import Random

from dataflow.planning.workload import grpo
from dataflow.timeline.spans import Mark, Span, Trace
from tests.rigs.virtual_time import run_virtual

SECONDS = {"rollout": 0.5, "old_log_prob": 0.1, "actor_update": 0.3, "sync_weights": 0.1}
PROMPTS, RESPONSES = 24, 4


@dataclass(frozen=True)
class Emulated:
    """Equal servers of a reward model, and the requests of a step.

    Attributes:
        kind: ``batching``, as an engine that computes what waits as one batch; ``sharing``, as one that decodes all
            requests token by token.
        base, each: seconds of a batch or of a token of n requests are ``base + each * n``.
        tokens: mean of a request; their standard deviation is a third of that. Of no effect with ``batching``.
        slots: requests in flight at one server at most.
        concurrency: requests in flight in all; None for all slots.
        gathers: how often an idle batching server begins with all of a burst; otherwise it begins with the first.
    """

    kind: str
    base: float
    each: float
    tokens: int = 1
    slots: int = 16
    concurrency: int | None = None
    gathers: float = 0.0


class _Server(ABC):
    def __init__(self, spec: Emulated, rng: Random) -> None:
        self.spec, self.rng = spec, rng
        self.load = 0
        self.waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, tokens: int) -> None:
        self.load += 1
        await asyncio.sleep(self.rng.uniform(0.0002, 0.002))  # the way to the server
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((tokens, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self.work())
        await answer
        self.load -= 1

    async def take(self, n: int) -> None:
        """Waits as long as a batch, or a token, of n requests takes."""
        await asyncio.sleep((self.spec.base + self.spec.each * n) * self.rng.uniform(0.97, 1.03))

    @abstractmethod
    async def work(self) -> None:
        """Answers requests until none is left."""


class _Batching(_Server):
    async def work(self) -> None:
        if self.spec.gathers and self.rng.random() < self.spec.gathers:
            await asyncio.sleep(0.002)
        while self.waiting:
            batch, self.waiting = self.waiting, []
            await self.take(len(batch))
            for _, answer in batch:
                answer.set_result(None)
            await asyncio.sleep(0)


class _Sharing(_Server):
    async def work(self) -> None:
        while self.waiting:
            await self.take(len(self.waiting))
            for _, answer in (item for item in self.waiting if item[0] <= 1):
                answer.set_result(None)
            self.waiting = [(tokens - 1, answer) for tokens, answer in self.waiting if tokens > 1]
            await asyncio.sleep(0)


@cache
def emulate(spec: Emulated, replicas: int, seed: int, steps: int) -> Trace:
    """Returns the trace of a baseline run; its requests are the same with any number of replicas."""
    trace = Trace()

    async def run() -> None:
        loop, rng = asyncio.get_running_loop(), Random(f"{seed}/servers")
        kind = _Batching if spec.kind == "batching" else _Sharing
        servers: Mapping[str, _Server] = {f"http://127.0.0.1:{8000 + i}": kind(spec, rng) for i in range(replicas)}
        in_flight = asyncio.Semaphore(min(spec.concurrency or replicas * spec.slots, replicas * spec.slots))

        async def request(step: int, group: int, tokens: int) -> None:
            async with in_flight:
                url = min(servers, key=lambda url: servers[url].load)
                begin = loop.time()
                await servers[url].ask(tokens)
                facts = {"step": step, "group": group, "endpoint": url}
                trace.add(Mark("reward", "reward", begin, loop.time(), facts))

        for step in range(1, steps + 1):
            draw = Random(f"{seed}/{step}")
            lengths = [max(1, round(draw.gauss(spec.tokens, spec.tokens / 3))) for _ in range(PROMPTS * RESPONSES)]
            begin = loop.time()
            at = begin + SECONDS["rollout"]
            _span(trace, "rollout", step, begin, at)
            await asyncio.sleep(SECONDS["rollout"])
            _span(trace, "reward_request", step, at, at)
            _span(trace, "old_log_prob", step, at, at + SECONDS["old_log_prob"])
            asked = [request(step, i // RESPONSES, tokens) for i, tokens in enumerate(lengths)]
            await asyncio.gather(*asked, asyncio.sleep(SECONDS["old_log_prob"]))
            end = loop.time()
            _span(trace, "reward_collect", step, at, end)
            _span(trace, "advantage", step, end, end)
            _span(trace, "actor_update", step, end, end + SECONDS["actor_update"])
            updated = end + SECONDS["actor_update"]
            synced = updated + SECONDS["sync_weights"]
            _span(trace, "gather_weights", step, updated, updated)
            _span(trace, "sync_weights", step, updated, synced)
            await asyncio.sleep(synced - end)

    run_virtual(run)
    facts = {"pipeline": json.loads(json.dumps(grpo(False).facts()))}
    concurrency = spec.concurrency or replicas * spec.slots
    model = {"replicas": replicas, "slots": spec.slots, "placement": "own", "gpus": 1, "servers": []}
    facts |= {"prompts": PROMPTS, "responses": RESPONSES, "mini_batches": 1, "concurrency": concurrency}
    trace.meta |= {"policy": "baseline", "steps": steps, "status": "finished"}
    trace.meta["job"] = facts | {
        "model": "rm",
        "concurrency_given": spec.concurrency is not None,
        "models": {"rm": model},
        "gpus": 2,
    }
    return trace


def _span(trace: Trace, stage: str, step: int, begin: float, end: float) -> None:
    on = {"reward_request": "controller", "advantage": "controller", "reward_collect": "reward"}
    trace.add(Span(stage, step, 0, 1, on.get(stage, "gpu"), begin, end))
