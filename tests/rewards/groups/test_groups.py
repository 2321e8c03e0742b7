"""From ended requests to whole groups: the failure rules, and the share of failures that stops a run."""

from __future__ import annotations

import asyncio
import math

import pytest

from dataflow.errors import RewardFailed
from dataflow.reward_agent import Limits
from tests.rewards.groups.group_rig import BROKEN, NONE, Reward, agent_of, fails, numbers, samples, scored
from tests.rigs.virtual_time import run_virtual

pytestmark = pytest.mark.timeout(60)


# --- rules ---------------------------------------------------------------------------------------------------


def test_fail_ends_the_step_and_its_calls_and_leaves_the_others() -> None:
    async def body() -> None:
        reward = Reward(_1_1=("after", 5, BROKEN), _0_0="never", _2_0=("after", 9))
        agent = agent_of(reward)
        agent.submit(1, samples(2))
        agent.submit(2, samples(1, first=2))
        with pytest.raises(RewardFailed) as caught:
            await agent.collect(1)
        assert caught.value.__cause__ is BROKEN
        await asyncio.sleep(0.01)
        assert reward.cancelled == ["0.0"]
        assert (await agent.collect(2)).ids == (2,)
        await agent.close()

    run_virtual(body)


def test_a_fixed_score_trains_like_any_other(logged: list[str]) -> None:
    rewards, agent = scored(Reward(_0_1=BROKEN, _2_0=None), "score:-7")
    assert rewards["score"].tolist() == pytest.approx([0.0, -7.0, 1.0, 1.1, -7.0, 2.1])
    assert "kept" not in rewards
    assert [record.get("how") for record in rewards.meta["records"]] == [None, "failed", None, None, "failed", None]
    assert rewards.meta["step"]["failed"] == 2
    assert rewards.meta["step"]["scored"] == 4
    assert (agent.stats()["failed"], agent.stats()["scored"]) == (2, 4)
    assert len(logged) == 1, "the first of a step is told, the rest is counted"
    assert logged[0].startswith("WARNING sample 1 of group 0 of step 1: 'compute_score' raised ValueError: broken")
    assert "(reward.on_failure=score:-7)" in logged[0]


def test_a_dropped_sample_is_left_out_alone() -> None:
    rewards, _agent = scored(Reward(_0_1=BROKEN, _2_0=NONE), "drop_sample")
    assert rewards["kept"].tolist() == [True, False, True, True, False, True]
    assert numbers(rewards) == [0.0, NONE, 1.0, pytest.approx(1.1), NONE, pytest.approx(2.1)]
    assert rewards.ids == (0, 1, 2)


def test_a_group_of_which_all_is_dropped_is_still_collected() -> None:
    reward = Reward(_0_0=BROKEN, _0_1=BROKEN)
    reward.post_process_scores = reward.posted.append  # type: ignore[attr-defined]
    rewards, _agent = scored(reward, "drop_sample", groups=1)
    assert rewards["kept"].tolist() == [False, False]
    assert reward.posted == [], "there is nothing to process"


def test_a_dropped_group_is_left_out_whole_and_its_calls_are_cancelled() -> None:
    reward = Reward(_1_1=("after", 5, BROKEN), _1_2="never")
    rewards, agent = scored(reward, "drop_group", n=4, limits=Limits(7))  # 1.3 stands in line
    assert rewards["kept"].tolist() == [True] * 4 + [False] * 4 + [True] * 4
    assert [math.isnan(score) for score in rewards["score"].tolist()] == [False] * 4 + [True] * 4 + [False] * 4
    assert reward.cancelled == ["1.2"]
    assert agent.stats()["failed"] == 1
    assert agent.stats()["cancelled"] >= 1
    summary = rewards.meta["step"]
    assert summary["failed"] == 1
    assert summary["scored"] + agent.stats()["cancelled"] == 11, "what was cancelled was not scored"


