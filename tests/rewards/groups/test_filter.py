"""Dynamic sampling: groups of equal values are left out while others may take their place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import RewardFailed
from dataflow.reward_agent import Limits
from dataflow.rewards.steps import GroupFilter
from tests.rewards.groups.group_rig import BROKEN, Reward, agent_of, samples
from tests.rigs.virtual_time import run_virtual

pytestmark = pytest.mark.timeout(60)


def equal(*groups: int) -> dict[str, Any]:
    """A plan in which both samples of these groups score the same."""
    return {f"_{group}_{sample}": 1.0 for group in groups for sample in range(2)}


def test_the_first_groups_that_differ_are_collected_and_the_rest_is_cancelled() -> None:
    async def body() -> None:
        reward = Reward(**equal(0, 2), _4_0="never", _4_1="never", _5_0="never", _5_1="never")
        agent = agent_of(reward, limits=Limits(2))
        agent.submit(1, samples(9), extra_groups=7, group_filter=GroupFilter(7))
        rewards = await agent.collect(1)
        assert rewards.ids == (1, 3)
        found = rewards.meta["step"]
        assert (found["filtered_groups"], found["equal_groups"], found["scored"]) == (2, 0, 8)
        await asyncio.sleep(1)
        assert not any(name.startswith(("6", "7", "8")) for name in reward.begun), "nobody pays for what is not needed"
        stats = agent.stats()
        assert stats["steps"] == stats["running"] == 0
        await agent.close()

    run_virtual(body)


def test_equal_groups_are_collected_for_want_of_others() -> None:
    async def body() -> None:
        agent = agent_of(Reward(**equal(0, 1, 2)))
        agent.submit(1, samples(4), extra_groups=2, group_filter=GroupFilter(2))
        rewards = await agent.collect(1, order="index")
        assert rewards.ids == (2, 3)
        assert (rewards.meta["step"]["filtered_groups"], rewards.meta["step"]["equal_groups"]) == (2, 1)
        await agent.close()

    run_virtual(body)


def test_extra_groups_for_failures_are_not_used_up_by_the_filter() -> None:
    async def body() -> None:
        agent = agent_of(Reward(**equal(0, 1), _3_0=("after", 5, BROKEN)), "replace_group")
        agent.submit(1, samples(4), extra_groups=2, group_filter=GroupFilter(1))
        first = await agent.collect(1, 1, order="index")
        second = await agent.collect(1, 1, order="index")
        assert [first.ids, second.ids] == [(1,), (2,)], "0 was left out, 1 is kept although its scores are equal"
        await agent.close()

    run_virtual(body)


def test_another_column_than_the_score() -> None:
    async def body() -> None:
        def say(group: int, *accuracies: float) -> dict[str, Any]:
            return {f"_{group}_{i}": {"score": float(i), "acc": value} for i, value in enumerate(accuracies)}

        agent = agent_of(Reward(**say(0, 1.0, 1.0), **say(1, 0.0, 1.0)))
        agent.submit(1, samples(2), extra_groups=1, group_filter=GroupFilter(1, "acc"))
        assert (await agent.collect(1)).ids == (1,)
        agent.submit(2, samples(2), extra_groups=1, group_filter=GroupFilter(1, "accuracy"))
        with pytest.raises(RewardFailed, match=r"sample 0 of group 0 of step 2: the reward returned no column 'accur"):
            await agent.collect(2)
        await agent.close()

    run_virtual(body)


def test_values_are_compared_in_float32_as_advantages_are() -> None:
    async def body() -> None:
        plan = {
            "_0_0": 0.1 + 0.2, "_0_1": 0.3, "_1_0": 1e8, "_1_1": 1e8 + 1, "_2_0": 1e-46, "_2_1": 0.0,
        }  # fmt: skip
        agent = agent_of(Reward(**plan))
        agent.submit(1, samples(5), extra_groups=3, group_filter=GroupFilter(3))
        rewards = await agent.collect(1)
        assert rewards.ids == (3, 4)
        assert rewards.meta["step"]["filtered_groups"] == 3
        await agent.close()

    run_virtual(body)


@given(st.data())
def test_by_index_the_groups_are_the_same_in_any_order_of_completion(data: st.DataObject) -> None:
    """The lowest groups that differ, and the lowest others once as many as allowed were left out."""
    groups, parts = 8, data.draw(st.sampled_from([1, 2, 4]))
    flat = data.draw(st.sets(st.integers(0, groups - 1)))
    delays = data.draw(st.lists(st.integers(0, 30), min_size=groups, max_size=groups))
    chunk = data.draw(st.sampled_from([2, 4, 8]))
    left_out = sorted(flat)[:4]
    expected = [group for group in range(groups) if group not in left_out][:4]

    async def body() -> None:
        plan = {
            f"_{g}_{i}": ("after", delays[g], 1.0 if g in flat else float(i)) for g in range(groups) for i in (0, 1)
        }
        agent = agent_of(Reward(**plan))
        for first in range(0, groups, chunk):
            agent.submit(
                1, samples(chunk, first=first), extra_groups=4, more=chunk < groups, group_filter=GroupFilter(4)
            )
        found: list[int] = []
        for part in range(parts):
            found += (await agent.collect(1, 4 // parts, order="index", last=part == parts - 1)).ids
        assert found == expected
        assert agent.stats()["steps"] == 0
        await agent.close()

    run_virtual(body)
