"""Reward functions that fail for one sample, or never return: under each rule, with the rest intact.

The published agent hangs or trains on rubbish here: a call that raises, returns None or a wrong tuple hangs training,
NaN passes through, one call that never returns hangs the last mini-batch.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dataflow.errors import RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent
from tests.faults.rig.samples import check, left_out, run, samples, score_of

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]

GROUPS, N = 40, 4
BAD = (23, 2)
"""Group and sample of the one that fails."""


class Panic(BaseException):
    """As pyo3's PanicException, which code in Rust raises: no Exception."""


RESULTS: list[tuple[str, Any, str, bool]] = [
    ("raises", ValueError("boom"), r"raised ValueError: boom \(test_functions\.py:\d+\); correct it", True),
    ("panics", Panic("index"), "raised Panic: index", False),
    ("exits", SystemExit(3), "raised SystemExit: 3", True),
    ("cancelled", asyncio.CancelledError(), "raised CancelledError", True),
    ("None", None, "returned None; return a finite number", False),
    ("nan", math.nan, "returned nan; return a finite number", True),
    ("tuple", (1.0, "query"), "returned a tuple of 2; return a finite number, \\(score, query, explanation\\)", False),
    ("dict", {"score": "0.7"}, "returned a dict whose 'score' is a str; return", True),
]


def scorer(bad: Callable[[], Any], as_async: bool) -> Any:
    """Returns a function that does ``bad()`` for one sample, and scores the others as it should."""

    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        return bad() if extra_info["at"][1:] == BAD else float(ground_truth)

    @functools.wraps(score)
    async def later(**keywords: Any) -> Any:
        return score(**keywords)

    return later if as_async else score


def ending(result: Any) -> Callable[[], Any]:
    def bad() -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    return bad


@pytest.mark.parametrize(("result", "said", "as_async"), [row[1:] for row in RESULTS], ids=[row[0] for row in RESULTS])
def test_one_failure_ends_the_step_with_its_story_and_no_other(result: Any, said: str, as_async: bool) -> None:
    async def body() -> None:
        agent = RewardAgent(scorer(ending(result), as_async), limits=Limits(16), retry=Retry(tries=1))
        agent.submit(1, samples(1, range(GROUPS), N))
        agent.submit(2, samples(2, range(BAD[0]), N))
        collects = [asyncio.create_task(agent.collect(1, 1)) for _ in range(GROUPS)]
        ended = await asyncio.gather(*collects, return_exceptions=True)
        parts = [part for part in ended if not isinstance(part, BaseException)]
        for error in ended[len(parts) :]:
            assert isinstance(error, RewardFailed)
            with pytest.raises(RewardFailed, match=f"^sample 2 of group 23 of step 1: 'score' {said}"):
                raise error
        for part in parts:
            check(part, 1, N)
        assert len({group for part in parts for group in part.ids}) == len(parts) < GROUPS
        check(await agent.collect(2), 2, N)
        stats = agent.stats()
        assert stats["failed"] == 1
        assert stats["requested"] == stats["scored"] + stats["failed"] + stats["cancelled"]
        await agent.close()

    run(body())


@pytest.mark.parametrize("rule", ["score:-1", "drop_sample", "drop_group", "replace_group"])
def test_a_rule_takes_care_of_the_one_and_of_no_other(rule: str) -> None:
    async def body() -> None:
        agent = RewardAgent(scorer(lambda: math.nan, True), limits=Limits(16), on_failure=rule)
        agent.submit(1, samples(1, range(GROUPS), N), extra_groups=rule == "replace_group")
        rewards = await agent.collect(1)
        group, sample = BAD
        if rule == "replace_group":
            assert rewards.ids == tuple(g for g in range(GROUPS) if g != group)
            check(rewards, 1, N)
        else:
            assert rewards.ids == tuple(range(GROUPS))
            check(rewards.select([g for g in rewards.ids if g != group]), 1, N)
            got = rewards.select([group])["score"].tolist()
            right = [score_of(1, group, i) for i in range(N)]
            if rule == "score:-1":
                assert "kept" not in rewards
                assert got == [*right[:sample], -1.0, *right[sample + 1 :]]
            else:
                out = [BAD] if rule == "drop_sample" else [(group, i) for i in range(N)]
                assert left_out(rewards) == out
                assert [score for i, score in enumerate(got) if (group, i) not in out] == [
                    score for i, score in enumerate(right) if (group, i) not in out
                ]
        stats = agent.stats()
        assert rewards.meta["step"]["failed"] == stats["failed"] == 1
        assert stats["scored"] + stats["cancelled"] == GROUPS * N - 1
        assert (stats["waiting"], stats["running"]) == (0, 0)
        await agent.close()

    run(body())


