"""The system clock is set during a run: durations stay the same, and no time runs backwards."""

from __future__ import annotations

import asyncio
import email.utils
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.executors.base import Executor
from dataflow.executors.inline import InlineExecutor
from dataflow.graph import Pipeline, TaskInfo, stage
from dataflow.policy import SchedulingPolicy, expand
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.retry import read_retry_after
from dataflow.rewards.slots import Item, Slots
from dataflow.runner import Runner
from dataflow.system import clock
from dataflow.timeline.spans import Trace

pytestmark = [pytest.mark.timeout(60), pytest.mark.shares_ray]
DAY = 86_400.0
JUMPS = pytest.mark.parametrize("jump_s", [DAY, -DAY, None], ids=["forwards", "backwards", "to and fro"])
LONG = 3_600.0
"""No test takes this long, and every jump is longer."""


@pytest.fixture
def jump(jump_s: float | None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sets the system's clock, once it is called: by a day, or by a day to and fro at each reading."""
    real, offsets = time.time, iter(())

    def to_and_fro() -> Iterator[float]:
        while True:
            yield DAY
            yield -DAY

    def now() -> float:
        return real() + next(offsets, jump_s or 0.0)

    def jump() -> None:
        nonlocal offsets
        offsets = to_and_fro() if jump_s is None else iter(())  # type: ignore[assignment]
        monkeypatch.setattr(time, "time", now)

    return jump


@JUMPS
def test_the_clock_goes_on_evenly(jump: Callable[[], None]) -> None:
    before = clock.now()
    assert abs(before - time.time()) < LONG, "it is unix time"
    jump()
    times = [before, *(clock.now() for _ in range(9))]
    assert times == sorted(times)
    assert times[-1] - before < LONG


SAMPLES = Batch(
    [0, 0, 1, 1],
    {"data_source": ["d"] * 4, "ground_truth": ["1"] * 4, "response_text": ["1"] * 4},
)


@JUMPS
@pytest.mark.parametrize("fails", [False, True], ids=["scored", "failed"])
@pytest.mark.parametrize("hedged", [False, True], ids=["once", "hedged"])
def test_latencies_of_rewards(jump: Callable[[], None], fails: bool, hedged: bool) -> None:
    """The clock is set while calls run, one of which loses against its hedge."""
    told: list[dict[str, Any]] = []
    calls = 0

    class Judge:
        async def compute_score(self, **_arguments: Any) -> float:
            nonlocal calls
            calls += 1
            if calls == 1:
                jump()
                if hedged:
                    await asyncio.Event().wait()
            await asyncio.sleep(0)
            if fails:
                raise ValueError("no")
            return 1.0

        def log(self, **columns: Any) -> None:
            told.append(columns)

    async def body() -> tuple[Batch, dict[str, Any]]:
        agent = RewardAgent(
            Judge(),
            retry=Retry(tries=2, timeout_s=1.0, deadline_s=2.0, backoff_s=0.0),
            limits=Limits(concurrency=4, adaptive=True, rpm=6e6),
            hedge_after=0.001 if hedged else None,
            on_failure="score:0",
            max_failed_share=1.0,
        )
        agent.submit(1, SAMPLES)
        got = await agent.collect(1)
        stats = agent.stats()
        await agent.close()
        return got, stats

    before = clock.now()
    got, stats = asyncio.run(body())
    for record in got.meta["records"]:
        assert before <= record["begin"] <= record["end"] <= clock.now()
        assert 0 <= record.get("queued_s", 0.0) < LONG
    assert all(0 <= seconds < LONG for seconds in got.meta["latency_s"])
    assert all(0 <= seconds < LONG for seconds in stats["latency_s"].values())
    assert all(0 <= value < LONG for name, value in got.meta["step"].items() if name.startswith("latency_"))
    assert all(before <= at <= clock.now() for at, _endpoint, _limit in got.meta["limits"])
    assert all(0 <= seconds < LONG for columns in told for seconds in columns["latencies"])


@JUMPS
def test_one_flight_that_is_turned_away_cuts_an_adaptive_limit_once(jump: Callable[[], None]) -> None:
    """Calls that began before the cut say nothing new, wherever the system's clock stands when they end."""

    async def body() -> float:
        slots = Slots(Limits(concurrency=10, adaptive=True))
        taken = [await slots.acquire(Item((0, 1, 1), 0.0)) for _ in range(10)]
        jump()
        for slot in taken:
            slots.release(slot, overloaded=True, failed=True)
        changes = slots.take_changes()
        assert [at for at, _endpoint, _limit in changes] == sorted(at for at, _endpoint, _limit in changes)
        return slots.queues[""].limit

    assert asyncio.run(body()) == pytest.approx(7.0)


@JUMPS
def test_a_date_in_retry_after_counts_from_the_servers_clock(jump: Callable[[], None]) -> None:
    at = time.time()
    date, later = email.utils.formatdate(at, usegmt=True), email.utils.formatdate(at + 60, usegmt=True)
    jump()
    assert read_retry_after({"Retry-After": later, "Date": date}) == 60
    assert read_retry_after({"retry-after": later, "date": date}) == 60
    assert read_retry_after({"Retry-After": date, "Date": later}) == 0
    assert read_retry_after({"Retry-After": "7", "Date": date}) == 7


def test_without_the_servers_date_ours_counts() -> None:
    later = email.utils.formatdate(time.time() + LONG, usegmt=True)
    for headers in ({"Retry-After": later}, {"Retry-After": later, "Date": "yesterday"}):
        assert 0 < read_retry_after(headers) <= LONG


def graph_of(jump: Callable[[], None]) -> Any:
    @stage(writes="responses", on="gpu")
    def rollout(prompts: Any, *, task: TaskInfo) -> Any:
        if task.step == 2:
            jump()
        return prompts

    @stage(writes="rewards", on="reward")
    async def score(responses: Any, *, task: TaskInfo) -> Any:
        begin = clock.now()
        await asyncio.sleep(0)
        task.mark("reward", begin, clock.now())
        return responses

    @stage(writes="actor", on="gpu")
    def update(rewards: Any) -> Any:
        return rewards

    return expand(Pipeline([rollout, score, update], inputs=["prompts"]), SchedulingPolicy(), 3)


def traced(graph: Any, executor: Executor) -> Trace:
    async def body() -> Trace:
        await executor.open(graph.pipeline)
        try:
            prompts = Batch([0, 1], {"x": [1, 2]})
            return await Runner(graph, executor, inputs={"prompts": lambda step: prompts}, trace=Trace()).run()
        finally:
            await executor.close()

    return asyncio.run(body())


def check_order(trace: Trace) -> None:
    order = [span for step in (1, 2, 3) for name in ("rollout", "score", "update") for span in trace.spans
             if (span.stage, span.step) == (name, step)]  # fmt: skip
    assert len(order) == 9
    for span in trace.spans:
        assert 0 <= span.begin <= span.end < LONG
    for before, after in zip(order[::3], order[1::3], strict=True):
        assert before.end <= after.begin, "a task begins after what it waited for"
    for mark in trace.marks:
        assert 0 <= mark.begin <= mark.end < LONG
    assert 0 <= trace.wall < LONG


@JUMPS
def test_a_trace_stays_in_order(jump: Callable[[], None]) -> None:
    check_order(traced(graph_of(jump), InlineExecutor()))


STAMPS = {
    "system/clock.py",
    "rewards/ledger.py",
    "system/http.py",
    "rewards/judge/server.py",
}
"""Files that read the system's clock: one to anchor ours, the others for a stamp or another machine's date."""


def test_no_other_file_reads_the_systems_clock() -> None:
    package = Path(clock.__file__).parents[1]
    reads = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.(now|utcnow|today)\b|from time import .*\btime\b")
    found = {str(f.relative_to(package)) for f in package.rglob("*.py") if reads.search(f.read_text())}
    assert found <= STAMPS, "durations come from dataflow.system.clock, the loop's clock or perf_counter"
