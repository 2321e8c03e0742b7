"""Groups collected by id: an agent returns the groups that another one's part has, whatever arrived first."""

from __future__ import annotations

import asyncio

import pytest

from dataflow.errors import DataflowError, RewardFailed
from tests.rewards.groups.group_rig import BROKEN, Reward, agent_of, samples
from tests.rigs.virtual_time import run_virtual

pytestmark = pytest.mark.timeout(60)


def test_named_groups_are_awaited_and_the_rest_is_cancelled_with_the_last() -> None:
    async def body() -> None:
        agent = agent_of(Reward(_2_0=5.0, _5_0="never", _5_1="never"))
        agent.submit(1, samples(6), extra_groups=2)
        first = await agent.collect(1, groups=(4, 2))
        assert first.ids == (2, 4)
        assert "step" not in first.meta
        second = await agent.collect(1, groups=(0, 3), last=True)
        assert second.ids == (0, 3)
        assert second.meta["step"]["scored"] >= 8
        assert agent.stats()["steps"] == 0
        await agent.close()

    run_virtual(body)


def test_a_named_group_may_be_submitted_later() -> None:
    async def body() -> None:
        agent = agent_of(Reward())
        agent.submit(1, samples(4).select([0, 1]), more=True)
        waits = asyncio.create_task(agent.collect(1, groups=(1, 3)))
        await asyncio.sleep(30.0)
        assert not waits.done()
        agent.submit(1, samples(4).select([2, 3]), more=True)
        assert (await waits).ids == (1, 3)
        assert (await agent.collect(1, groups=(0, 2), last=True)).ids == (0, 2)
        await agent.close()

    run_virtual(body)


def test_groups_that_will_never_be_there_are_one_sentence() -> None:
    async def body() -> None:
        agent = agent_of(Reward())
        agent.submit(1, samples(4))
        await agent.collect(1, groups=(0, 1))
        with pytest.raises(RewardFailed, match="group 1 is to be collected, but was collected before, replaced after"):
            await agent.collect(1, groups=(1, 2))
        agent.submit(2, samples(4))
        with pytest.raises(RewardFailed, match="group 7 is to be collected, but was not submitted; submit the same"):
            await agent.collect(2, groups=(3, 7))
        agent.submit(3, samples(4))
        with pytest.raises(DataflowError, match="step 3 has 4 groups left to collect, not 0"):
            await agent.collect(3, groups=())
        await agent.close()

    run_virtual(body)


def test_a_named_group_that_was_replaced_fails_the_step_and_leaves_nobody_waiting() -> None:
    async def body() -> None:
        agent = agent_of(Reward(_1_0=BROKEN), "replace_group")
        agent.submit(1, samples(6), extra_groups=2)
        with pytest.raises(RewardFailed, match="group 1 is to be collected, but was"):
            await agent.collect(1, groups=(0, 1, 2, 3), last=True)
        await agent.close()

    run_virtual(body)