@pytest.mark.parametrize(("as_async", "rule"), [(True, "fail"), (False, "drop_sample")], ids=["async", "sync"])
def test_a_call_that_never_returns_holds_up_nobody_for_ever(as_async: bool, rule: str) -> None:
    async def body() -> None:
        go = threading.Event()

        async def hangs(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
            return await asyncio.Event().wait() if extra_info["at"][1:] == (3, 1) else float(ground_truth)

        def blocks(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
            return go.wait(60) if extra_info["at"][1:] == (3, 1) else float(ground_truth)

        retry = Retry(tries=2, timeout_s=1.0, backoff_s=0.01, max_backoff_s=0.01)
        agent = RewardAgent(hangs if as_async else blocks, limits=Limits(4), retry=retry, on_failure=rule)
        agent.submit(1, samples(1, range(8)))
        first = await agent.collect(1, 7)
        check(first, 1)
        assert 3 not in first.ids, "the mini-batches that are whole do not wait for it"
        if rule == "drop_sample":
            last = await agent.collect(1)
            assert (last.ids, left_out(last)) == ((3,), [(3, 1)])
        else:
            story = r"^sample 1 of group 3 of step 1: '.*' gave no answer within 1 s on each of 2 tries"
            with pytest.raises(RewardFailed, match=f"{story}.*raise reward.timeout"):
                await agent.collect(1)
        await asyncio.sleep(0.01)  # a turn later the thread is counted
        stats = agent.stats()
        assert (stats["timed_out"], stats["retried"], stats["failed"]) == (2, 1, 1)
        assert stats["abandoned"] == (0 if as_async else 2), "threads cannot be stopped; they are counted"
        agent.submit(2, samples(2, range(4, 8)))
        check(await agent.collect(2), 2)
        go.set()
        await agent.close()

    run(body())


def test_threads_that_never_return_are_bounded() -> None:
    async def body() -> None:
        go = threading.Event()

        def stuck(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> None:
            go.wait(60)

        retry = Retry(tries=3, timeout_s=0.05, backoff_s=0.0)
        agent = RewardAgent(stuck, limits=Limits(4), retry=retry, on_failure="drop_sample", max_failed_share=1.0)
        agent.submit(1, samples(1, range(20)))
        story = r"5 calls of 'stuck' keep running after their time is over, more than reward\.max_abandoned=4 allows"
        with pytest.raises(RewardFailed, match=story):
            await agent.collect(1)
        with pytest.raises(RewardFailed, match=r"give its own requests a time-out, or raise reward\.timeout"):
            agent.submit(2, samples(2, range(1)))
        assert agent.stats()["abandoned"] <= 8, "no more than were in flight when it was too many"
        go.set()
        await agent.close()

    run(body())


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ExceptionGroup("a", [ExceptionGroup("b", [ConnectionResetError("gone")])]), True),
        (ExceptionGroup("calls", [ConnectionResetError("gone"), ValueError("bad")]), False),
    ],
    ids=["all may pass", "mixed"],
)
def test_a_group_of_errors_is_tried_again_if_all_that_it_holds_may_pass(error: Exception, again: bool) -> None:
    async def body() -> None:
        agent = RewardAgent(scorer(ending(error), True), retry=Retry(tries=2, backoff_s=0.0))
        agent.submit(1, samples(1, [BAD[0]], N))
        with pytest.raises(RewardFailed, match="ConnectionResetError: gone"):
            await agent.collect(1)
        assert agent.stats()["retried"] == int(again)
        await agent.close()

    run(body())
