"""Slots: the order of calls, their number in flight, and how fast they begin, on a virtual clock."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import ConfigError
from dataflow.rewards.slots import Limits, Slot, Slots
from tests.rigs.virtual_time import run_virtual, timers

pytestmark = pytest.mark.timeout(60)

MINUTE = 60.0 - 1e-4
"""A window of which both ends belong to it."""


@dataclass(eq=False)
class Item:
    priority: tuple[int, int, int]
    tokens: int = 0
    seconds: float = 0.0
    """How long it will hold its slot."""
    used: int | None = None
    """Tokens that it really uses."""
    queued_at: float = 0.0
    held_by: str = ""
    waiting: asyncio.Future[Slot] | None = None
    begin: float = math.nan


class Rig:
    """Slots, and what has begun there."""

    def __init__(self, limits: Limits) -> None:
        self.loop, self.slots = asyncio.get_running_loop(), Slots(limits)
        self.begun: list[Item] = []
        self.now = 0
        self.tasks: list[asyncio.Task[None]] = []

    def push(self, count: int = 1, step: int = 1, **options: Any) -> list[Item]:
        items = [Item((0, step, len(self.tasks) + i), queued_at=self.loop.time(), **options) for i in range(count)]
        self.tasks += [asyncio.create_task(self._hold(item)) for item in items]
        return items

    async def _hold(self, item: Item) -> None:
        slot = await self.slots.acquire(item)
        item.begin = self.loop.time()
        self.begun.append(item)
        self.now += 1
        try:
            await asyncio.sleep(item.seconds)
        finally:
            self.now -= 1
            self.slots.release(slot, used=item.used)

    def cancel(self, item: Item) -> None:
        self.tasks[item.priority[2]].cancel()

    def times(self) -> list[float]:
        return [item.begin for item in self.begun]

    def most_in_a_minute(self, weight: Callable[[Item], float] = lambda _item: 1) -> float:
        """Returns what any 60 seconds hold at most."""
        window: deque[tuple[float, float]] = deque()
        best = inside = 0.0
        for item in self.begun:
            window.append((item.begin, weight(item)))
            inside += window[-1][1]
            while window[0][0] < item.begin - MINUTE:
                inside -= window.popleft()[1]
            best = max(best, inside)
        return best


def tokens_of(item: Item) -> float:
    return item.tokens


def on_slots(limits: Limits, then: Callable[[Rig], Coroutine[Any, Any, None]]) -> Rig:
    """Runs it; afterwards no slot is in use, unless an item holds it for ever, and no timer is left."""

    async def body() -> Rig:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dataflow.system.clock.now", asyncio.get_running_loop().time)
            rig = Rig(limits)
            await then(rig)
            assert rig.slots.running == rig.now
            for task in rig.tasks:
                task.cancel()
            await asyncio.gather(*rig.tasks, return_exceptions=True)
            rig.slots.close()
            assert not timers()
        return rig

    return run_virtual(body)  # type: ignore[no-any-return]


def about(*seconds: float) -> Any:
    return pytest.approx(list(seconds), abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "reward.concurrency=0; give 1 or more."),
        ({"rpm": 0}, "reward.rpm=0; give a number above 0, or null."),
        ({"tpm": math.nan}, "reward.tpm=nan"),
        ({"rpm": math.inf}, "reward.rpm=inf"),
        ({"floor": 0}, "reward.floor=0; give 1 to reward.concurrency=64."),
        ({"concurrency": 4, "floor": 5}, "reward.floor=5; give 1 to reward.concurrency=4."),
    ],
)
def test_limits_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Limits(**options)


# --- order and slots -----------------------------------------------------------------------------------------


def test_a_cancelled_item_leaves_its_place_and_its_slot_to_the_next() -> None:
    async def then(rig: Rig) -> None:
        rig.push(seconds=1.0)
        queued, holds, granted, _last = rig.push(4, seconds=1.0)
        await asyncio.sleep(0.5)
        rig.cancel(queued)
        await asyncio.sleep(1)
        rig.cancel(holds)
        while granted.waiting is None or not granted.waiting.done():
            await asyncio.sleep(0)
        rig.cancel(granted)  # in the turn in which it has its slot
        await asyncio.sleep(0.5)

    rig = on_slots(Limits(1), then)
    assert [item.priority[2] for item in rig.begun] == [0, 2, 4]


# --- pauses --------------------------------------------------------------------------------------------------


def test_nothing_begins_until_the_longest_pause_is_over() -> None:
    async def then(rig: Rig) -> None:
        for seconds in (10.0, 30.0, 5.0):
            rig.slots.pause(seconds)
        rig.push(3, seconds=1.0)
        await asyncio.sleep(60)

    assert on_slots(Limits(2), then).times() == about(30, 30, 31)


@pytest.mark.parametrize(
    ("limits", "pause_s", "others", "cause"),
    [
        (Limits(8), 5.0, 0, "pause"),
        (Limits(8), 0.0, 0, ""),
        (Limits(1), 0.0, 1, "slot"),
        (Limits(8, rpm=1), 0.0, 1, "rate"),
        (Limits(8, rpm=1), 5.0, 0, "pause"),
        (Limits(8, tpm=9), 0.0, 1, "rate"),
    ],
)
def test_an_item_says_what_it_has_waited_for(limits: Limits, pause_s: float, others: int, cause: str) -> None:
    async def then(rig: Rig) -> None:
        rig.push(others, tokens=9, seconds=1.0)
        await asyncio.sleep(0)
        if pause_s:
            rig.slots.pause(pause_s)
        (item,) = rig.push()
        await asyncio.sleep(100)
        assert item.held_by == cause

    on_slots(limits, then)


# --- rates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rpm", [0.5, 59, 90])
def test_no_minute_holds_more_requests_than_allowed_and_hardly_fewer(rpm: float) -> None:
    count = math.ceil(4 * rpm)

    async def then(rig: Rig) -> None:
        rig.push(count)
        await asyncio.sleep(60 * 4 + 180)

    rig = on_slots(Limits(1000, rpm=rpm), then)
    assert len(rig.begun) == count
    assert rig.most_in_a_minute() <= max(1, rpm)
    assert rig.times()[-1] <= 60 * count / rpm * 1.02 + 1


@pytest.mark.parametrize("sizes", [[10, 90], [500]])
def test_no_minute_holds_more_tokens_than_allowed_and_hardly_fewer(sizes: list[int]) -> None:
    async def then(rig: Rig) -> None:
        for i in range(math.ceil(4000 * len(sizes) / sum(sizes))):
            rig.push(tokens=sizes[i % len(sizes)])
        await asyncio.sleep(60 * 8)
        assert len(rig.begun) == len(rig.tasks)

    rig = on_slots(Limits(1000, tpm=1000), then)
    assert rig.most_in_a_minute(tokens_of) <= 1000 + max(0, max(sizes) - 1000 // 60), "or one large request more"
    assert rig.times()[-1] <= 60 * 4 * 1.12 + 5


@pytest.mark.parametrize(
    ("said", "used", "count", "least_s", "most_s"),
    [(10, 100, 60, 9 * 60, 10.2 * 60), (50, 10, 120, 100, 150)],
    ids=["beyond the estimate", "below it"],
)
def test_an_estimate_is_corrected_once_the_tokens_are_known(
    said: int, used: int, count: int, least_s: float, most_s: float
) -> None:
    async def then(rig: Rig) -> None:
        rig.push(count, tokens=said, used=used, seconds=0.1)
        await asyncio.sleep(60 * 11)

    rig = on_slots(Limits(1, tpm=600), then)
    assert len(rig.begun) == count
    assert rig.most_in_a_minute(lambda _item: used) <= 600
    assert least_s <= rig.times()[-1] <= most_s


pushes = st.lists(
    st.tuples(
        st.integers(0, 100),  # when
        st.integers(1, 3),  # step
        st.integers(0, 120),  # tokens
        st.sampled_from([0.0, 0.5, 7.0]),  # seconds
        st.sampled_from([True, True, True, False]),  # whether it stays
    ),
    min_size=1,
    max_size=40,
)
rates = st.none() | st.integers(5, 200)


@given(
    pushes,
    st.integers(1, 5),
    rates,
    st.none() | st.integers(120, 2000),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40)), max_size=3),
)
def test_all_that_stays_begins_and_no_limit_is_passed(
    plan: list[tuple[int, int, int, float, bool]],
    slots: int,
    rpm: float | None,
    tpm: float | None,
    pauses: list[tuple[int, int]],
) -> None:
    async def then(rig: Rig) -> None:
        def push(step: int, tokens: int, seconds: float, stays: bool) -> None:
            (item,) = rig.push(step=step, tokens=tokens, seconds=seconds)
            if not stays:
                rig.loop.call_later(0.3, rig.cancel, item)

        for at, *what in plan:
            rig.loop.call_at(at, push, *what)
        for at, seconds in pauses:
            rig.loop.call_at(at, rig.slots.pause, seconds)
        await asyncio.sleep(60 * 250)
        assert rig.slots.running == 0

    rig = on_slots(Limits(slots, rpm=rpm, tpm=tpm), then)
    assert len(rig.begun) >= sum(stays for *_, stays in plan)
    assert rig.slots.peak <= slots
    assert rig.most_in_a_minute() <= (rpm or math.inf)
    assert rig.most_in_a_minute(tokens_of) <= (tpm or math.inf) + max(0, max(tokens for *_, tokens, _s, _w in plan))
