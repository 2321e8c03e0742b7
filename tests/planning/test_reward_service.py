"""The reward service as a queue: against hand computation and against a naive simulation of the same rules."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.planning.reward_service import POLL_S, Delivery, Requests, RewardService, places_of

# Few values and all of them exact in binary, so that ties are frequent and sums are the same in any order.
TIMES = st.integers(0, 24).map(lambda quarters: quarters / 4)
SECONDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.0, 2.0, 3.75])
RPMS = st.sampled_from([None, 120.0, 15.0, 7.5, 3.75, 0.9375])
SERVERS = st.integers(1, 4)
Sample = tuple[int, float]
"""The group and the seconds of a request."""

some_examples = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Submission(NamedTuple):
    key: str
    at: float
    samples: Sequence[Sample]
    order: tuple[int, int] = (0, 0)


class Wait(NamedTuple):
    key: str
    who: Any
    groups: int | tuple[int, ...]


class Begun(NamedTuple):
    start: float
    end: float
    key: str
    group: int


class Load(NamedTuple):
    submissions: list[Submission]
    waits: list[Wait]


@st.composite
def loads(draw: st.DrawFn, whole_keys: bool = False) -> Load:
    submissions: list[Submission] = []
    groups: Counter[str] = Counter()
    for number in range(draw(st.integers(1, 5))):
        key = f"step {number}" if whole_keys else draw(st.sampled_from(["train", "more", "validation"]))
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
        samples = [(groups[key] + n, draw(SECONDS)) for n, size in enumerate(sizes) for _ in range(size)]
        groups[key] += len(sizes)
        order = draw(st.tuples(st.integers(0, 2), st.integers(0, 1)))
        submissions.append(Submission(key, draw(TIMES), draw(st.permutations(samples)), order))
    waits = []
    for key, total in groups.items():
        named, left = draw(st.booleans()), list(draw(st.permutations(range(total))))
        while left:
            count = draw(st.integers(1, len(left)))
            waits.append(Wait(key, (key, len(left)), tuple(left[:count]) if named else count))
            del left[:count]
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
    arrived: dict[str, list[int]] = {key: [] for key in waiting}
    result = []
    for key, group in sorted(ends, key=ends.__getitem__):
        arrived[key].append(group)
        while waiting[key]:
            wanted = waiting[key][0].groups
            groups = tuple(arrived[key][:wanted]) if isinstance(wanted, int) else wanted
            if not set(groups) <= set(arrived[key]) or (isinstance(wanted, int) and len(groups) < wanted):
                break
            arrived[key] = [each for each in arrived[key] if each not in groups]
            result.append(Delivery(ends[key, group][0], waiting[key].popleft().who, groups))
    return result


# --- driving the service ------------------------------------------------------------------------------------


class Driven:
    """A service that is told of submissions and waits, and what it delivers."""

    def __init__(self, servers: int | None, rpm: float | None = None, per_step: bool = False) -> None:
        self.service = RewardService(servers, rpm, per_step)
        self.deliveries: list[Delivery] = []

    def submit(self, key: str, at: float, samples: Sequence[Sample], order: tuple[int, int] = (0, 0)) -> None:
        requests = Requests([seconds for _, seconds in samples], places_of(group for group, _ in samples))
        self.service.submit(key, at, requests, order)

    def wait(self, key: str, who: Any, groups: int | Sequence[int] = 1) -> None:
        self.service.wait(key, who, groups)

    def advance(self, until: float = math.inf) -> list[Delivery]:
        while found := self.service.advance(until):
            assert found.at <= until
            self.deliveries.append(found)
        return self.deliveries

    def ends(self, key: str, groups: int) -> dict[int, float]:
        """Returns when each group of a key is there."""
        for _ in range(groups):
            self.wait(key, key)
        return {d.groups[0]: d.at for d in self.advance() if d.waiter == key}


def all_known(load: Load, servers: int, rpm: float | None, per_step: bool = False) -> Driven:
    driven = Driven(servers, rpm, per_step)
    for submission in load.submissions:
        driven.submit(*submission)
    for wait in load.waits:
        driven.wait(*wait)
    return driven


REFERENCES: dict[bool, Callable[..., list[Begun]]] = {False: begun_by_priority, True: begun_step_by_step}
"""By ``per_step``."""


@some_examples
@given(loads(), SERVERS, RPMS, st.booleans(), st.lists(TIMES, max_size=30))
def test_deliveries_are_those_of_the_reference_however_often_one_looks(
    load: Load, servers: int, rpm: float | None, per_step: bool, looks: list[float]
) -> None:
    begun = REFERENCES[per_step](load.submissions, servers, rpm)
    driven = all_known(load, servers, rpm, per_step)
    for until in sorted(looks):
        driven.advance(until)
    assert driven.advance() == delivered(begun, load.waits)


@some_examples
@given(
    load=loads(whole_keys=True),
    servers=SERVERS,
    rpm=RPMS,
    per_step=st.booleans(),
    foreseen=st.sets(st.integers(0, 4)),
)
def test_what_is_submitted_only_when_its_time_comes_is_served_as_if_it_had_been_known(
    load: Load, servers: int, rpm: float | None, per_step: bool, foreseen: set[int]
) -> None:
    driven = Driven(servers, rpm, per_step)

    def hand_in(submission: Submission) -> None:
        driven.submit(*submission)
        for wait in load.waits:
            if wait.key == submission.key:
                driven.wait(*wait)

    by_time = sorted(load.submissions, key=lambda s: s.at)
    for number, submission in enumerate(by_time):
        if number in foreseen:
            hand_in(submission)
    for number, submission in enumerate(by_time):
        driven.advance(submission.at)
        if number not in foreseen:
            hand_in(submission)
    # Of equals that come at the same time, the one foreseen is the first to be submitted.
    known = [s for _, s in sorted(enumerate(by_time), key=lambda item: item[0] not in foreseen)]
    expected = delivered(REFERENCES[per_step](known, servers, rpm), load.waits)
    assert sorted(driven.advance()) == sorted(expected)


# --- by hand ------------------------------------------------------------------------------------------------


def test_a_submission_on_a_delivery_precedes_work_that_begins_at_that_time() -> None:
    driven = Driven(1)
    driven.submit("validation", 0.0, [(0, 4.0), (1, 4.0), (2, 4.0)], order=(9, 0))
    driven.wait("validation", "first")
    driven.wait("validation", "others", 2)
    assert driven.service.advance(math.inf) == (4.0, "first", (0,))
    driven.submit("train", 4.0, [(0, 3.0)], order=(1, 0))
    driven.wait("train", "trainer")
    assert driven.advance() == [(7.0, "trainer", (0,)), (15.0, "others", (1, 2))]


def test_a_bucket_of_a_seconds_worth_fills_while_nothing_starts() -> None:
    driven = Driven(200, rpm=600)
    for key, at, n, last in (("first", 0.0, 12, [0.0, 0.1, 0.2]), ("later", 1000.0, 11, [1000.0, 1000.0, 1000.1])):
        driven.submit(key, at, [(g, 0.0) for g in range(n)])
        assert list(driven.ends(key, n).values())[-3:] == pytest.approx(last)
    slow = Driven(4, rpm=0.5)
    slow.submit("s", 0.0, [(g, 0.0) for g in range(3)])
    assert slow.ends("s", 3) == {0: 0.0, 1: 120.0, 2: 240.0}, "the first at once"


def test_step_by_step_a_step_begins_when_the_last_request_of_the_one_before_has_ended() -> None:
    driven = Driven(2, per_step=True)
    driven.submit("1", 0.0, [(0, 1.0), (1, 9.0)])
    driven.submit("1", 0.5, [(2, 1.0)])  # a further chunk, which does not wait
    driven.submit("2", 0.75, [(0, 1.0)])
    driven.submit("idle", 20.0, [(0, 1.0)])
    for key, groups in (("1", 3), ("2", 1), ("idle", 1)):
        driven.wait(key, key, groups)
    assert driven.advance() == [
        (9.0, "1", (0, 2, 1)),
        (10.0, "2", (0,)),
        (21.0 + POLL_S / 2, "idle", (0,)),
    ], "an idle service has to look first"


def test_without_a_limit_each_request_is_served_as_it_comes() -> None:
    driven = Driven(None)
    driven.submit("1", 2.0, [(0, 1.0), (1, 9.0), (0, 3.0)])
    assert driven.ends("1", 2) == {0: 5.0, 1: 11.0}
