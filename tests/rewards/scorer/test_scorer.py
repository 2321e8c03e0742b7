"""The life of a scoring job: tries, backoff, time-outs and deadlines, on a virtual clock."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.retry import Retry
from dataflow.rewards.scorer import BadScore
from dataflow.usercode.calls import GRACE_S
from dataflow.usercode.failures import TimedOut
from tests.rewards.scorer.scorer_rig import AT_ONCE, BUSY, FOR_EVER, LOST, Does, Rig, error, life, lives, run_life
from tests.rigs.logs import logged
from tests.rigs.virtual_time import timers

pytestmark = pytest.mark.timeout(60)


# --- tries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "score", "extras"),
    [
        (2, 2.0, {}),
        (True, 1.0, {}),
        ((0.5, "asked", "why"), 0.5, {"query": "asked", "explanation": "why"}),
        ({"score": -1, "tokens": 7}, -1.0, {"tokens": 7}),
    ],
)
def test_a_first_try_that_scores(result: Any, score: float, extras: dict[str, Any]) -> None:
    rig, told = life(Does(3.0, result))
    assert (told.score, told.extras, told.how) == (score, extras, "")
    assert told.at == pytest.approx(3.0, abs=1e-3)
    assert (rig.jobs["a"].tries, rig.scorer.counts) == (1, {})


def test_tries_until_one_succeeds_and_the_waits_between_them_double() -> None:
    rig, told = life(
        Does(1.0, error=LOST),
        Does(1.0, error=BUSY),
        Does(1.0, error=LOST),
        Does(1.0, 5.0),
        retry=Retry(tries=4, backoff_s=8.0, max_backoff_s=100.0),
    )
    assert told.score == 5.0
    assert rig.jobs["a"].tries == 4
    assert rig.scorer.counts == {"retried": 3, "throttled": 1}
    waits = [b - a - 1.0 for a, b in zip(rig.times("a"), rig.times("a")[1:], strict=False)]
    assert all(-1e-3 <= wait <= most + 1e-3 for wait, most in zip(waits, (8, 16, 32), strict=True))
    assert len(set(waits)) == 3, "random"


def test_a_slot_is_free_while_an_ask_waits_for_its_next_try() -> None:
    rig = lives(
        {"a": [Does(1.0, error=error(ConnectionError, retry_after=50.0)), Does(1.0)], "b": [Does(10.0)]},
        limits=Limits(1),
        retry=Retry(**AT_ONCE),
    )
    assert rig.most == 1
    assert rig.told["b"].at == pytest.approx(11.0, abs=1e-3)
    assert rig.told["a"].at == pytest.approx(52.0, abs=1e-3)


def test_an_ask_that_is_tried_again_goes_before_all_that_came_later() -> None:
    rig = lives(
        {"a": [Does(1.0, error=LOST), Does(1.0)], **{name: [Does(1.0)] for name in "bcd"}},
        limits=Limits(1),
        retry=Retry(**AT_ONCE),
    )
    assert [name for _at, name in rig.begun] == ["a", "b", "a", "c", "d"]


def test_a_value_that_is_no_score_is_final_unless_the_predicate_retries_it() -> None:
    rig, told = life(Does(result=math.nan), retry=Retry(**AT_ONCE))
    assert isinstance(told.error, BadScore)
    assert told.story == (
        "'compute_score' returned nan; return a finite number, (score, query, explanation) or a dict with 'score'."
    )
    assert rig.jobs["a"].tries == 1
    again = Retry(predicate=lambda error: isinstance(error, BadScore), **AT_ONCE)
    rig, told = life(Does(result=math.nan), Does(result=3), retry=again)
    assert (told.score, rig.jobs["a"].tries) == (3.0, 2)


@pytest.mark.parametrize(
    "fails",
    [ValueError("no"), error(status=404), error(status=503, retry=False), asyncio.CancelledError(), SystemExit(3)],
    ids=["ValueError", "404", "retry=False", "CancelledError", "SystemExit"],
)
def test_an_error_that_will_not_change_is_not_tried_again(fails: BaseException) -> None:
    rig, told = life(Does(error=fails), Does())
    assert told.error is fails or isinstance(told.error, type(fails))
    assert rig.jobs["a"].tries == 1
    assert "on each of" not in told.story


def test_a_fatal_error_is_never_tried_again() -> None:
    fatal = error(status=503, fatal=True, retry=True, fix="give it more money")
    rig, told = life(Does(error=fatal), Does(), retry=Retry(predicate=lambda _error: True))
    assert told.error is fatal
    assert rig.jobs["a"].tries == 1
    assert told.story.endswith("; give it more money.")


@pytest.mark.parametrize("raises", [KeyError("mine"), SystemExit(1)], ids=lambda error: type(error).__name__)
def test_a_predicate_that_raises_ends_the_ask_with_its_own_error(raises: BaseException) -> None:
    def predicate(_error: BaseException) -> bool:
        raise raises

    rig, told = life(Does(error=LOST), Does(), retry=Retry(predicate=predicate))
    assert told.error is raises
    assert f"the predicate for retries raised {type(raises).__name__}" in told.story
    assert rig.jobs["a"].tries == 1


# --- stories -------------------------------------------------------------------------------------------------


def test_the_story_of_tries_that_all_failed_alike() -> None:
    _rig, told = life(Does(2.0, error=LOST), retry=Retry(tries=3, **AT_ONCE))
    assert told.story.startswith("'compute_score' raised ConnectionResetError: reset (scorer_rig.py:")
    assert " on each of 3 tries (last: 2.0 s); " in told.story


def test_the_story_of_tries_that_failed_each_in_its_own_way() -> None:
    _rig, told = life(
        Does(error=LOST), Does(error=BUSY), Does(4.0, error=error(ValueError, "no")), retry=Retry(tries=3, **AT_ONCE)
    )
    assert told.story.startswith(
        "'compute_score' failed on each of 3 tries: ConnectionResetError, HTTP 503, ValueError; it raised ValueError: "
    )
    assert "(last: 4.0 s); correct it, or catch the error there and return a score." in told.story


def test_the_story_of_a_time_out() -> None:
    rig, told = life(FOR_EVER, retry=Retry(tries=2, timeout_s=30.0, **AT_ONCE))
    assert told.story == (
        "'compute_score' gave no answer within 30 s on each of 2 tries (last: 30.0 s); "
        "raise reward.timeout, or find out what delays the call."
    )
    assert told.at == pytest.approx(60.0, abs=1e-3)
    assert rig.scorer.counts == {"timed_out": 2, "retried": 1}


def test_the_story_of_a_deadline() -> None:
    _rig, told = life(
        Does(1.0, error=LOST), Does(1.0, error=BUSY), retry=Retry(tries=99, deadline_s=5.5, timeout_s=None, **AT_ONCE)
    )
    assert "it gave no answer within 0.49" in told.story
    assert "; its deadline of 5.5 s leaves no time for another; " in told.story
    assert told.at == pytest.approx(5.5, abs=1e-3)


def test_no_try_is_begun_whose_wait_alone_passes_the_deadline() -> None:
    rig, told = life(Does(1.0, error=error(status=429, retry_after=60.0)), retry=Retry(deadline_s=30.0))
    assert "; its deadline of 30 s leaves no time for another; " in told.story
    assert told.at == pytest.approx(1.0, abs=1e-3), "it is told at once"
    assert rig.jobs["a"].tries == 1


# --- times ---------------------------------------------------------------------------------------------------


def test_a_try_takes_what_the_deadline_leaves_of_its_time() -> None:
    rig, told = life(FOR_EVER, retry=Retry(tries=9, timeout_s=10.0, deadline_s=25.0, **AT_ONCE))
    assert rig.times("a") == pytest.approx([0, 10, 20], abs=1e-2)
    assert told.at == pytest.approx(25.0, abs=1e-2)
    assert isinstance(told.error, TimedOut)


def test_first_tries_share_a_timer_whatever_bounds_them() -> None:
    for retry in (Retry(timeout_s=None, deadline_s=50.0), Retry(timeout_s=99.0, deadline_s=50.0)):
        late: list[float] = []

        async def look(_rig: Rig, late: list[float] = late) -> None:
            await asyncio.sleep(3.5)
            late += [at for at in timers() if at > 10.0]

        rig = lives({str(i): [Does(1.0)] for i in range(50)}, look, limits=Limits(10), retry=retry)
        assert late == [pytest.approx(50.0, abs=1.0)]
        assert all(told.score == 1.0 for told in rig.told.values())


def test_neither_time_out_nor_deadline() -> None:
    _rig, told = life(Does(1e6, error=LOST), Does(1e6), retry=Retry(timeout_s=None, deadline_s=None, **AT_ONCE))
    assert told.score == 1.0
    assert told.at == pytest.approx(2e6)


def test_time_in_line_before_the_first_try_does_not_count() -> None:
    rig = lives(
        {"a": [Does(50.0)], "b": [Does(50.0)], "c": [Does(50.0)]}, limits=Limits(1), retry=Retry(deadline_s=60.0)
    )
    assert all(told.score == 1.0 for told in rig.told.values())


# --- Retry-After ---------------------------------------------------------------------------------------------


def test_retry_after_of_a_throttle_pauses_the_line() -> None:
    rig = lives(
        {"a": [Does(1.0, error=error(status=429, retry_after=20.0)), Does(1.0)], **{n: [Does(1.0)] for n in "bc"}},
        limits=Limits(1),
        retry=Retry(**AT_ONCE),
    )
    assert [at for at, _name in rig.begun] == pytest.approx([0, 21, 22, 23], abs=1e-2)
    assert rig.told["a"].score == 1.0


def test_a_long_pause_is_said_once() -> None:
    def busy(seconds: float) -> list[Does]:
        return [Does(1.0, error=error(status=429, retry_after=seconds)), Does(1.0)]

    for seconds, said in ((90.0, 1), (20.0, 0)):
        with logged() as lines:
            lives({name: busy(seconds) for name in "abc"}, limits=Limits(3), retry=Retry(**AT_ONCE))
        assert len(lines) == said, lines
        assert all("asks for a pause of 90 s (Retry-After)" in line for line in lines)


def test_retry_after_of_another_error_holds_up_nobody_else() -> None:
    rig = lives(
        {"a": [Does(1.0, error=error(status=500, retry_after=20.0)), Does(1.0)], "b": [Does(1.0)]},
        limits=Limits(1),
        retry=Retry(**AT_ONCE),
    )
    assert rig.times("b") == pytest.approx([1], abs=1e-2)
    assert rig.times("a") == pytest.approx([0, 21], abs=1e-2)


def test_only_the_endpoint_that_throttles_is_paused() -> None:
    async def more(rig: Rig) -> None:
        rig.ask("b", endpoint="other")

    plan = {"a": [Does(1.0, error=error(status=429, retry_after=20.0)), Does(1.0)], "b": [Does(5.0), Does(5.0)]}

    async def body() -> None:
        rig = Rig(plan, Limits(4, endpoints={"one": Limits(1), "other": Limits(1)}), Retry(**AT_ONCE))
        rig.ask("a", endpoint="one")
        await asyncio.sleep(2)
        await more(rig)
        await rig.end()
        assert rig.times("b") == pytest.approx([2], abs=1e-2)
        assert rig.times("a") == pytest.approx([0, 21], abs=1e-2)

    run_life(body)


def test_a_server_that_is_away_for_longer_than_the_deadline_keeps_nobody_waiting_for_ever() -> None:
    away = Does(1.0, error=error(status=429, retry_after=1e8))
    rig = lives({name: [away] for name in "abc"}, limits=Limits(1), retry=Retry(deadline_s=100.0))
    for told in rig.told.values():
        assert "its deadline of 100 s leaves no time for another" in told.story
    assert rig.loop.time() < 400


# --- tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [0, 10])
def test_what_a_call_used_counts_for_those_behind_it(said: int) -> None:
    async def body() -> None:
        used = [Does(0.1, {"score": 1, "tokens": 300})]
        rig = Rig({str(i): used for i in range(6)}, Limits(1, tpm=600), Retry(**AT_ONCE))
        rig.ask(tokens=said)
        await rig.end()
        assert rig.loop.time() >= 120, "1,800 tokens at 600 a minute, though few or none were said"
        rig.limiter.close()

    run_life(body)


# --- adaptive ------------------------------------------------------------------------------------------------


def test_time_outs_and_throttles_lower_an_adaptive_limit_and_lost_races_do_not_raise_it() -> None:
    rig = lives(
        {str(i): [Does(1.0, error=BUSY), Does(1.0)] for i in range(10)},
        limits=Limits(10, adaptive=True),
        retry=Retry(**AT_ONCE),
    )
    limits = [limit for _at, _name, limit in rig.limiter.changes()]
    assert limits[0] == 7
    assert rig.most == 10

    async def drop(rig: Rig) -> None:
        rig.limiter.queues[""].limit = 2.0
        await asyncio.sleep(1)
        for name in "ab":
            rig.drop(name)
            rig.told[name].times = 1
        await asyncio.sleep(GRACE_S)
        assert rig.limiter.queues[""].limit == 2.0, "that they were cancelled says nothing of the service"

    lives({"a": [FOR_EVER], "b": [FOR_EVER]}, drop, limits=Limits(4, adaptive=True))


def test_an_ask_that_stands_in_line_for_another_try_is_given_up_at_its_deadline() -> None:
    rig = lives(
        {"a": [Does(1.0, error=BUSY), Does()], "b": [Does(100.0)]},
        limits=Limits(1),
        retry=Retry(tries=2, deadline_s=30.0, timeout_s=None, backoff_s=3.0, max_backoff_s=3.0),
    )
    told = rig.told["a"]
    assert told.at == pytest.approx(30.0, abs=1e-2)
    assert len(rig.times("a")) == 1, "no call is begun that has no time"
    assert "; its deadline of 30 s passed while it was queued for another; " in told.story
    assert told.error is BUSY
