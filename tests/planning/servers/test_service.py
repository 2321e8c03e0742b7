"""The simulated servers against hand computation."""

from __future__ import annotations

import pytest

from dataflow.errors import ConfigError
from dataflow.planning.servers.service import ServerService
from dataflow.planning.servers.service_time import Servers, ServiceTime

ABOUT = 0.006  # the times of equal servers differ by half a per cent
SHARING, BATCHING = ServiceTime(1.0, 1.0), ServiceTime(1.0, 1.0, batches=True, first=(1,))


def ends(
    service_time: ServiceTime, replicas: int, slots: int, works: list[float], concurrency: int = 100
) -> list[float]:
    """When each request ends, one group each, all submitted at 0; their work in units of the service time."""
    service = ServerService(Servers("rm", replicas, slots, service_time), concurrency)
    service.submit("step", 0.0, [(i, work * service_time.seconds(1)) for i, work in enumerate(works)])
    for i in range(len(works)):
        service.wait("step", i, 1, groups=[i])
    # A group that waits behind another's delivery is delivered with it.
    return [found.at for _ in works if (found := service.advance(float("inf")))]


def test_requests_that_share_a_server_slow_each_other_down() -> None:
    assert ends(SHARING, 1, 4, [1.0]) == [2.0]
    assert ends(SHARING, 1, 4, [1.0, 1.0]) == [3.0, 3.0]
    # One slot: one after the other. Two servers: each alone.
    assert ends(SHARING, 1, 1, [1.0, 1.0]) == [2.0, 4.0]
    assert ends(SHARING, 2, 4, [1.0, 1.0]) == pytest.approx([2.0, 2.0], rel=ABOUT)
    # Two for 1.5 s do half of the work; the longer one has 1.5 left, alone.
    assert ends(SHARING, 1, 4, [0.5, 2.0]) == [1.5, 4.5]


def test_what_waits_is_the_next_batch() -> None:
    # 1 alone for 2 s, then the other 3 together for 4 s.
    assert ends(BATCHING, 1, 4, [1.0] * 4) == [2.0, 6.0, 6.0, 6.0]
    assert ends(ServiceTime(1.0, 1.0, batches=True, first=(9,)), 1, 4, [1.0] * 4) == [5.0] * 4
    # 2 slots: when the first has ended, the fifth joins those of the batch after the second.
    assert ends(BATCHING, 1, 2, [1.0] * 4) == [2.0, 4.0, 6.0, 8.0]


def test_fewer_requests_in_flight_than_slots() -> None:
    assert ends(SHARING, 2, 4, [1.0] * 4, concurrency=2) == pytest.approx([2.0, 2.0, 4.0, 4.0], rel=ABOUT)
    servers = Servers("rm", 2, 4, SHARING)
    assert (servers.busiest(100), servers.busiest(3), servers.busiest(1)) == (4, 2, 1)
    assert servers.seconds(100) == 5.0 / 4 / 2


def test_older_steps_go_first_and_rates_hold() -> None:
    service = ServerService(Servers("rm", 1, 1, ServiceTime(1.0, 0.0)), 1)
    service.submit("late", 0.0, [(0, 1.0), (1, 1.0)], order=(0, 2))
    service.submit("early", 0.5, [(0, 1.0)], order=(0, 1))
    service.wait("late", "late", 2)
    service.wait("early", "early", 1)
    found = [service.advance(float("inf")) for _ in range(2)]
    assert [(each.waiter, each.at) for each in found if each] == [("early", 2.0), ("late", 3.0)]
    service = ServerService(Servers("rm", 4, 4, ServiceTime(0.5, 0.0)), 16, rpm=30.0)
    service.submit("step", 0.0, [(i, 0.5) for i in range(3)])
    service.wait("step", 0, 3)
    assert (done := service.advance(float("inf"))) is not None
    assert done.at == pytest.approx(4.5, rel=ABOUT)


def test_a_step_at_a_time_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.agent=per-step is of rewards without servers"):
        ServerService(Servers("rm", 1, 1, SHARING), 1, per_step=True)


def test_nothing_is_served_past_the_time_asked_for() -> None:
    service = ServerService(Servers("rm", 1, 4, BATCHING), 4)
    service.submit("step", 1.0, [(0, 2.0)])
    service.wait("step", 0, 1)
    assert service.advance(1.0) is None
    service.submit("more", 1.0, [(0, 2.0)])
    service.wait("more", 1, 1)
    assert service.advance(2.9) is None
    assert [found.at for _ in range(2) if (found := service.advance(10.0))] == [3.0, 5.0]
