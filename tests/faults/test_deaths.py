"""The process that hosts the agent dies in mid-flight: what was paid for is not paid for again, and nothing is lost.

In the published agent finished rewards are lost with the actor. Here the new actor is started by hand;
tests/executors/test_ray_restart.py has the executor do it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from tests.faults.rig.samples import check, graded, run, samples
from tests.faults.rig.server import FaultServer

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(120),
    pytest.mark.shares_ray,
    pytest.mark.usefixtures("by_value"),
]

GROUPS, LIMIT = 16, 8
ANSWERED = 21
"""Requests before the judge hangs: enough for five whole groups, whichever LIMIT requests then hang."""


class Host:
    """An actor with an agent, as the run builds it."""

    def __init__(self, url: str, ledger: str) -> None:
        from dataflow.config.reward import RewardConfig
        from dataflow.running.services.agent import build_agent

        options = RewardConfig(concurrency=LIMIT, backoff=0.05, max_backoff=0.1)
        judge = {"target": "dataflow.rewards.judge.judge:Judge", "kwargs": {"url": url}}
        self.agent = build_agent(None, judge, options, ledger=ledger)

    async def pid(self) -> int:
        return os.getpid()

    async def submit(self, step: int, rows: Batch) -> None:
        self.agent.submit(step, rows)

    async def collect(self, step: int, k: int | None = None) -> Batch:
        return await self.agent.collect(step, k)

    async def stats(self, saved: bool = False) -> dict[str, Any]:
        """Returns the agent's stats; ``saved`` waits until the ledger has all that was answered by now."""
        if saved:
            assert self.agent.ledger is not None
            await asyncio.to_thread(self.agent.ledger.flush)
        return self.agent.stats()

    async def close(self) -> None:
        await self.agent.close()


def host(server: FaultServer, tmp_path: Path) -> Any:
    import ray

    return ray.remote(Host).options(max_concurrency=100, num_cpus=0).remote(server.url, str(tmp_path / "ledger.db"))


@pytest.fixture
def mortal() -> Iterator[FaultServer]:
    """A server whose counts are of this test alone."""
    with FaultServer() as running:
        yield running


def test_a_new_actor_requests_only_unanswered_rewards(mortal: FaultServer, tmp_path: Path) -> None:
    import ray
    from ray.exceptions import RayActorError

    async def body() -> None:
        # A full flight hangs, whatever the machine is busy with.
        await asyncio.to_thread(mortal.behave, "hang", after=ANSWERED)
        first = host(mortal, tmp_path)
        pid = await first.pid.remote()
        whole = {step: samples(step, range(GROUPS)) for step in (1, 2)}
        for step, rows in whole.items():
            await first.submit.remote(step, rows)
        before = await first.collect.remote(1, 5)
        check(before, 1, right=graded)
        waiting = asyncio.ensure_future(first.collect.remote(2, GROUPS))
        while (seen := await asyncio.to_thread(mortal.seen))["modes"].get("hang", 0) < LIMIT:
            await asyncio.to_thread(mortal.seen, seen["requests"] + 1)
        stats = await first.stats.remote(saved=True)
        assert (stats["scored"], stats["waiting"]) == (ANSWERED, 4 * GROUPS - ANSWERED - LIMIT)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RayActorError):
            await waiting
        await asyncio.to_thread(mortal.behave)

        second = host(mortal, tmp_path)
        await second.submit.remote(1, whole[1].select([g for g in range(GROUPS) if g not in before.ids]))
        await second.submit.remote(2, whole[2])
        after = [await second.collect.remote(2), await second.collect.remote(1, 4), await second.collect.remote(1)]
        check(after[0], 2, right=graded)
        assert after[0].ids == tuple(range(GROUPS))
        for part in after[1:]:
            check(part, 1, right=graded)
        groups = sorted(group for part in (before, *after[1:]) for group in part.ids)
        assert groups == list(range(GROUPS)), "each group once, before or after"
        stats = await second.stats.remote()
        assert stats["cached"] == ANSWERED - 2 * len(before.ids), "all that was paid for and not returned"
        seen = await asyncio.to_thread(mortal.seen)
        assert seen["distinct"] == 4 * GROUPS
        assert seen["requests"] == 4 * GROUPS + LIMIT, "asked again: only what was in flight"
        assert seen["most_alike"] == 2
        await second.close.remote()
        ray.kill(second, no_restart=True)

    run(body())
