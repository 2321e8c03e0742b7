"""Rates: tokens per minute, estimated before a call and corrected after it, on a virtual clock."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.queues import EndpointQueue
from dataflow.rewards.limits.rates import Meter, Rates
from dataflow.system import clock
from tests.rewards.limits.limit_rig import MINUTE, Item, Rig, tokens_of
from tests.rigs.virtual_time import run_virtual

pytestmark = pytest.mark.timeout(60)


# --- tokens a minute -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[1], [10, 90], [100, 1, 1, 1], [500], [83, 84], [1000]])
def test_no_minute_holds_more_tokens_than_allowed(sizes: list[int]) -> None:
    async def body() -> None:
        rig = Rig(Limits(1000, tpm=1000))
        total = 0
        while total < 4000:
            for size in sizes:
                total += size
                rig.push(1, tokens=size)
        await asyncio.sleep(60 * 8)
        assert sum(item.tokens for _at, item in rig.begun) == total
        assert rig.most_in_a_minute(tokens_of) <= 1000
        assert rig.times()[-1] <= 60 * (total / 1000) * 1.12 + 5

    run_virtual(body)


def test_a_request_larger_than_a_minute_goes_alone_and_takes_as_many() -> None:
    async def body() -> None:
        rig = Rig(Limits(1000, tpm=600))
        rig.push(1, tokens=10)
        rig.push(2, tokens=1800)
        rig.push(1, tokens=1)
        await asyncio.sleep(1000)
        small, first, second, last = rig.times()
        assert first >= small + MINUTE, "nothing else counts when it begins"
        assert second - first >= 180 - 1e-3, "3 minutes' worth"
        assert last - second >= 180 - 1e-3
        assert last <= 600

    run_virtual(body)


class Wrong(Rig):
    """Each call uses another number of tokens than estimated, which is known when it ends."""

    used = 100

    def end(self, item: Item, queue: EndpointQueue, begun: float, **how: Any) -> None:
        super().end(item, queue, begun, extra_tokens=self.used - item.tokens, **how)


@pytest.mark.parametrize("slots", [1, 4])
def test_tokens_beyond_the_estimate_are_owed(slots: int) -> None:
    async def body() -> None:
        rig = Wrong(Limits(slots, tpm=600))
        rig.push(60, tokens=10, seconds=0.1)
        await asyncio.sleep(60 * 11)
        assert len(rig.begun) == 60, "6,000 tokens at 600 a minute, though 600 were said"
        assert rig.most_in_a_minute(lambda _item: rig.used) <= 600 + (slots - 1) * 90, "unless it was not known yet"
        assert 9 * 60 <= rig.times()[-1] <= 10 * 60

    run_virtual(body)


@pytest.mark.parametrize("slots", [1, 64])
def test_an_estimate_that_was_too_high_is_given_back(slots: int) -> None:
    async def body() -> None:
        rig = Wrong(Limits(slots, tpm=600))
        rig.used = 10
        rig.push(120, tokens=50, seconds=0.1)
        await asyncio.sleep(600)
        assert len(rig.begun) == 120
        assert rig.most_in_a_minute(lambda _item: rig.used) <= 600
        assert rig.times()[-1] <= 150, "1,200 tokens were used, 6,000 said"

    run_virtual(body)


def test_what_an_old_call_did_not_use_makes_no_room_now() -> None:
    async def body() -> None:
        rig = Rig(Limits(1000, tpm=600))
        queue = rig.limiter.queues[""]
        rig.push(1, tokens=600, seconds=math.inf)
        await asyncio.sleep(100)
        rig.push(1, tokens=600, seconds=math.inf)
        await asyncio.sleep(55)
        rig.limiter.release(queue, clock.now() - 155, extra_tokens=-600)
        rig.push(1, tokens=600, seconds=math.inf)
        await asyncio.sleep(4)
        assert len(rig.begun) == 2
        await asyncio.sleep(200)
        assert rig.most_in_a_minute(tokens_of) <= 600

    run_virtual(body)


def test_a_larger_one_does_not_begin_with_a_smaller_ones_permit() -> None:
    async def body() -> None:
        rig = Rig(Limits(1000, tpm=600))
        for i in range(40):  # each comes while the permit for a small one is fetched, or at hand
            rig.loop.call_at(i * 5.0, partial(rig.push, 1, step=5, tokens=20))
            rig.loop.call_at(i * 5.0 + 0.05, partial(rig.push, 1, step=1, tokens=300))
        await asyncio.sleep(60 * 30)
        assert len(rig.begun) == 80
        assert rig.most_in_a_minute(tokens_of) <= 600

    run_virtual(body)


def test_a_permit_at_hand_for_a_smaller_one_is_fetched_anew() -> None:
    async def body() -> None:
        rig = Rig(Limits(1, tpm=600, endpoints={"a": Limits(1), "b": Limits(1)}))
        rig.push(1, tokens=590, seconds=20.0)
        await asyncio.sleep(60)
        rig.push(1, endpoint="a", tokens=5, seconds=20.0)
        rig.push(1, endpoint="b", step=5, tokens=1)  # has a permit, but no slot
        await asyncio.sleep(5)
        rig.push(1, endpoint="b", step=1, tokens=600)
        await asyncio.sleep(300)
        assert [item.tokens for _at, item in rig.begun] == [590, 5, 600, 1]
        assert rig.most_in_a_minute(tokens_of) <= 600

    run_virtual(body)


def test_a_large_request_is_not_passed_by_small_ones_for_ever() -> None:
    async def body() -> None:
        rig = Rig(Limits(1000, tpm=600, endpoints={"small": Limits(1000)}))
        rig.push(2000, step=2, endpoint="small", tokens=5)
        await asyncio.sleep(100)
        rig.push(1, step=1, tokens=50)  # as much as the bucket holds: it must be empty once
        await asyncio.sleep(60)
        large = [at for at, item in rig.begun if item.tokens == 50]
        assert large
        assert large[0] <= 100 + 15, "its own tokens are there after 5 s"

    run_virtual(body)


def test_what_began_smaller_than_it_was_waited_for_is_given_back() -> None:
    async def body() -> None:
        rates, loop = Rates(None, 600), asyncio.get_running_loop()
        for _ in range(5):
            await rates.acquire(50)
            rates.begin(1)
        assert loop.time() < 1

    run_virtual(body)


def test_whoever_waits_hears_of_room_that_was_given_back() -> None:
    async def body() -> None:
        meter, loop = Meter(100, 60.0), asyncio.get_running_loop()
        await meter.wait(100)
        meter.begin(100)
        loop.call_at(40, meter.correct, -100, 39.9)
        await meter.wait(50)
        assert loop.time() == pytest.approx(40, abs=0.1)

    run_virtual(body)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 60), st.floats(0, 20)), min_size=1, max_size=40))
def test_a_meter_counts_exactly_what_began(plan: list[tuple[int, int, float]]) -> None:
    """Said, used and how long until that is known: what is known never passes the limit."""

    async def body() -> None:
        meter, loop = Meter(100, 5.0), asyncio.get_running_loop()
        known: list[list[float]] = []  # when it began, how much is known of it

        def learn(entry: list[float], used: float) -> None:
            meter.correct(used - entry[1], loop.time() - entry[0])
            entry[1] = used

        for said, used, wait_s in plan:
            await meter.wait(said)
            meter.begin(said)
            now = loop.time()
            known.append([now, said])
            assert sum(amount for at, amount in known if at >= now - MINUTE) <= 100 + _surprise(known, plan, now)
            loop.call_later(wait_s, learn, known[-1], float(used))
        await asyncio.sleep(60 * 60)
        # Nothing of before is counted: of an amount that is all of a minute's, the first token limits what follows.
        await meter.wait(1)
        meter.begin(1)
        begin = loop.time()
        await meter.wait(99)
        meter.begin(99)
        assert loop.time() < begin + MINUTE
        await meter.wait(1)
        assert loop.time() == pytest.approx(begin + MINUTE, abs=0.01)

    run_virtual(body)


def _surprise(known: list[list[float]], plan: list[tuple[int, int, float]], now: float) -> float:
    """Returns how many more tokens were used in the last minute than estimated."""
    pairs = zip(known, plan, strict=False)
    return sum(max(0, used - said) for (at, _amount), (said, used, _wait) in pairs if at >= now - MINUTE)
