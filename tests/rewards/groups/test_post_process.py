"""What the user's class does with whole groups: post_process_scores and log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dataflow.reward_agent import Limits, Retry
from tests.rewards.groups.group_rig import BROKEN, NONE, Reward, agent_of, fails, numbers, samples, scored
from tests.rigs.virtual_time import run_virtual

pytestmark = pytest.mark.timeout(60)


# --- post_process_scores -------------------------------------------------------------------------------------


def less_mean(scores: list[float]) -> list[float]:
    mean = sum(scores) / len(scores)
    return [score - mean for score in scores]


async def later(scores: list[float]) -> list[float]:
    await asyncio.sleep(3)
    return less_mean(scores)


def test_whole_groups_are_post_processed_in_sample_order() -> None:
    rewards, _agent = scored(Reward(_1_0=("after", 9, 5.0)), post_process_scores=later)
    assert rewards["score"].tolist() == pytest.approx([-0.05, 0.05, 1.95, -1.95, -0.05, 0.05])


class Compares(Reward):
    async def compute_group(self, samples: list[dict[str, Any]], scores: list[float]) -> list[float]:
        self.posted.append(scores)
        samples[0]["solution_str"] = "its own copy"
        return [float(sample["solution_str"]) + 10 for sample in samples[1:]] + [0.0]


def test_a_group_is_compared_with_its_samples() -> None:
    reward = Compares(_0_1=BROKEN)
    rewards, _agent = scored(reward, "drop_sample", groups=1, n=3)
    assert reward.posted == [[0.0, pytest.approx(0.2)]]
    assert rewards["score"].tolist()[0] == pytest.approx(10.2)
    assert rewards["score"].tolist()[2] == 0.0


def test_only_kept_samples_are_post_processed() -> None:
    reward = Reward(_0_1=BROKEN, _1_0=BROKEN)

    async def post(scores: list[float]) -> list[float]:
        reward.posted.append(scores)
        return [10.0 + score for score in scores]

    rewards, _agent = scored(reward, "drop_sample", groups=2, n=3, post_process_scores=post)
    assert sorted(reward.posted) == [[0.0, pytest.approx(0.2)], [pytest.approx(1.1), pytest.approx(1.2)]]
    assert rewards["kept"].tolist() == [True, False, True, False, True, True]
    assert numbers(rewards) == [
        10.0,
        NONE,
        *(pytest.approx(x) for x in (10.2,)),
        NONE,
        *map(pytest.approx, (11.1, 11.2)),
    ]


def test_a_wrong_number_of_scores_stops_the_step_under_every_rule() -> None:
    async def post(scores: list[float]) -> Any:
        return scores[1:]

    for rule in ("fail", "drop_group"):
        message = fails(Reward(), rule, groups=1, post_process_scores=post)
        assert message == (
            "group 0 of step 1: 'post' returned 1 scores for 2 samples; return a list of 2 finite numbers."
        )


def test_post_processing_that_raises_or_never_ends() -> None:
    async def broken(scores: list[float]) -> list[float]:
        raise KeyError("mine")

    async def never(scores: list[float]) -> list[float]:
        await asyncio.get_running_loop().create_future()
        return scores

    message = fails(Reward(), "score:0", post_process_scores=broken)
    assert message.startswith("group 0 of step 1: 'broken' raised KeyError: 'mine' (test_post_process.py:")
    assert message.endswith("; correct it, or catch the error there and return a score.")
    message = fails(Reward(), post_process_scores=never, retry=Retry(timeout_s=5.0))
    assert message.startswith("group 0 of step 1: 'never' gave no answer within 5 s")


def test_post_processing_takes_a_slot_and_goes_first_but_uses_no_request_a_minute() -> None:
    async def body() -> None:
        loop, reward = asyncio.get_running_loop(), Reward()
        agent = agent_of(reward, post_process_scores=later, limits=Limits(1, rpm=6))
        agent.submit(1, samples(2))
        first = await agent.collect(1, 1)
        assert first.ids == (0,)
        assert loop.time() == pytest.approx(10 + 3, abs=0.1), "2 requests, 10 s apart, and 3 s of post-processing"
        assert reward.begun == ["0.0", "0.1"], "the only slot was taken"
        await agent.collect(1)
        assert loop.time() == pytest.approx(30 + 3, abs=0.1)
        assert agent.stats()["peak"] == 1
        await agent.close()

    run_virtual(body)


# --- log -----------------------------------------------------------------------------------------------------


class Logging(Reward):
    """Records the arguments of its ``log``."""

    def __init__(self, **plan: Any) -> None:
        super().__init__(**plan)
        self.told: list[dict[str, Any]] = []

    async def log(self, timestamps: Any, queries: Any, results: Any, latencies: Any, group_uids: Any) -> None:
        self.told.append(
            {"at": timestamps, "queries": queries, "results": results, "latencies": latencies, "groups": group_uids}
        )


def test_the_log_is_told_of_all_that_is_collected() -> None:
    async def body() -> None:
        reward = Logging(_0_0=(0.5, "asked", "why"), _1_1=BROKEN)
        agent = agent_of(reward, "score:-1")
        agent.submit(1, samples(3))
        await agent.collect(1, 2, order="index")
        rest = await agent.collect(1)
        await asyncio.sleep(0.1)
        first, second = reward.told
        assert first["groups"] == [0, 0, 1, 1]
        assert first["queries"] == ["asked", None, None, None]
        assert first["results"] == pytest.approx([0.5, 0.1, 1.0, -1.0])
        assert len(first["at"]) == len(first["latencies"]) == 4
        assert second["groups"] == [2, 2]
        assert second["queries"] == [None, None], "no sample of these has one"
        assert second["at"] == [record["begin"] for record in rest.meta["records"]]
        assert second["latencies"] == rest.meta["latency_s"]
        await agent.close()

    run_virtual(body)


def test_a_log_that_fails_is_told_once_and_ends_nothing(logged: list[str]) -> None:
    class Failing(Reward):
        async def log(self, **columns: Any) -> None:
            raise KeyError("disk")

    async def body() -> None:
        agent = agent_of(Failing())
        agent.submit(1, samples(3))
        for _ in range(3):
            await agent.collect(1, 1)
        await asyncio.sleep(0.1)
        assert agent.stats()["failed"] == 0
        await agent.close()

    run_virtual(body)
    assert len(logged) == 1
    assert logged[0].startswith("WARNING reward log: 'log' raised KeyError: 'disk' (test_post_process.py:")
    assert logged[0].endswith("; the run continues.\n")
