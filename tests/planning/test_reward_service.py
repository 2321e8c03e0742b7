"""The reward service as a queue: against hand computation and against a naive simulation of the same rules."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.errors import ConfigError, DataflowError
from dataflow.planning.reward_service import POLL_S, Delivery, RewardService, Sample

# Few values and all of them exact in binary, so that ties are frequent and sums are the same in any order.
TIMES = st.integers(0, 24).map(lambda quarters: quarters / 4)
SECONDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.0, 2.0, 3.75])
RPMS = st.sampled_from([None, 120.0, 15.0, 7.5, 3.75, 0.9375])
SERVERS = st.integers(1, 4)

some_examples = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Submission(NamedTuple):
    key: str
    at: float
    samples: list[Sample]
    order: tuple[int, int]


class Wait(NamedTuple):
    key: str
    who: Any
    count: int
    by_index: bool


class Begun(NamedTuple):
    start: float
    end: float
    key: str
    group: int


class Load(NamedTuple):
    submissions: list[Submission]
    waits: list[Wait]

    def groups(self) -> Counter[tuple[str, int]]:
        return Counter({(s.key, group) for s in self.submissions for group, _seconds in s.samples})

    def requests(self) -> int:
        return sum(len(s.samples) for s in self.submissions)

    def seconds(self) -> float:
        return sum(seconds for s in self.submissions for _group, seconds in s.samples)


@st.composite
def loads(draw: st.DrawFn, whole_keys: bool = False, largest_group: int = 3) -> Load:
    submissions: list[Submission] = []
    groups: Counter[str] = Counter()
    for number in range(draw(st.integers(1, 5))):
        key = f"step {number}" if whole_keys else draw(st.sampled_from(["train", "more", "validation"]))
        sizes = draw(st.lists(st.integers(1, largest_group), min_size=1, max_size=4))
        samples = [(groups[key] + n, draw(SECONDS)) for n, size in enumerate(sizes) for _ in range(size)]
        groups[key] += len(sizes)
        order = draw(st.tuples(st.integers(0, 2), st.integers(0, 1)))
        submissions.append(Submission(key, draw(TIMES), draw(st.permutations(samples)), order))
    waits = []
    for key, total in groups.items():
        while total:
            count = draw(st.integers(1, total))
            waits.append(Wait(key, (key, total), count, draw(st.booleans())))
            total -= count
    return Load(submissions, waits)


# --- the reference ------------------------------------------------------------------------------------------


def earliest_by_rpm(starts: Sequence[float], rpm: float | None) -> float:
    """From any start on, no more begin than the bucket holds and what has flown into it since."""
    if rpm is None:
        return 0.0
    bucket, rate = max(1.0, rpm / 60), rpm / 60
    return max((s + (len(starts) - n + 1 - bucket) / rate for n, s in enumerate(starts)), default=0.0)


def begun_by_priority(submissions: Sequence[Submission], servers: int, rpm: float | None) -> list[Begun]:
    pending = [
        (s.order, s.at, number, place, s.key, *sample)
        for number, s in enumerate(submissions)
        for place, sample in enumerate(s.samples)
    ]
    free = [0.0] * servers
    begun: list[Begun] = []
    while pending:
        server = min(range(servers), key=free.__getitem__)
        first_there = min(request[1] for request in pending)
        start = max(free[server], first_there, earliest_by_rpm([b.start for b in begun], rpm))
        request = min(request for request in pending if request[1] <= start)
        pending.remove(request)
        _order, _at, _number, _place, key, group, seconds = request
        free[server] = start + seconds
        begun.append(Begun(start, start + seconds, key, group))
    return begun


def begun_step_by_step(submissions: Sequence[Submission], servers: int, rpm: float | None) -> list[Begun]:
    begun: list[Begun] = []
    done, before = 0.0, ""
    free: list[float] = []
    for step in sorted(submissions, key=lambda s: s.at):
        if step.key != before:
            free = [done if step.at <= done else step.at + POLL_S / 2] * servers
        free = [max(at, step.at) for at in free]
        before = step.key
        for group, seconds in step.samples:
            server = min(range(servers), key=free.__getitem__)
            start = max(free[server], earliest_by_rpm([b.start for b in begun], rpm))
            free[server] = start + seconds
            begun.append(Begun(start, free[server], step.key, group))
        done = max(free)
    return begun


def delivered(begun: Sequence[Begun], waits: Iterable[Wait]) -> list[Delivery]:
    ends: dict[tuple[str, int], tuple[float, int]] = {}
    for number, b in enumerate(begun):
        end, _number = ends.get((b.key, b.group), (0.0, 0))
        ends[b.key, b.group] = (max(end, b.end), number)
    waiting: dict[str, deque[Wait]] = {}
    for wait in waits:
        waiting.setdefault(wait.key, deque()).append(wait)
    unclaimed: dict[str, list[int]] = {key: sorted(g for k, g in ends if k == key) for key in waiting}
    arrived: dict[str, list[int]] = {key: [] for key in waiting}
    result = []
    for key, group in sorted(ends, key=ends.__getitem__):
        arrived[key].append(group)
        while waiting[key]:
            head = waiting[key][0]
            groups = tuple((unclaimed if head.by_index else arrived)[key][: head.count])
            if len(groups) < head.count or not set(groups) <= set(arrived[key]):
                break
            waiting[key].popleft()
            for taken in groups:
                arrived[key].remove(taken)
                unclaimed[key].remove(taken)
            result.append(Delivery(ends[key, group][0], head.who, groups))
    return result


# --- driving the service ------------------------------------------------------------------------------------


class Collector:
    """Advances a service and keeps what it delivers."""

    def __init__(self, service: RewardService) -> None:
        self.service = service
        self.deliveries: list[Delivery] = []

    def advance(self, until: float = math.inf) -> list[Delivery]:
        while found := self.service.advance(until):
            assert found.at <= until
            self.deliveries.append(found)
        return self.deliveries


def all_known(load: Load, service: RewardService) -> Collector:
    for submission in load.submissions:
        service.submit(*submission)
    for wait in load.waits:
        service.wait(*wait)
    return Collector(service)


def ends_of_groups(service: RewardService, key: str, groups: int) -> dict[int, float]:
    for _ in range(groups):
        service.wait(key, None, 1)
    return {d.groups[0]: d.at for d in Collector(service).advance()}


@pytest.mark.parametrize(("n", "servers"), [(1, 1), (7, 1), (7, 2), (8, 4), (9, 4), (3, 16)])
def test_of_constant_latency_the_makespan_is_that_of_full_rounds(n: int, servers: int) -> None:
    service = RewardService(servers)
    service.submit("s", 0.0, [(0, 2.5)] * n)
    assert ends_of_groups(service, "s", 1) == {0: math.ceil(n / servers) * 2.5}
    assert service.served == n


def test_of_constant_latency_each_group_is_there_with_its_last_sample() -> None:
    service = RewardService(2)
    service.submit("s", 10.0, [(g, 3.0) for g in (0, 0, 0, 1, 1, 1, 2)])
    assert ends_of_groups(service, "s", 3) == {0: 16.0, 1: 19.0, 2: 22.0}


def test_of_mixed_latencies_each_group_is_there_with_its_last_sample() -> None:
    # Server 1: group 0 from 0 to 5, group 1 from 5 to 6. Server 2: 1 to 1, 0 to 3, 2 to 4, 2 to 8.
    service = RewardService(2)
    service.submit("s", 0.0, [(0, 5.0), (1, 1.0), (0, 2.0), (2, 1.0), (2, 4.0), (1, 1.0)])
    assert ends_of_groups(service, "s", 3) == {0: 5.0, 1: 6.0, 2: 8.0}


def test_no_request_begins_before_it_was_submitted_though_servers_are_free() -> None:
    service = RewardService(3)
    service.submit("s", 7.0, [(0, 1.0), (1, 2.0), (2, 3.0), (3, 0.5)])
    assert service.advance(3.0) is None
    assert service.advance(5.0) is None
    assert service.served == 0
    assert ends_of_groups(service, "s", 4) == {0: 8.0, 1: 9.0, 2: 10.0, 3: 8.5}


def test_requests_of_no_duration_are_there_at_once() -> None:
    service = RewardService(1)
    service.submit("s", 0.0, [(0, 0.0), (1, 0.0)])
    assert ends_of_groups(service, "s", 2) == {0: 0.0, 1: 0.0}


# --- agreement with the reference ---------------------------------------------------------------------------


@some_examples
@given(load=loads(), servers=SERVERS, rpm=RPMS)
def test_deliveries_are_those_of_the_reference(load: Load, servers: int, rpm: float | None) -> None:
    begun = begun_by_priority(load.submissions, servers, rpm)
    assert all(sum(b.start <= now.start < b.end for b in begun) <= servers for now in begun)
    got = all_known(load, RewardService(servers, rpm)).advance()
    assert got == delivered(begun, load.waits)


@some_examples
@given(load=loads(), servers=SERVERS, rpm=RPMS)
def test_deliveries_step_by_step_are_those_of_the_reference(load: Load, servers: int, rpm: float | None) -> None:
    begun = begun_step_by_step(load.submissions, servers, rpm)
    got = all_known(load, RewardService(servers, rpm, per_step=True)).advance()
    assert got == delivered(begun, load.waits)


@some_examples
@given(load=loads(), servers=SERVERS, rpm=RPMS, per_step=st.booleans(), looks=st.lists(TIMES, max_size=30))
def test_it_does_not_matter_how_often_one_looks(
    load: Load, servers: int, rpm: float | None, per_step: bool, looks: list[float]
) -> None:
    at_once = all_known(load, RewardService(servers, rpm, per_step))
    often = all_known(load, RewardService(servers, rpm, per_step))
    for until in sorted(looks):
        often.advance(until)
    assert often.advance() == at_once.advance()
    assert often.service.served == at_once.service.served


@some_examples
@given(
    load=loads(whole_keys=True),
    servers=SERVERS,
    rpm=RPMS,
    per_step=st.booleans(),
    foreseen=st.sets(st.integers(0, 4)),
    looks=st.lists(TIMES, max_size=10),
)
def test_what_is_submitted_only_when_its_time_comes_is_served_as_if_it_had_been_known(
    load: Load, servers: int, rpm: float | None, per_step: bool, foreseen: set[int], looks: list[float]
) -> None:
    service = RewardService(servers, rpm, per_step)
    collector = Collector(service)

    def hand_in(submission: Submission) -> None:
        service.submit(*submission)
        for wait in load.waits:
            if wait.key == submission.key:
                service.wait(*wait)

    by_time = sorted(load.submissions, key=lambda s: s.at)
    for number, submission in enumerate(by_time):
        if number in foreseen:
            hand_in(submission)
    previous = 0.0
    for number, submission in enumerate(by_time):
        for look in sorted(look for look in looks if previous <= look < submission.at):
            collector.advance(look)
        collector.advance(submission.at)
        if number not in foreseen:
            hand_in(submission)
        previous = submission.at
    # Of equals that come at the same time, the one foreseen is the first to be submitted.
    known = sorted(enumerate(by_time), key=lambda item: item[0] not in foreseen)
    simulate: Callable[..., list[Begun]] = begun_step_by_step if per_step else begun_by_priority
    expected = delivered(simulate([s for _number, s in known], servers, rpm), load.waits)
    assert sorted(collector.advance()) == sorted(expected)


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_lower_order_overtakes_what_has_not_begun_and_never_what_has(foreseen: bool) -> None:
    service = RewardService(2)
    collector = Collector(service)
    service.submit("validation", 0.0, [(g, 4.0) for g in range(6)], order=(1, 0))
    if not foreseen:
        assert collector.advance(1.0) == []
        assert service.served == 2
    service.submit("train", 1.0, [(0, 1.0), (1, 5.0), (2, 1.0)], order=(0, 0))
    for who in range(3):
        service.wait("train", ("train", who), 1)
    for who in range(6):
        service.wait("validation", ("validation", who), 1)
    # Both servers are with validation to 4; then train has one to 5 and to 6, the other to 9.
    assert [(d.at, d.waiter[0], *d.groups) for d in collector.advance()] == [
        (4.0, "validation", 0),
        (4.0, "validation", 1),
        (5.0, "train", 0),
        (6.0, "train", 2),
        (9.0, "train", 1),
        (10.0, "validation", 2),
        (13.0, "validation", 3),
        (14.0, "validation", 4),
        (17.0, "validation", 5),
    ]


@pytest.mark.parametrize("looks", [(), (5.0,), (5.0, 10.0), (10.0,)])
def test_a_lower_order_that_comes_as_a_server_becomes_free_has_it(looks: tuple[float, ...]) -> None:
    service = RewardService(1)
    service.submit("validation", 0.0, [(0, 10.0)] * 3, order=(1, 0))
    service.submit("train", 10.0, [(0, 1.0)], order=(0, 0))
    for until in looks:
        assert service.advance(until) is None
    service.wait("train", "trainer", 1)
    service.wait("validation", "validator", 1)
    assert Collector(service).advance() == [(11.0, "trainer", (0,)), (31.0, "validator", (0,))]


def test_a_submission_on_a_delivery_precedes_work_that_begins_at_that_time() -> None:
    service = RewardService(1)
    service.submit("validation", 0.0, [(0, 4.0), (1, 4.0), (2, 4.0)], order=(9, 0))
    service.wait("validation", "first", 1)
    service.wait("validation", "others", 2)
    assert service.advance(math.inf) == (4.0, "first", (0,))
    assert service.served == 1
    service.submit("train", 4.0, [(0, 3.0)], order=(1, 0))
    service.wait("train", "trainer", 1)
    assert Collector(service).advance() == [(7.0, "trainer", (0,)), (15.0, "others", (1, 2))]


def test_what_comes_before_a_submission_known_ahead_does_not_wait_for_it() -> None:
    service = RewardService(1)
    service.submit("later", 100.0, [(0, 1.0)], order=(0, 0))
    assert service.advance(10.0) is None
    service.submit("sooner", 50.0, [(0, 1.0)], order=(5, 0))
    service.wait("later", "b", 1)
    service.wait("sooner", "a", 1)
    assert Collector(service).advance() == [(51.0, "a", (0,)), (101.0, "b", (0,))]


def test_of_equal_order_the_first_to_come_is_served_first_whichever_was_submitted_first() -> None:
    service = RewardService(1)
    service.submit("busy", 0.0, [(0, 5.0)])
    service.submit("later", 2.0, [(0, 1.0)])
    service.submit("sooner", 1.0, [(0, 1.0)])
    service.submit("sooner too", 1.0, [(0, 1.0)])
    for key in ("later", "sooner too", "sooner", "busy"):
        service.wait(key, key, 1)
    got = [(d.at, d.waiter) for d in Collector(service).advance()]
    assert got == [(5.0, "busy"), (6.0, "sooner"), (7.0, "sooner too"), (8.0, "later")]


# --- conservation -------------------------------------------------------------------------------------------


@some_examples
@given(load=loads(), servers=SERVERS, rpm=RPMS, per_step=st.booleans())
def test_every_group_is_delivered_once_and_every_request_served_once(
    load: Load, servers: int, rpm: float | None, per_step: bool
) -> None:
    collector = all_known(load, RewardService(servers, rpm, per_step))
    deliveries = collector.advance()
    assert Counter((d.waiter[0], group) for d in deliveries for group in d.groups) == load.groups()
    assert {d.waiter: len(d.groups) for d in deliveries} == {w.who: w.count for w in load.waits}
    assert [d.at for d in deliveries] == sorted(d.at for d in deliveries)
    assert collector.service.served == load.requests()
    for key in {s.key for s in load.submissions}:
        with pytest.raises(DataflowError):
            collector.service.wait(key, "once more", 1)


@some_examples
@given(load=loads(largest_group=1), servers=SERVERS, rpm=RPMS, per_step=st.booleans())
def test_never_more_are_in_flight_than_there_are_servers_nor_do_more_start_than_rpm_allows(
    load: Load, servers: int, rpm: float | None, per_step: bool
) -> None:
    service = RewardService(servers, rpm, per_step)
    begun = []
    one_by_one = [Wait(w.key, w.key, 1, False) for w in load.waits for _ in range(w.count)]
    requests = {(s.key, group): (s.at, seconds) for s in load.submissions for group, seconds in s.samples}
    for end, key, (group,) in all_known(load._replace(waits=one_by_one), service).advance():
        at, seconds = requests[key, group]
        assert end - seconds >= at
        begun.append(Begun(end - seconds, end, key, group))
    assert len(begun) == len(requests)
    for now in begun:
        assert sum(b.start <= now.start < b.end for b in begun) <= servers
        if rpm is not None:
            assert sum(now.start <= b.start < now.start + 60 for b in begun) <= max(1.0, rpm / 60) + rpm + 1


# --- requests per minute ------------------------------------------------------------------------------------


def starts_of_instant_requests(service: RewardService, key: str, at: float, n: int) -> list[float]:
    service.submit(key, at, [(g, 0.0) for g in range(n)])
    ends = ends_of_groups(service, key, n)
    return [ends[g] for g in range(n)]


def test_a_seconds_worth_starts_at_once_and_the_rest_as_the_bucket_fills() -> None:
    starts = starts_of_instant_requests(RewardService(1, rpm=600), "s", 0.0, 120)
    assert starts[:10] == [0.0] * 10
    assert starts[10:] == pytest.approx([n / 10 for n in range(1, 111)])


def test_a_bucket_fills_while_nothing_starts_and_never_runs_over() -> None:
    service = RewardService(200, rpm=600)
    assert starts_of_instant_requests(service, "empties it", 0.0, 10)[-1] == 0.0
    assert starts_of_instant_requests(service, "half full", 0.5, 6)[-2:] == pytest.approx([0.5, 0.6])
    assert starts_of_instant_requests(service, "full long since", 1000.0, 11)[-2:] == pytest.approx([1000.0, 1000.1])


def test_less_than_one_request_per_minute_starts_the_first_at_once() -> None:
    assert starts_of_instant_requests(RewardService(4, rpm=0.5), "s", 0.0, 3) == [0.0, 120.0, 240.0]


@some_examples
@given(rpm=st.floats(0.5, 100), servers=SERVERS, seconds=st.floats(0, 3), times=st.lists(st.floats(0, 200), max_size=3))
def test_no_minute_sees_more_starts_than_a_bucket_and_what_flows_into_it(
    rpm: float, servers: int, seconds: float, times: list[float]
) -> None:
    service = RewardService(servers, rpm)
    for key, at in enumerate([0.0, *times]):
        service.submit(key, at, [(g, seconds) for g in range(50)])
        for _ in range(50):
            service.wait(key, None, 1)
    starts = [d.at - seconds for d in Collector(service).advance()]
    assert len(starts) == 50 * (1 + len(times))
    for n, start in enumerate(starts):
        assert sum(s < start + 60 - 1e-6 for s in starts[n:]) <= max(1.0, rpm / 60) + rpm + 1 + 1e-6


def test_the_order_decides_which_request_gets_the_next_token() -> None:
    service = RewardService(4, rpm=1)
    service.submit("validation", 0.0, [(0, 0.0), (1, 0.0), (2, 0.0)], order=(1, 0))
    service.submit("train", 30.0, [(0, 0.0)], order=(0, 0))
    service.wait("validation", "validator", 3)
    service.wait("train", "trainer", 1)
    assert Collector(service).advance() == [(60.0, "trainer", (0,)), (180.0, "validator", (0, 1, 2))]


# --- step by step -------------------------------------------------------------------------------------------


def test_step_by_step_the_second_submission_begins_when_the_last_request_of_the_first_is_done() -> None:
    service = RewardService(4, per_step=True)
    service.submit("1", 0.0, [(0, 1.0), (1, 9.0)])
    service.submit("2", 0.5, [(0, 1.0), (1, 1.0)])
    service.wait("1", "all of 1", 2)
    service.wait("2", "all of 2", 2)
    assert Collector(service).advance() == [(9.0, "all of 1", (0, 1)), (10.0, "all of 2", (0, 1))]


def test_step_by_step_the_pieces_of_one_step_do_not_wait_for_each_other() -> None:
    service = RewardService(2, per_step=True)
    service.submit("1", 0.0, [(0, 1.0), (1, 9.0)])
    service.submit("1", 0.5, [(2, 1.0)])
    service.submit("2", 0.75, [(0, 1.0)])
    service.wait("1", "all of 1", 3)
    service.wait("2", "all of 2", 1)
    assert Collector(service).advance() == [(9.0, "all of 1", (0, 2, 1)), (10.0, "all of 2", (0,))]


def test_without_a_limit_each_request_is_served_as_it_comes() -> None:
    service = RewardService(None)
    service.submit("1", 2.0, [(0, 1.0), (1, 9.0), (0, 3.0)])
    service.wait("1", "first", 1)
    service.wait("1", "second", 1)
    assert Collector(service).advance() == [(5.0, "first", (0,)), (11.0, "second", (1,))]
    assert service.served == 3


def test_step_by_step_an_idle_service_has_to_look_first() -> None:
    service = RewardService(2, per_step=True)
    for key, at in [("at once", 0.0), ("idle", 5.0), ("busy", 5.75)]:
        service.submit(key, at, [(0, 1.0), (1, 1.0)])
        service.wait(key, key, 2)
    got = {d.waiter: d.at for d in Collector(service).advance()}
    assert got == {"at once": 1.0, "idle": 6.0 + POLL_S / 2, "busy": 7.0 + POLL_S / 2}


@pytest.mark.parametrize("order", [(0, 0), (0, 9)])
def test_step_by_step_validation_queues_behind_the_next_step_when_that_came_first(order: tuple[int, int]) -> None:
    service = RewardService(1, per_step=True)
    for key, at, its_order in [("1", 0.0, (1, 0)), ("2", 1.0, (2, 0)), ("validation", 2.0, order), ("3", 3.0, (1, 0))]:
        service.submit(key, at, [(0, 5.0)], order=its_order)
        service.wait(key, key, 1)
    got = [(d.waiter, d.at) for d in Collector(service).advance()]
    assert got == [("1", 5.0), ("2", 10.0), ("validation", 15.0), ("3", 20.0)]


# --- waiters ------------------------------------------------------------------------------------------------


def test_by_index_waits_for_the_next_numbers_and_by_arrival_for_the_first_to_come() -> None:
    samples = [(0, 4.0), (1, 1.0), (2, 3.0), (3, 2.0)]
    for by_index, expected in [
        (False, [(2.0, "a", (1, 3)), (4.0, "b", (2, 0))]),
        (True, [(4.0, "a", (0, 1)), (4.0, "b", (2, 3))]),
    ]:
        service = RewardService(4)
        service.submit("s", 0.0, samples)
        service.wait("s", "a", 2, by_index)
        service.wait("s", "b", 2, by_index)
        assert Collector(service).advance() == expected


def test_what_is_there_before_somebody_waits_comes_with_the_next_look_and_the_time_it_was_there() -> None:
    service = RewardService(2)
    service.submit("s", 0.0, [(0, 2.0), (1, 1.0), (2, 1.5)])
    assert service.advance(50.0) is None
    service.wait("s", "late", 2)
    assert service.advance(50.0) == (2.0, "late", (1, 0))
    service.wait("s", "later", 1)
    assert service.advance(50.0) == (2.5, "later", (2,))


def test_a_waiter_gets_nothing_before_an_earlier_waiter() -> None:
    service = RewardService(4)
    service.submit("s", 0.0, [(0, 9.0), (1, 1.0), (2, 2.0)])
    service.wait("s", "a", 1, by_index=True)
    service.wait("s", "b", 2, by_index=True)
    assert service.advance(5.0) is None
    assert Collector(service).advance() == [(9.0, "a", (0,)), (9.0, "b", (1, 2))]


def test_a_key_submitted_in_pieces_is_collected_in_parts_as_they_arrive() -> None:
    service = RewardService(1)
    collector = Collector(service)
    service.submit("s", 0.0, [(0, 1.0), (1, 1.0), (0, 1.0)])
    service.wait("s", "first", 2)
    service.wait("s", "second", 2)
    service.wait("s", "third", 1)
    assert collector.advance(2.5) == []
    service.submit("s", 2.5, [(2, 1.0), (3, 2.0)])
    assert collector.advance(4.5) == [(3.0, "first", (1, 0))]
    service.submit("s", 10.0, [(4, 1.0)])
    assert collector.advance()[1:] == [(6.0, "second", (2, 3)), (11.0, "third", (4,))]
    assert service.served == 6


def test_a_key_collected_to_its_last_group_can_be_submitted_again() -> None:
    service = RewardService(1)
    assert starts_of_instant_requests(service, "s", 0.0, 1) == [0.0]
    assert starts_of_instant_requests(service, "s", 4.0, 2) == [4.0, 4.0]


def test_deliveries_come_in_the_order_of_time_over_all_keys() -> None:
    service = RewardService(8)
    for key in "abcdefgh":
        service.submit(key, 0.0, [(0, float(ord("h") - ord(key)))])
        service.wait(key, key, 1)
    assert all(one.at < next_one.at for one, next_one in pairwise(Collector(service).advance()))


# --- what is wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [0, -3])
def test_without_a_server_there_is_an_error(servers: int) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.concurrency={servers}; give 1 request in flight or more"):
        RewardService(servers)


@pytest.mark.parametrize("rpm", [0, 0.0, -1.5, math.nan, -math.inf])
def test_a_rate_that_is_none_is_said(rpm: float) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.rpm={rpm:g}; give more than 0 requests per minute"):
        RewardService(1, rpm)


def test_an_infinite_rate_is_no_limit() -> None:
    assert starts_of_instant_requests(RewardService(1, rpm=math.inf), "s", 0.0, 500) == [0.0] * 500


def test_waiting_for_a_group_that_was_never_submitted_is_an_error() -> None:
    service = RewardService(1)
    service.submit("step 1", 0.0, [(0, 1.0)])
    with pytest.raises(DataflowError, match="'step 2' was never submitted"):
        service.wait("step 2", "trainer", 1)


def test_where_nothing_is_to_do_nothing_comes() -> None:
    service = RewardService(1)
    assert service.advance(0.0) is None
    service.submit("s", 1.0, [])
    assert service.advance(math.inf) is None
    assert service.served == 0
