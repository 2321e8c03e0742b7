"""The process that hosts the agent dies in mid-flight: what was paid for is not paid for again, and nothing is lost.

When the published agent's actor dies, finished rewards are lost.
Here the new actor is started by hand; tests/executors/test_ray_restart.py has the executor do it.
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
from dataflow.errors import RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.functions import build_reward, load_reward
from dataflow.rewards.managers import build_manager
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

    def __init__(self, url: str, ledger: str, on_failure: str = "fail") -> None:
        from dataflow.config.reward import RewardConfig
        from dataflow.running.services.agent import build_agent

        options = RewardConfig(concurrency=LIMIT, on_failure=on_failure, backoff=0.05, max_backoff=0.1)
        judge = {"target": "dataflow.rewards.judge.judge:Judge", "kwargs": {"url": url}}
        self.agent = build_agent(None, judge, options, run="one", ledger=ledger)

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
        await _hanging(mortal, LIMIT)
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


async def _hanging(server: FaultServer, requests: int) -> None:
    """Returns when this number of requests hang."""
    while (seen := await asyncio.to_thread(server.seen))["modes"].get("hang", 0) < requests:
        await asyncio.to_thread(server.seen, seen["requests"] + 1)


REWARD = """
import os, pathlib, signal

def compute_score(data_source, solution_str, ground_truth, extra_info, flag):
    if extra_info["at"][1:] == (2, 1):
        try:
            pathlib.Path(flag).touch(exist_ok=False)
        except FileExistsError:
            return float(ground_truth)
        os.kill(os.getpid(), signal.SIGKILL)
    return float(ground_truth)
"""


@pytest.mark.parametrize("tries", [1, 3])
def test_a_scoring_process_that_is_killed_costs_one_try(tmp_path: Path, tries: int) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    kwargs = {"flag": str(tmp_path / "killed")}
    found = load_reward(str(tmp_path / "reward.py"), "compute_score", kwargs)

    async def body() -> None:
        remote = build_manager("remote", build_reward(found, kwargs), workers=2)
        agent = RewardAgent(remote, limits=Limits(4), retry=Retry(tries=tries, backoff_s=0.0))
        agent.submit(1, samples(1, range(6)))
        if tries == 1:
            with pytest.raises(RewardFailed) as error:
                await agent.collect(1)
            story = str(error.value)
            assert story.startswith("sample 1 of group 2 of step 1: ")
            assert "check whether memory ran out" in story
            agent.submit(2, samples(2, range(6)))
            check(await agent.collect(2), 2)
        else:
            check(await agent.collect(1), 1)
            assert (agent.stats()["retried"], agent.stats()["scored"]) == (1, 12)
        await agent.close()

    run(body())
