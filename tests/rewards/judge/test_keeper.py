"""The run's own judge dies: it restarts at the same address, and after too many deaths the run fails."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from dataflow.errors import RunError
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.judge import keeper as judge_keeper
from dataflow.rewards.judge.judge import Judge
from dataflow.rewards.judge.keeper import JudgeKeeper
from tests.faults.rig.samples import check, graded, samples
from tests.rigs.addresses import OTHERS

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]


@pytest.fixture
def losses() -> queue.Queue[RunError]:
    return queue.Queue()


@pytest.fixture
def keeper(losses: queue.Queue[RunError]) -> Iterator[JudgeKeeper]:
    with JudgeKeeper("0.05", 1.0, 0, losses.put) as running:
        yield running


def answers(keeper: JudgeKeeper) -> bool:
    """Whether the judge says that it is well; waits for a new one, which inherits the connection."""
    with urllib.request.urlopen(f"{keeper.url}/health", timeout=60) as reply:
        return reply.status == 200


@pytest.mark.parametrize("address", OTHERS)
def test_it_listens_for_agents_on_other_machines_only_where_it_is_told(
    address: str, losses: queue.Queue[RunError]
) -> None:
    with JudgeKeeper("0", 1.0, 0, losses.put, address) as away:
        assert urlsplit(away.url).hostname == address
        assert answers(away)


def test_requests_in_flight_are_sent_again_to_the_new_judge(keeper: JudgeKeeper, losses: queue.Queue[RunError]) -> None:
    async def body() -> None:
        agent = RewardAgent(Judge(url=keeper.url), limits=Limits(4), retry=Retry(backoff_s=0.05))
        agent.submit(1, samples(1, range(12)))
        first = await agent.collect(1, 2)
        os.kill(keeper.pid, signal.SIGKILL)
        rest = await agent.collect(1)
        check(first, 1, right=graded)
        check(rest, 1, right=graded)
        assert sorted(first.ids + rest.ids) == list(range(12))
        stats = agent.stats()
        assert (stats["scored"], stats["failed"]) == (24, 0)
        assert stats["retried"] > 0
        await agent.close()

    asyncio.run(body())
    assert keeper.deaths == 1
    assert losses.empty()


def test_after_too_many_deaths_one_sentence_names_the_judge(
    keeper: JudgeKeeper, losses: queue.Queue[RunError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_keeper, "RESTARTS", 1)
    first = keeper.pid
    os.kill(first, signal.SIGKILL)
    assert answers(keeper)
    while keeper.pid == first:  # the new judge answers before its keeper knows of it
        time.sleep(0.02)
    os.kill(keeper.pid, signal.SIGKILL)
    said = str(losses.get(timeout=60))
    assert said.startswith("the run's own judge died 2 times")
    assert "judge.url" in said


def test_closed_it_does_not_come_back(losses: queue.Queue[RunError]) -> None:
    with JudgeKeeper("0", 1.0, 0, losses.put) as keeper:
        pid = keeper.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert keeper.deaths == 0
    assert "judge keeper" not in {thread.name for thread in threading.enumerate()}
