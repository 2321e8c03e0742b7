"""Rates: requests per minute, on a virtual clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.rates import Rates
from tests.rewards.limits.limit_rig import Rig, tokens_of
from tests.rigs.virtual_time import run_virtual

pytestmark = pytest.mark.timeout(60)


# --- requests a minute ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rpm", [1, 3, 10, 59, 60, 61, 90, 600, 0.5])
def test_no_minute_holds_more_requests_than_allowed(rpm: float) -> None:
    async def body() -> None:
        rig = Rig(Limits(1000, rpm=rpm))
        count = math.ceil(4 * rpm)
        rig.push(count)
        await asyncio.sleep(60 * 4 + 180)
        assert len(rig.begun) == count
        assert rig.most_in_a_minute() <= max(1, rpm)
        # And hardly less: a limit is also what may be had.
        assert rig.times()[-1] <= 60 * count / rpm * 1.02 + 1

    run_virtual(body)


def test_a_pause_between_saves_nothing_up() -> None:
    async def body() -> None:
        rig = Rig(Limits(1000, rpm=120))
        for at in (0, 30, 45, 500, 505, 560):
            rig.loop.call_at(at, rig.push, 100)
        await asyncio.sleep(900)
        assert len(rig.begun) == 600
        assert rig.most_in_a_minute() <= 120

    run_virtual(body)


def test_a_permit_at_hand_while_the_line_is_paused_is_not_one_more() -> None:
    async def body() -> None:
        rig = Rig(Limits(1000, rpm=6))
        rig.push(40)
        await rig.settle()
        rig.limiter.queues[""].pause(37.0)  # one permit comes meanwhile, and waits
        await asyncio.sleep(600)
        assert len(rig.begun) == 40
        assert rig.most_in_a_minute() <= 6

    run_virtual(body)


def test_the_rates_of_an_endpoint_and_of_the_whole_both_hold() -> None:
    async def body() -> None:
        rig = Rig(Limits(1000, rpm=60, endpoints={"a": Limits(1000, rpm=12), "b": Limits(1000, rpm=100)}))
        for endpoint in ("a", "b", ""):
            rig.push(60, endpoint=endpoint)
        await asyncio.sleep(1000)
        assert len(rig.begun) == 180
        assert rig.most_in_a_minute() <= 60
        assert rig.most_in_a_minute(endpoint="a") <= 12
        assert rig.times()[-1] <= 60 * 5 + 10, "a's 60 take 5 minutes; all others fit in beside them"

    run_virtual(body)


def test_the_whole_holds_with_more_lines_than_slots() -> None:
    async def body() -> None:
        names = "abcdef"
        rig = Rig(Limits(1, rpm=30, endpoints={name: Limits(1, rpm=30) for name in names}))
        for name in names:
            rig.push(20, endpoint=name, seconds=0.5)
        rig.push(1, seconds=45.0)  # each queue has a permit at hand while this one holds the only slot
        await asyncio.sleep(60 * 8)
        assert len(rig.begun) == 121
        assert rig.most_in_a_minute() <= 30
        assert rig.most["all"] == 1

    run_virtual(body)


def test_a_permit_outlives_the_item_it_was_fetched_for() -> None:
    async def body() -> None:
        rig = Rig(Limits(1000, rpm=6))
        rig.push(1)
        items = rig.push(3)
        await asyncio.sleep(5)
        items[0].wanted = False
        await asyncio.sleep(5.5)
        assert [item for _at, item in rig.begun[1:]] == [items[1]], (
            "at once with the permit, which was not for one only"
        )
        items[2].wanted = False  # nobody is left when the next permit comes
        await asyncio.sleep(30)
        rig.push(1)
        await asyncio.sleep(11)
        assert len(rig.begun) == 3
        assert rig.most_in_a_minute() <= 6

    run_virtual(body)


def test_an_older_request_that_comes_while_a_permit_is_fetched_takes_it() -> None:
    async def body() -> None:
        rig = Rig(Limits(1000, rpm=6))
        rig.push(1, step=1)
        rig.push(2, step=5)
        await asyncio.sleep(5)
        rig.push(1, step=1)
        await asyncio.sleep(100)
        assert [item.priority[1] for _at, item in rig.begun] == [1, 1, 5, 5]

    run_virtual(body)


# --- anything in any order -----------------------------------------------------------------------------------

pushes = st.lists(
    st.tuples(
        st.integers(0, 100),  # when
        st.integers(1, 3),  # step
        st.sampled_from(["", "a", "b"]),
        st.integers(0, 120),  # tokens
        st.sampled_from([0.0, 0.5, 7.0]),  # seconds
        st.sampled_from([True, True, True, False]),  # still wanted
    ),
    min_size=1,
    max_size=40,
)


@given(
    pushes,
    st.integers(1, 5),
    st.none() | st.integers(5, 200),
    st.none() | st.integers(120, 2000),
    st.none() | st.integers(5, 200),
    st.lists(st.tuples(st.integers(0, 100), st.sampled_from(["", "a"]), st.integers(1, 40)), max_size=3),
)
def test_everything_wanted_starts_and_no_limit_is_passed(
    plan: list[tuple[int, int, str, int, float, bool]],
    slots: int,
    rpm: float | None,
    tpm: float | None,
    own_rpm: float | None,
    pauses: list[tuple[int, str, int]],
) -> None:
    async def body() -> None:
        endpoints: Mapping[str, Limits] = {"a": Limits(2, rpm=own_rpm), "b": Limits(64)}
        rig = Rig(Limits(slots, rpm=rpm, tpm=tpm, endpoints=endpoints))
        wanted = 0
        for at, step, endpoint, tokens, seconds, stays in plan:
            push = partial(rig.push, step=step, endpoint=endpoint, tokens=tokens, seconds=seconds, wanted=stays)
            rig.loop.call_at(at, push)
            wanted += stays
        for at, name, seconds in pauses:
            rig.loop.call_at(at, rig.limiter.queues[name].pause, seconds)
        await asyncio.sleep(60 * 250)
        assert len(rig.begun) == wanted == rig.ended
        assert rig.limiter.running == 0
        assert all(queue.running == 0 for queue in rig.limiter.queues.values())
        assert rig.most["all"] <= slots
        assert rig.most["a"] <= 2
        assert rig.most_in_a_minute() <= (rpm or math.inf)
        assert rig.most_in_a_minute(endpoint="a") <= (own_rpm or math.inf)
        assert rig.most_in_a_minute(tokens_of) <= (tpm or math.inf)
        rig.limiter.close()

    run_virtual(body)


def test_rates_are_shared_in_turn() -> None:
    async def body() -> None:
        rates, order = Rates(None, 600), []

        async def take(name: str, tokens: int) -> None:
            await rates.acquire(tokens)
            await asyncio.sleep(0)
            order.append(name)
            rates.begin(tokens)

        await asyncio.gather(take("first", 50), take("large", 50), take("small", 1), take("none", 0))
        assert order == ["first", "large", "small", "none"]

    run_virtual(body)


@pytest.mark.parametrize("why", ["paused", "not wanted", "limit"])
def test_a_permit_that_a_line_cannot_use_is_left_to_the_others(why: str) -> None:
    async def body() -> None:
        rig = Rig(Limits(1, rpm=60, endpoints={"a": Limits(1, adaptive=True), "b": Limits(1)}))
        rig.push(1, seconds=30.0)
        item = rig.push(1, endpoint="a")[0]
        await asyncio.sleep(5)  # a has the permit at hand, and no slot
        rig.push(1, step=2, endpoint="b")
        queue = rig.limiter.queues["a"]
        if why == "paused":
            queue.pause(1000.0)
        elif why == "not wanted":
            item.wanted = False
        else:
            queue.limit = 0.0
        await asyncio.sleep(60)
        assert rig.times("b") == pytest.approx([30.0], abs=0.1)
        assert rig.times("a") == []
        rig.limiter.close()

    run_virtual(body)


def test_what_is_dropped_takes_nothing() -> None:
    async def body() -> None:
        rates, loop = Rates(60, 600), asyncio.get_running_loop()
        for _ in range(100):
            await rates.acquire(50)
            rates.drop()
        assert loop.time() < 6, "it was paid for once at most"
        for _ in range(60):
            await rates.acquire(1)
            rates.begin(1)
        assert loop.time() <= 60 + 1

    run_virtual(body)
