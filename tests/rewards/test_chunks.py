"""A step that is submitted in chunks, as a streaming rollout emits them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dataflow.errors import DataflowError, RewardFailed
from dataflow.rewards.steps import Ticket
from tests.rewards.groups.group_rig import BROKEN, Reward, agent_of, samples
from tests.rigs.virtual_time import run_virtual

pytestmark = pytest.mark.timeout(60)


def test_a_collect_waits_for_groups_that_are_yet_to_be_submitted() -> None:
    async def body() -> None:
        agent = agent_of(Reward())
        tickets = [agent.submit(1, samples(2), more=True)]
        first = await agent.collect(1, 1)
        waiting = asyncio.ensure_future(agent.collect(1, 3))
        await asyncio.sleep(1)
        assert not waiting.done(), "of three groups one is there"
        tickets.append(agent.submit(1, samples(2, first=2), more=True))
        second = await waiting
        tickets.append(agent.submit(1, samples(1, first=4), more=True))
        last = await agent.collect(1, 1, last=True)
        assert [part.ids for part in (first, second, last)] == [(0,), (1, 2, 3), (4,)]
        assert Ticket.concat(tickets) == Ticket(1, (0, 1, 2, 3, 4), 10)
        assert "step" not in second.meta
        assert last.meta["step"]["scored"] == 10, "all of the step"
        with pytest.raises(DataflowError, match="step 1 has been collected in full"):
            await agent.collect(1, 1)
        with pytest.raises(DataflowError, match="step 1 has been collected in full"):
            agent.submit(1, samples(1, first=9), more=True)
        await agent.close()

    run_virtual(body)


def test_what_is_left_at_the_last_collect_is_cancelled() -> None:
    async def body() -> None:
        reward = Reward(_3_1="never")
        agent = agent_of(reward, "replace_group")
        for first in (0, 2):
            agent.submit(1, samples(2, first=first), extra_groups=2, more=True)
        await asyncio.sleep(1)
        assert (await agent.collect(1, 2, order="index", last=True)).ids == (0, 1)
        await asyncio.sleep(1)
        assert reward.cancelled == ["3.1"]
        stats = agent.stats()
        assert stats["steps"] == stats["running"] == 0
        await agent.close()

    run_virtual(body)


def test_a_lost_group_is_replaced_by_one_of_a_later_set() -> None:
    async def body() -> None:
        agent = agent_of(Reward(_0_1=BROKEN), "replace_group")
        agent.submit(1, samples(2), extra_groups=1, more=True)
        waiting = asyncio.ensure_future(agent.collect(1, 2, last=True))
        await asyncio.sleep(1)
        assert not waiting.done()
        agent.submit(1, samples(1, first=2), extra_groups=1, more=True)
        assert (await waiting).ids == (1, 2)
        await agent.close()

    run_virtual(body)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {}, "step 1 was submitted before; submit each step once"),
        ({}, {"more": True}, "step 1 was submitted before"),
        ({"more": True}, {}, "step 1 was submitted before"),
        ({"more": True}, {"more": True}, "step 1 holds group 1 twice"),
    ],
)
def test_bad_input(first: dict[str, Any], second: dict[str, Any], message: str) -> None:
    async def body() -> None:
        agent = agent_of(Reward())
        agent.submit(1, samples(2), **first)
        with pytest.raises(DataflowError, match=message):
            agent.submit(1, samples(1, first=1 if "twice" in message else 2), **second)
        await agent.close()

    run_virtual(body)


# --- what too many failures are ----------------------------------------------------------------------------------


def test_with_its_last_set_a_step_is_known_to_have_failed_too_often() -> None:
    async def body() -> None:
        agent = agent_of(Reward(_0_0=BROKEN, _1_0=BROKEN, _2_0=BROKEN), "score:0", max_failed_share=0.25)
        agent.submit(1, samples(2), more=True)
        assert len(await agent.collect(1, 2)) == 4, "of four requests two, but there may be many to come"
        agent.submit(1, samples(2, first=2), more=True)
        with pytest.raises(RewardFailed, match=r"3 of 8 reward requests have failed.*sample 0 of group"):
            await agent.collect(1, 2, last=True)
        with pytest.raises(RewardFailed, match="3 of 8"):
            agent.submit(2, samples(1))
        await agent.close()

    run_virtual(body)
