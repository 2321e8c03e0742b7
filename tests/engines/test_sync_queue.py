"""The queue of samples and pauses, over a backend whose jobs end when the test ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.engines.base import Sample
from dataflow.engines.sync_queue import FinishedSample, Job, SampleQueue
from dataflow.errors import Aborted, DataError, ServiceLost
from tests.engines.drawing import run

pytestmark = pytest.mark.timeout(60)


class Desk:
    """A backend: jobs run until ``end`` is called."""

    def __init__(self, queue: SampleQueue) -> None:
        self.queue = queue
        self.running: list[int] = []
        self.cancelled: list[int] = []
        queue.backend = self

    def start(self, jobs: Sequence[Job]) -> None:
        self.running += [job.id for job in jobs]

    def cancel(self, ids: Sequence[int]) -> None:
        self.cancelled += ids
        self.running = [id for id in self.running if id not in ids]

    def end(self, count: int = 1) -> None:
        ids, self.running = self.running[:count], self.running[count:]
        self.queue.on_finished([FinishedSample(id, [7] * (id + 1), [0.0] * (id + 1), "stop", 0) for id in ids])


def jobs(count: int, first: int = 0) -> list[Job]:
    inbox: asyncio.Queue[Sample | Exception] = asyncio.Queue()
    return [Job(first + i, 0, [1], None, inbox) for i in range(count)]


def got(asked: Sequence[Job]) -> list[Any]:
    """Returns (group, version) of the samples that came, or the kind of error."""
    inbox, found = asked[0].inbox, []
    while not inbox.empty():
        entry = inbox.get_nowait()
        found.append((entry.group, entry.version) if isinstance(entry, Sample) else type(entry))
    return found


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def sync(queue: SampleQueue, version: int, log: list[Any], **how: Any) -> asyncio.Task[None]:
    async def work() -> None:
        await asyncio.sleep(0)
        queue.version = version
        log.append(version)

    return asyncio.ensure_future(queue.pause(work, **how))


def test_a_pause_waits_for_those_before_it_and_those_behind_wait_for_it() -> None:
    async def body() -> None:
        queue, log = SampleQueue(), []
        desk = Desk(queue)
        queue.put(before := jobs(2))
        pausing = sync(queue, 1, log)
        await turn()
        queue.put(behind := jobs(2, first=2))
        assert (desk.running, queue.unended) == ([0, 1], 4)
        desk.end()
        await turn()
        assert (log, desk.running) == ([], [1])
        desk.end()
        await turn()
        assert pausing.done()
        assert (log, desk.running) == ([1], [2, 3])
        desk.end(2)
        assert got(before) == [(0, 0), (1, 0)]
        assert got(behind) == [(2, 1), (3, 1)]
        assert queue.counts["tokens"] == 1 + 2 + 3 + 4

    run(body())


def test_redraw_does_not_wait() -> None:
    async def body() -> None:
        queue, log = SampleQueue(), []
        desk = Desk(queue)
        queue.put(asked := jobs(3))
        desk.end()
        pausing = sync(queue, 1, log, redraw=True)
        await turn()
        assert pausing.done()
        assert (desk.cancelled, desk.running) == ([1, 2], [3, 4])
        queue.on_finished([FinishedSample(1, [5], [0.0], "stop", 0)])  # it was on its way
        desk.end(2)
        assert got(asked) == [(0, 0), (1, 1), (2, 1)]

    run(body())


def test_jobs_between_two_pauses_have_the_version_between() -> None:
    async def body() -> None:
        queue, log = SampleQueue(), []
        desk = Desk(queue)
        queue.put(first := jobs(1))
        tasks = [sync(queue, 1, log)]
        await turn()
        queue.put(second := jobs(1))
        tasks.append(sync(queue, 2, log))
        await turn()
        for _ in range(2):
            desk.end()
            await turn()
        assert all(task.done() for task in tasks)
        assert log == [1, 2]
        assert got(first) + got(second) == [(0, 0), (0, 1)]

    run(body())


def test_jobs_wait_while_asleep_but_a_sync_and_waking_do_not() -> None:
    async def body() -> None:
        queue, log = SampleQueue(), []
        desk = Desk(queue)
        await sync(queue, 0, log, asleep=True)
        queue.put(asked := jobs(1))
        await turn()
        assert desk.running == []
        await sync(queue, 1, log)
        assert desk.running == []
        await sync(queue, 2, log, asleep=False)
        desk.end()
        assert got(asked) == [(0, 2)]

    run(body())


def test_dropped_jobs_are_freed_and_let_a_pause_in() -> None:
    async def body() -> None:
        queue, log = SampleQueue(), []
        desk = Desk(queue)
        queue.put(asked := jobs(3))
        desk.end()
        pausing = sync(queue, 1, log)
        await turn()
        queue.put(waiting := jobs(2))
        queue.drop(waiting)
        queue.drop(asked)
        queue.drop(asked)
        await turn()
        assert pausing.done()
        assert (desk.cancelled, desk.running, queue.unended) == ([1, 2], [], 0)
        assert got(asked) == [(0, 0)]

    run(body())


def test_a_pause_that_nobody_waits_for_is_left_out() -> None:
    async def body() -> None:
        queue, log = SampleQueue(), []
        desk = Desk(queue)
        queue.put(jobs(1))
        pausing = sync(queue, 1, log)
        await turn()
        queue.put(behind := jobs(1))
        pausing.cancel()
        await turn()
        assert len(desk.running) == 2
        desk.end(2)
        assert (log, got(behind)) == ([], [(0, 0)])

    run(body())


def test_abort_reaches_those_in_flight_and_those_in_line() -> None:
    async def body() -> None:
        queue, log = SampleQueue(), []
        desk = Desk(queue)
        queue.put(running := jobs(2))
        pausing = sync(queue, 1, log)
        await turn()
        queue.put(waiting := jobs(3))
        assert queue.abort() == 5
        assert got(running) + got(waiting) == [Aborted] * 5
        assert desk.cancelled == [0, 1]
        await turn()
        assert pausing.done()
        assert queue.abort() == 0

    run(body())


def test_one_refusal_is_one_jobs() -> None:
    async def body() -> None:
        queue = SampleQueue()
        desk = Desk(queue)
        queue.put(asked := jobs(2))
        queue.on_refused(0, DataError("no"))
        desk.running.remove(0)
        desk.end()
        assert got(asked) == [DataError, (1, 0)]

    run(body())


@pytest.mark.parametrize("where", ["running", "pause", "start"])
def test_a_failure_reaches_everybody(where: str) -> None:
    async def body() -> None:
        queue, log, cause = SampleQueue(), [], ValueError("broken")
        desk = Desk(queue)

        async def broken() -> None:
            raise cause

        def refuse(jobs: Sequence[Job]) -> None:
            raise cause

        queue.put(running := jobs(1))
        pausing = asyncio.ensure_future(queue.pause(broken))
        later = sync(queue, 1, log)
        await turn()
        if where == "running":
            queue.fail(cause)
        elif where == "pause":
            desk.end()
        else:
            desk.start = refuse  # type: ignore[method-assign]
            pausing.cancel()
            later.cancel()
            await turn()
            queue.put(jobs(1))
        await turn()
        assert got(running) == ([(0, 0)] if where == "pause" else [ServiceLost])
        for task in (pausing, later) if where != "start" else ():
            error = task.exception()
            assert isinstance(error, ServiceLost)
            assert error.__cause__ is cause
        with pytest.raises(ServiceLost, match=r"vLLM failed .ValueError: broken"):
            queue.put(jobs(1))
        with pytest.raises(ServiceLost, match="rebuilt"):
            await queue.pause(broken)
        assert queue.unended == 0

    run(body())


def test_closing_ends_all() -> None:
    async def body() -> None:
        queue, log = SampleQueue(), []
        Desk(queue)
        queue.put(asked := jobs(2))
        pausing = sync(queue, 1, log)
        await turn()
        queue.close()
        await turn()
        assert got(asked) == [Aborted] * 2
        assert isinstance(pausing.exception(), Aborted)
        with pytest.raises(Aborted, match="closed"):
            queue.put(jobs(1))

    run(body())


@given(st.lists(st.sampled_from(["put", "sync", "redraw", "sleep", "wake", "end", "drop", "abort"]), max_size=30))
def test_each_job_ends_once_whatever_happens(steps: list[str]) -> None:
    async def body() -> None:
        queue, log = SampleQueue(), []
        desk = Desk(queue)
        asked: list[list[Job]] = []
        dropped: list[Job] = []
        pauses: list[asyncio.Task[None]] = []
        for at, step in enumerate(steps, 1):
            if step == "put":
                asked.append(jobs(2))
                queue.put(asked[-1])
            elif step in ("sync", "redraw", "sleep", "wake"):
                asleep = {"sleep": True, "wake": False}.get(step)
                pauses.append(sync(queue, at, log, redraw=step == "redraw", asleep=asleep))
            elif step == "end":
                desk.end()
            elif step == "drop" and asked:
                dropped += [job for job in asked[0] if not job.ended]
                queue.drop(asked.pop(0))
            elif step == "abort":
                queue.abort()
            await turn()
        pauses.append(sync(queue, 99, log, asleep=False))
        for _ in range(100):
            desk.end(99)
            await turn()
        assert all(pause.done() and pause.exception() is None for pause in pauses)
        assert queue.unended == 0
        for group in asked:
            found = got(group)
            assert len(found) == 2
            versions = [entry[1] for entry in found if entry is not Aborted]
            assert all(version in (0, *log) for version in versions)
        assert all(job.ended for job in dropped)

    run(body())
