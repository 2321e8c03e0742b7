"""Limits: the order of calls and their number in flight, on a virtual clock."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.queues import BACK_OFF, EndpointQueue, Limiter
from dataflow.system import clock
from tests.rewards.limits.limit_rig import Item, Rig
from tests.rigs.virtual_time import run_virtual

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "reward.concurrency=0; give 1 or more."),
        ({"rpm": 0}, "reward.rpm=0; give a number above 0, or null."),
        ({"rpm": -1.5}, "reward.rpm=-1.5"),
        ({"tpm": math.nan}, "reward.tpm=nan"),
        ({"rpm": math.inf}, "reward.rpm=inf"),
        ({"floor": 0}, "reward.floor=0; give 1 to reward.concurrency=64."),
        ({"concurrency": 4, "floor": 5}, "reward.floor=5; give 1 to reward.concurrency=4."),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Limits(**options)


# --- order and slots -----------------------------------------------------------------------------------------


def test_the_oldest_of_all_lines_goes_first() -> None:
    async def body() -> None:
        rig = Rig(Limits(1, endpoints={"a": Limits(4), "b": Limits(4)}))
        rig.push(1, step=9, seconds=1.0)
        for step, endpoint in [(3, "a"), (2, "b"), (1, "a"), (3, ""), (1, "b"), (2, "elsewhere")]:
            rig.push(1, step=step, endpoint=endpoint, seconds=1.0)
        await asyncio.sleep(20)
        order = [(item.priority[1], item.endpoint) for _at, item in rig.begun]
        assert order == [(9, ""), (1, "a"), (1, "b"), (2, "b"), (2, "elsewhere"), (3, "a"), (3, "")]

    run_virtual(body)


def test_equal_places_keep_the_order_in_which_they_came() -> None:
    async def body() -> None:
        rig = Rig(Limits(1))
        items = [Item((0, 1, 0), seconds=1.0) for _ in range(20)]
        for item in items:
            rig.limiter.push(item)
        rig.limiter.fill()
        await asyncio.sleep(30)
        assert [item for _at, item in rig.begun] == items

    run_virtual(body)


def test_slots_of_the_whole_and_of_an_endpoint() -> None:
    async def body() -> None:
        rig = Rig(Limits(5, endpoints={"a": Limits(2), "b": Limits(64)}))
        for endpoint in ("a", "b", ""):
            rig.push(10, endpoint=endpoint, seconds=1.0)
        assert (rig.limiter.running, rig.limiter.peak) == (5, 5)
        await asyncio.sleep(60)
        assert len(rig.begun) == rig.ended == 30
        assert rig.most["all"] == 5
        assert rig.most["a"] == 2
        assert rig.most["b"] >= 3
        assert rig.limiter.running == 0

    run_virtual(body)


def test_a_full_endpoint_holds_up_no_other() -> None:
    async def body() -> None:
        rig = Rig(Limits(8, endpoints={"a": Limits(1)}))
        rig.push(5, step=1, endpoint="a", seconds=math.inf)
        rig.push(3, step=2, seconds=math.inf)
        assert [item.endpoint for _at, item in rig.begun] == ["a", "", "", ""]

    run_virtual(body)


def test_what_is_not_wanted_any_more_is_passed_over() -> None:
    async def body() -> None:
        rig = Rig(Limits(1))
        rig.push(1, seconds=1.0)
        items = rig.push(5, seconds=1.0)
        for item in items[:3]:
            item.wanted = False
        await asyncio.sleep(10)
        assert [item for _at, item in rig.begun[1:]] == items[3:]

    run_virtual(body)


def test_a_start_that_ends_at_once_neither_nests_nor_stalls() -> None:
    depth = most = 0
    started: list[Item] = []

    async def body() -> None:
        def start(item: Item, queue: EndpointQueue) -> None:
            nonlocal depth, most
            depth += 1
            most = max(most, depth)
            started.append(item)
            limiter.release(queue, clock.now())
            depth -= 1

        limiter = Limiter(Limits(2), start)
        for i in range(5000):
            limiter.push(Item((0, 1, i)))
        limiter.fill()
        assert len(started) == 5000
        assert most == 1
        assert (limiter.running, limiter.peak) == (0, 1)

    run_virtual(body)


# --- Retry-After ---------------------------------------------------------------------------------------------


def test_a_paused_line_starts_nothing_and_the_others_go_on() -> None:
    async def body() -> None:
        rig = Rig(Limits(2, endpoints={"a": Limits(2)}))
        rig.limiter.queues["a"].pause(30.0)
        rig.push(3, endpoint="a", seconds=1.0)
        rig.push(3, seconds=1.0)
        await asyncio.sleep(60)
        assert rig.times("") == pytest.approx([0, 0, 1], abs=1e-3)
        assert rig.times("a") == pytest.approx([30, 30, 31], abs=1e-3)

    run_virtual(body)


def test_the_longest_pause_counts() -> None:
    async def body() -> None:
        rig = Rig(Limits(2))
        queue = rig.limiter.queues[""]
        for seconds in (10.0, 30.0, 5.0):
            queue.pause(seconds)
        rig.push(1)
        await asyncio.sleep(40)
        assert rig.times() == pytest.approx([30], abs=1e-3)
        queue.pause(5.0)
        rig.push(1)
        await asyncio.sleep(10)
        assert rig.times() == pytest.approx([30, 45], abs=1e-3), "a pause that is over leaves nothing behind"

    run_virtual(body)


# --- adaptive ------------------------------------------------------------------------------------------------


class Flight:
    """Calls of an adaptive queue, begun and ended by hand; times of their begin are real ones."""

    def __init__(self, limits: Limits) -> None:
        self.rig = Rig(limits)
        self.queue = self.rig.limiter.queues[""]
        self.rig.push(5000, seconds=math.inf)

    def end(self, count: int, overloaded: bool = False, begun: float | None = None, **how: Any) -> None:
        for _ in range(count):
            self.rig.limiter.release(self.queue, clock.now() if begun is None else begun, overloaded=overloaded, **how)


def test_a_flight_that_is_turned_away_cuts_the_limit_once() -> None:
    async def body() -> None:
        flight = Flight(Limits(100, adaptive=True))
        before = clock.now()
        flight.end(100, overloaded=True, begun=before)
        assert flight.queue.limit == pytest.approx(100 * BACK_OFF)
        assert flight.rig.limiter.running == 70
        flight.end(30, overloaded=True)  # begun since the cut
        assert flight.queue.limit < 100 * BACK_OFF

    run_virtual(body)


def test_the_limit_falls_to_its_floor_and_no_further() -> None:
    async def body() -> None:
        flight = Flight(Limits(100, adaptive=True, floor=7))
        for _ in range(50):
            flight.end(1, overloaded=True, begun=math.inf)
        assert flight.queue.limit == 7
        flight.end(flight.queue.running, error=ValueError())
        assert flight.queue.running == 7

    run_virtual(body)


def test_the_limit_grows_by_one_a_round_up_to_its_ceiling() -> None:
    async def body() -> None:
        flight = Flight(Limits(40, adaptive=True))
        flight.queue.limit = 10.0
        flight.end(40, error=ValueError())
        assert flight.queue.running == 10
        for _ in range(5):
            before = flight.queue.limit
            flight.end(int(before))
            assert 0.85 <= flight.queue.limit - before <= 1.0
        for _ in range(100):
            flight.end(int(flight.queue.limit))
        assert flight.queue.limit == 40
        assert flight.queue.running == 40

    run_virtual(body)


def test_only_a_success_of_a_full_line_lets_the_limit_grow() -> None:
    async def body() -> None:
        rig = Rig(Limits(40, adaptive=True))
        queue = rig.limiter.queues[""]
        queue.limit = 10.0
        rig.push(5, seconds=math.inf)
        for _ in range(5):
            rig.limiter.release(queue, clock.now())
        assert queue.limit == 10.0, "five of ten: nobody knows whether more would do"
        rig.push(10, seconds=math.inf)
        for error in (ValueError(), asyncio.CancelledError()):
            rig.push(1, seconds=math.inf)
            rig.limiter.release(queue, clock.now(), error=error)
        assert queue.limit == 10.0
        rig.limiter.release(queue, clock.now())
        assert queue.limit > 10.0

    run_virtual(body)


def test_changes_are_returned_once_in_order() -> None:
    async def body() -> None:
        rig = Rig(Limits(10, adaptive=True, endpoints={"a": Limits(4, adaptive=True)}))
        rig.push(50, seconds=math.inf)
        rig.push(50, endpoint="a", seconds=math.inf)
        before = clock.now()
        rig.limiter.release(rig.limiter.queues[""], math.inf, overloaded=True)
        rig.limiter.release(rig.limiter.queues[""], math.inf, overloaded=True)
        changes = rig.limiter.changes()
        assert [(name, limit) for _at, name, limit in changes] == [("", 7), ("", 4)]
        assert all(before <= at <= clock.now() for at, _name, _limit in changes)
        assert rig.limiter.changes() == []

    run_virtual(body)


def test_a_fixed_limit_stays() -> None:
    async def body() -> None:
        flight = Flight(Limits(10))
        flight.end(5, overloaded=True, begun=math.inf)
        assert flight.queue.limit == 10
        assert flight.rig.limiter.changes() == []

    run_virtual(body)


# --- what an item has waited for ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "pause_s", "others", "cause"),
    [
        (Limits(8), 5.0, 0, "pause"),
        (Limits(8), 0.0, 0, ""),
        (Limits(1), 0.0, 1, "slot"),
        (Limits(8, rpm=1), 0.0, 0, "rate"),
        (Limits(8, rpm=1), 5.0, 0, "pause"),
        (Limits(8, endpoints={"a": Limits(8, tpm=9)}), 0.0, 0, "rate"),
    ],
    ids=["pause", "nothing", "slot", "rate", "pause before rate", "rate of its endpoint"],
)
def test_the_cause_of_a_wait_is_the_slot_a_pause_or_a_rate(
    limits: Limits, pause_s: float, others: int, cause: str
) -> None:
    async def body() -> None:
        found: list[str] = []
        limiter: Limiter

        def start(item: Item, queue: EndpointQueue) -> None:
            found.append(limiter.held_by(queue, since=queued_at))
            asyncio.get_running_loop().call_later(1.0, limiter.release, queue, clock.now())

        limiter = Limiter(limits, start)
        queued_at = clock.now()
        for i in range(others):
            limiter.push(Item((0, 1, i), "a"))
        if pause_s:
            limiter.queue_of("a").pause(pause_s)
        limiter.push(Item((0, 1, 9), "a"))
        limiter.fill()
        await asyncio.sleep(100)
        assert found[-1] == cause
        limiter.close()

    run_virtual(body)


# --- what goes wrong -----------------------------------------------------------------------------------------


def test_an_error_of_one_start_is_reported_and_does_not_stop_the_rest() -> None:
    async def body() -> None:
        bugs: list[Exception] = []
        started: list[int] = []

        def start(item: Item, queue: EndpointQueue) -> None:
            started.append(item.priority[2])
            if item.priority[2] == 1:
                raise KeyError("ours")

        limiter = Limiter(Limits(4), start, on_bug=bugs.append)
        for i in range(3):
            limiter.push(Item((0, 1, i)))
        limiter.fill()
        assert started == [0, 1, 2]
        assert [type(bug) for bug in bugs] == [KeyError]

    run_virtual(body)


def test_local_work_takes_a_slot_and_waits_for_nothing_else() -> None:
    async def body() -> None:
        rig = Rig(Limits(2, rpm=1))
        rig.push(1, seconds=5.0)
        await rig.settle()
        rig.limiter.queues[""].pause(1000.0)
        rig.limiter.queues[""].limit = 1.0
        for i in range(4):
            rig.limiter.push_local(Item((0, 1, i), seconds=1.0))
        rig.limiter.fill()
        assert rig.limiter.running == 2, "one slot of two is left"
        await asyncio.sleep(20)
        assert rig.times() == pytest.approx([0, 0, 1, 2, 3], abs=1e-3)
        assert rig.limiter.changes() == []
        assert rig.limiter.running == 0

    run_virtual(body)


def test_close_leaves_nothing_behind() -> None:
    async def body() -> None:
        rig = Rig(Limits(4, rpm=1, endpoints={"a": Limits(4, tpm=1)}))
        rig.push(3)
        rig.push(3, endpoint="a", tokens=5)
        await rig.settle()
        rig.limiter.queues["a"].pause(100.0)
        rig.limiter.close()
        await rig.settle()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(body)


# --- pools -------------------------------------------------------------------------------------------------------


def test_a_server_that_items_avoid_takes_them_only_while_the_others_are_paused_and_second_calls_never() -> None:
    async def body() -> None:
        rig = Rig(Limits(8, endpoints={"a": Limits(4), "b": Limits(1)}, pool=("a", "b")))
        (full,) = rig.push(endpoint="b", seconds=math.inf)
        (second,) = rig.push(avoids=("a",), second=True, seconds=math.inf)
        (again,) = rig.push(avoids=("a",), seconds=math.inf)
        (other,) = rig.push(seconds=math.inf)
        other.wanted = False
        assert [item for _at, item in rig.begun] == [full, other]
        rig.limiter.queues["b"].pause(5.0)
        assert [item for _at, item in rig.begun] == [full, other, again]
        again.wanted = False
        rig.end(full, rig.limiter.queues["b"], 0.0)
        await asyncio.sleep(6)
        assert rig.begun[-1][1] is second

    run_virtual(body)
