"""Hedges, cancelled jobs, and events of a job in any order, on a virtual clock."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import ConfigError
from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.retry import Retry
from dataflow.usercode.failures import TimedOut
from tests.rewards.scorer.scorer_rig import AT_ONCE, BUSY, FOR_EVER, LOST, Does, Rig, error, life, lives, run_life

pytestmark = pytest.mark.timeout(60)


# --- hedges --------------------------------------------------------------------------------------------------


def test_the_second_call_wins_and_the_first_is_cancelled() -> None:
    rig, told = life(FOR_EVER, Does(2.0, 7.0), hedge_after=5.0)
    assert (told.score, told.how) == (7.0, "hedged")
    assert rig.times("a") == pytest.approx([0, 5], abs=1e-3)
    assert told.at == pytest.approx(7.0, abs=1e-3)
    assert rig.cancelled == {"a": 1}
    assert (rig.jobs["a"].tries, rig.scorer.counts) == (1, {"hedged": 1})


def test_the_first_call_wins_and_the_second_is_cancelled() -> None:
    rig, told = life(Does(6.0, 3.0), FOR_EVER, hedge_after=5.0)
    assert (told.score, told.how) == (3.0, "")
    assert told.at == pytest.approx(6.0, abs=1e-3)
    assert rig.cancelled == {"a": 1}


def test_a_call_that_is_quick_enough_has_no_second() -> None:
    rig, _told = life(Does(4.9), hedge_after=5.0)
    assert len(rig.begun) == 1
    assert rig.scorer.counts == {}


@pytest.mark.parametrize("fails", [LOST, ValueError("no")], ids=["transient", "final"])
def test_the_first_fails_while_its_hedge_lives(fails: Exception) -> None:
    rig, told = life(Does(6.0, error=fails), Does(9.0, 7.0), hedge_after=5.0)
    assert (told.score, told.how) == (7.0, "hedged")
    assert told.at == pytest.approx(14.0, abs=1e-3)
    assert rig.scorer.counts == {"hedged": 1}
    assert rig.jobs["a"].tries == 1


def test_the_hedge_fails_while_the_first_lives() -> None:
    rig, told = life(Does(20.0, 3.0), Does(1.0, error=ValueError()), hedge_after=5.0)
    assert (told.score, told.how) == (3.0, "")
    assert len(rig.begun) == 2, "one hedge a try"


def test_both_fail_and_the_next_try_is_hedged_anew() -> None:
    rig, told = life(
        Does(6.0, error=LOST),
        Does(6.0, error=LOST),
        FOR_EVER,
        Does(1.0, 7.0),
        hedge_after=5.0,
        retry=Retry(tries=2, **AT_ONCE),
    )
    assert (told.score, told.how) == (7.0, "hedged")
    assert rig.times("a") == pytest.approx([0, 5, 11, 16], abs=1e-2)
    assert rig.scorer.counts == {"hedged": 2, "retried": 1}
    assert rig.jobs["a"].tries == 2


def test_a_hedge_that_still_stands_in_line_becomes_the_next_try() -> None:
    rig = lives(
        {"a": [Does(6.0, error=LOST), Does(1.0, 7.0)], "b": [Does(8.0)]},
        limits=Limits(2),
        hedge_after=5.0,
        retry=Retry(backoff_s=50.0, max_backoff_s=50.0),
    )
    assert rig.told["a"].score == 7.0
    assert rig.told["a"].how == ""
    assert rig.times("a") == pytest.approx([0, 6], abs=1e-2)
    assert rig.jobs["a"].tries == 2
    assert rig.scorer.counts["retried"] == 1


@pytest.mark.parametrize(("fails", "tries"), [(ValueError("no"), 4), (LOST, 1)], ids=["final", "no tries left"])
def test_a_hedge_in_line_is_not_begun_for_an_ask_that_is_given_up(fails: Exception, tries: int) -> None:
    rig = lives(
        {"a": [Does(6.0, error=fails), Does()], "b": [Does(8.0)]},
        limits=Limits(2),
        hedge_after=5.0,
        retry=Retry(tries=tries),
    )
    assert rig.told["a"].error is fails
    assert rig.told["a"].at == pytest.approx(6.0, abs=1e-2)
    assert len(rig.times("a")) == 1


def test_the_first_wins_while_its_hedge_stands_in_line() -> None:
    rig = lives({"a": [Does(7.0, 3.0), Does()], "b": [Does(20.0)]}, limits=Limits(2), hedge_after=5.0)
    assert rig.told["a"].score == 3.0
    assert len(rig.times("a")) == 1
    assert len(rig.times("b")) == 2, "b is hedged in the slot that a left"


def test_no_hedge_before_there_are_enough_latencies() -> None:
    plan = {f"{i:02}": [Does(1.0)] for i in range(19)}
    rig = lives(plan | {"slow": [Does(50.0)]}, hedge_after="p95")
    assert "hedged" not in rig.scorer.counts
    rig = lives(
        plan | {"19": [Does(1.0)], "20": [Does(1.0)], "slow": [FOR_EVER, Does(1.0, 7.0)]},
        limits=Limits(2),
        hedge_after="p90",
    )
    assert rig.told["slow"].how == "hedged"
    assert rig.scorer.counts == {"hedged": 1}


def test_the_percentile_is_of_what_first_calls_take() -> None:
    """One call in ten is very slow; if the hedges that win against it counted as quick, more would be hedged."""

    async def body() -> None:
        plan = {str(i): [Does(100.0 if i % 10 == 0 else 1.0 + i % 10 / 10), Does(1.0)] for i in range(600)}
        rig = Rig(plan, Limits(1), Retry(**AT_ONCE), hedge_after="p85")
        rig.limiter.limits = Limits(4)
        rig.limiter.queues[""].limit = 4.0
        rig.ask()
        await rig.end()
        assert rig.scorer.counts["hedged"] <= 600 * 0.13
        plan["alone"] = [Does(100.0), Does(1.0)]
        rig.ask("alone")
        await rig.end()
        first, hedge = rig.times("alone")
        assert hedge - first == pytest.approx(1.9, abs=0.05)

    run_life(body)


def test_a_hedge_that_is_cut_off_by_the_deadline() -> None:
    rig, told = life(FOR_EVER, hedge_after=5.0, retry=Retry(timeout_s=30.0, deadline_s=20.0))
    assert told.at == pytest.approx(20.0, abs=1e-2)
    assert isinstance(told.error, TimedOut)
    assert rig.scorer.counts["timed_out"] == 2


def test_when_to_hedge_must_make_sense() -> None:
    async def body() -> None:
        with pytest.raises(ConfigError, match=r"reward\.hedge_after=p0"):
            Rig({}, hedge_after="p0")

    run_life(body)


# --- drop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0.0, 0.5, 5.5, 6.5, 20.0])
def test_an_ask_that_is_dropped_ends_its_calls_and_comes_to_nothing(at: float) -> None:
    """In line, in its first call, with a hedge, and between two tries."""

    async def drop(rig: Rig) -> None:
        await asyncio.sleep(at)
        rig.drop("a")
        begun = len(rig.times("a"))
        rig.told["a"].times = 1
        await asyncio.sleep(500)
        assert len(rig.times("a")) == begun, "nothing begins for it any more"
        assert rig.told["a"].times == 1

    rig = lives(
        {"a": [Does(6.0, error=LOST), Does(6.0, error=LOST), FOR_EVER], "b": [Does(30.0)], "c": [Does(1.0)]},
        drop,
        hedge_after=5.0,
        limits=Limits(3),
        retry=Retry(backoff_s=200.0, max_backoff_s=200.0),
    )
    assert rig.told["c"].score == rig.told["b"].score == 1.0


def test_a_slot_of_a_dropped_ask_goes_to_the_next() -> None:
    async def drop(rig: Rig) -> None:
        await asyncio.sleep(3)
        rig.drop("a")
        rig.told["a"].times = 1

    rig = lives({"a": [FOR_EVER], "b": [Does(1.0)]}, drop, limits=Limits(1))
    assert rig.times("b") == pytest.approx([3], abs=1e-2)


# --- anything in any order -----------------------------------------------------------------------------------

ERRORS = st.sampled_from([None, None, None, LOST, BUSY, ValueError("no"), error(status=429, retry_after=3.0)])
DOES = st.builds(
    Does,
    seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, 8.0, math.inf]),
    result=st.sampled_from([1.0, {"score": 2, "tokens": 5}, None]),
    error=ERRORS,
)


@given(
    st.lists(st.lists(DOES, min_size=1, max_size=4), min_size=1, max_size=8),
    st.dictionaries(st.integers(0, 7), st.sampled_from([0.0, 1.0, 2.5, 6.0]), max_size=3),
    st.integers(1, 4),
    st.none() | st.sampled_from([2.0, 5.0]),
    st.none() | st.just(30),
    st.booleans(),
    st.integers(1, 3),
)
def test_each_ask_ends_once_and_all_slots_are_free_in_the_end(
    does: list[list[Does]],
    drops: dict[int, float],
    slots: int,
    hedge_after: float | None,
    rpm: float | None,
    adaptive: bool,
    tries: int,
) -> None:
    async def body() -> None:
        rig = Rig(
            {str(i): list(calls) for i, calls in enumerate(does)},
            Limits(slots, rpm=rpm, adaptive=adaptive),
            Retry(tries=tries, timeout_s=6.0, deadline_s=20.0, backoff_s=0.5),
            hedge_after,
        )
        rig.ask()
        for i, at in drops.items():
            if str(i) in rig.told:
                rig.loop.call_later(at, rig.drop, str(i))
        await asyncio.sleep(2000)
        rig.idle()
        for name, told in rig.told.items():
            ask = rig.jobs[name]
            assert told.times == 1 or int(name) in drops
            assert ask.tries <= tries
            assert len(rig.times(name)) <= 2 * tries
            assert (told.score is None) == bool(told.story) or not told.times
        assert rig.most <= slots
        called = sum(ask.tries for ask in rig.jobs.values()) + rig.scorer.counts["hedged"]
        assert called - len(drops) <= len(rig.begun) <= called, "less those that were dropped before they ran"
        assert rig.scorer.counts["retried"] >= sum(max(0, ask.tries - 1) for ask in rig.jobs.values())
        rig.limiter.close()
        await rig.calls.close()

    run_life(body)