def test_what_was_cancelled_with_its_group_has_a_time_and_says_so() -> None:
    """The trace shows each record: one at the epoch would stretch it over half a century."""
    reward = Reward(_0_0=("after", 5, BROKEN), _0_1="never")
    rewards, _agent = scored(reward, "drop_group", groups=1, n=3, limits=Limits(2))
    failed, running, waiting = rewards.meta["records"]
    assert [record["how"] for record in (failed, running, waiting)] == ["failed", "cancelled", "cancelled"]
    assert all(record["end"] >= record["begin"] >= failed["begin"] - 1 for record in (failed, running, waiting))
    assert rewards.meta["step"]["scored"] == 0
    assert "latency_p50" in rewards.meta["step"]


def test_another_group_takes_the_place_of_a_failed_one() -> None:
    reward = Reward(_1_0=BROKEN, _4_0="never", _4_1="never")
    rewards, agent = scored(reward, "replace_group", groups=5, spare=2)
    assert rewards.ids == (0, 2, 3)
    assert "kept" not in rewards
    assert sorted(reward.cancelled) == ["4.0", "4.1"], "what is left over is not waited for"
    assert rewards.meta["step"]["failed"] == 1
    assert agent.stats()["steps"] == 0


def test_more_failed_groups_than_can_be_replaced() -> None:
    message = fails(Reward(_1_0=BROKEN, _3_1=BROKEN, _0_0="never"), "replace_group", groups=4, spare=1)
    assert message.startswith(
        "step 1: 2 groups failed, one more than reward.extra_groups can replace; raise it. The last failure: "
        "sample 1 of group 3 of step 1: 'compute_score' raised ValueError: broken"
    )


def test_validation_has_no_spare_groups_and_leaves_out_instead() -> None:
    rewards, _agent = scored(Reward(_1_0=BROKEN), "replace_group", step="val:1")
    assert rewards.ids == (0, 1, 2)
    assert rewards["kept"].tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize("rule", ["score:0", "drop_sample", "drop_group", "replace_group"])
def test_a_fatal_error_stops_everything_under_every_rule(rule: str) -> None:
    class Spent(Exception):
        fatal = True
        fix = "raise judge.max_cost"

    async def body() -> None:
        agent = agent_of(Reward(_0_0=("after", 1, Spent("the budget is spent")), _5_0="never"), rule)
        agent.submit(1, samples(3))
        agent.submit(2, samples(1, first=5))
        for step in (1, 2):
            with pytest.raises(RewardFailed, match=r"sample 0 of group 0 of step 1: .*; raise judge\.max_cost"):
                await agent.collect(step)
        with pytest.raises(RewardFailed, match="the budget is spent"):
            agent.submit(3, samples(1))
        await asyncio.sleep(0.1)
        assert agent.stats()["running"] == 0
        await agent.close()

    run_virtual(body)


# --- too many failures ---------------------------------------------------------------------------------------


def test_a_share_of_failures_that_is_passed_stops_everything() -> None:
    async def body() -> None:
        agent = agent_of(
            Reward(_0_0=BROKEN, _1_0=BROKEN, _2_0=BROKEN, _9_0="never"), "drop_sample", max_failed_share=0.2
        )
        agent.submit(1, samples(4))
        agent.submit("val:1", samples(1, first=9))
        message = (
            "3 of 10 reward requests have failed, more than reward.max_failed_share=0.2 allows; the last one: "
            "sample 0 of group 2 of step 1: 'compute_score' raised ValueError: broken"
        )
        for step in (1, "val:1"):
            with pytest.raises(RewardFailed) as caught:
                await agent.collect(step)
            assert str(caught.value).startswith(message)
            assert caught.value.__cause__ is BROKEN
        with pytest.raises(RewardFailed, match="3 of 10 reward requests have failed"):
            agent.submit(2, samples(1))
        await agent.close()

    run_virtual(body)
