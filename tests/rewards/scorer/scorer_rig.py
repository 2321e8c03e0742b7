"""A scorer on virtual time: the calls of each job are scripted, and all outcomes are recorded."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.queues import Limiter
from dataflow.rewards.requests import JobState, Outcome, Scored, ScoringJob
from dataflow.rewards.retry import Retry
from dataflow.rewards.scorer import Scorer
from dataflow.usercode.calls import Calls
from tests.rigs.virtual_time import run_virtual

LOST = ConnectionResetError("reset")
AT_ONCE: dict[str, Any] = {"backoff_s": 0.0, "max_backoff_s": 0.0}


@dataclass(frozen=True)
class Does:
    """What one call does: it takes its time, then returns or raises."""

    seconds: float = 1.0
    result: Any = 1.0
    error: type[BaseException] | BaseException | None = None


FOR_EVER = Does(math.inf)


@dataclass
class Told:
    """How a job ended."""

    score: float | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    how: str = ""
    story: str = ""
    error: BaseException | None = None
    at: float = 0.0
    times: int = 0


class Rig:
    """A scorer with its calls and limits.

    Args:
        plan: what the calls of each ask do, by its name; the last one again for all that follow.
        limits, retry, hedge_after: as the agent's.
    """

    def __init__(
        self,
        plan: dict[str, list[Does]],
        limits: Limits | None = None,
        retry: Retry | None = None,
        hedge_after: str | float | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.plan = plan
        self.strays: list[int] = []
        self.bugs: list[Exception] = []
        self.calls = Calls(self.strays.append, self.bugs.append)
        self.limiter = Limiter(
            limits or Limits(), lambda job, queue: self.scorer.start(job, queue), on_bug=self.bugs.append
        )
        self.scorer = Scorer(
            self.compute_score,
            self.calls,
            self.limiter,
            retry or Retry(backoff_s=0.0, max_backoff_s=0.0),
            hedge_after,
            self.on_outcome,
        )
        self.begun: list[tuple[float, str]] = []
        self.cancelled: Counter[str] = Counter()
        self.now = self.most = 0
        self.jobs: dict[str, ScoringJob] = {}
        self.told: dict[str, Told] = {}
        self.changed = asyncio.Event()

    async def compute_score(self, name: str) -> Any:
        done = sum(begun == name for _at, begun in self.begun)
        self.begun.append((self.loop.time(), name))
        self.now += 1
        self.most = max(self.most, self.now)
        does = self.plan[name][min(done, len(self.plan[name]) - 1)]
        try:
            await (asyncio.sleep(does.seconds) if does.seconds < math.inf else self.loop.create_future())
        except asyncio.CancelledError:
            self.cancelled[name] += 1
            raise
        finally:
            self.now -= 1
        if does.error is not None:
            raise does.error
        return does.result

    def ask(self, *names: str, step: int = 1, tokens: int = 0, endpoint: str = "") -> None:
        """Scores all jobs of the plan, or these."""
        for name in names or self.plan:
            job = ScoringJob({"name": name}, None, (0, step, len(self.jobs)), [object()], endpoint, tokens)  # type: ignore[list-item]
            self.jobs[name], self.told[name] = job, Told()
            self.scorer.score(job)
        self.limiter.fill()

    def drop(self, name: str) -> None:
        """Cancels a job, as the agent does when no request needs it."""
        if self.jobs[name].state is not JobState.DONE:
            self.scorer.cancel(self.jobs[name])
        self.limiter.fill()

    def on_outcome(self, job: ScoringJob, outcome: Outcome) -> None:
        assert job.state is JobState.DONE
        told = self.told[job.arguments["name"]]
        told.at = self.loop.time()
        told.times += 1
        if isinstance(outcome, Scored):
            told.score, told.extras, told.how = outcome.score, outcome.extras, outcome.source
        else:
            told.story, told.error = outcome.message, outcome.error
        self.changed.set()

    async def end(self) -> None:
        """Waits until all jobs have ended, and their calls."""
        while not all(told.times for told in self.told.values()):
            self.changed.clear()
            await self.changed.wait()
        while self.calls.live:
            await asyncio.sleep(1)
        self.idle()

    def idle(self) -> None:
        """Nothing is left behind."""
        assert self.bugs == []
        assert (self.limiter.running, self.now) == (0, 0)
        assert all(queue.running == 0 for queue in self.limiter.queues.values())
        assert all(job.timer is None and not job.live for job in self.jobs.values())
        assert all(told.times <= 1 for told in self.told.values())

    def times(self, name: str) -> list[float]:
        return [at for at, begun in self.begun if begun == name]


def error(kind: type[Exception] = Exception, text: str = "", **attributes: Any) -> Exception:
    """Returns an exception with attributes."""
    made = kind(text)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def run_life(body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Runs it on a clock that takes no time, of which latencies are too."""

    def now() -> float:
        return asyncio.get_running_loop().time()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dataflow.system.clock.now", now)
        for module in ("usercode.calls", "rewards.limits.queues"):
            patch.setattr(f"dataflow.{module}.time", SimpleNamespace(perf_counter=now))
        return run_virtual(body)


def lives(
    plan: dict[str, list[Does]], then: Callable[[Rig], Coroutine[Any, Any, Any]] | None = None, **how: Any
) -> Rig:
    """Runs all jobs of a plan to their end; returns what came of them."""

    async def body() -> Rig:
        rig = Rig(plan, **how)
        rig.ask()
        if then is not None:
            await then(rig)
        await rig.end()
        await rig.calls.close()
        rig.limiter.close()
        return rig

    return run_life(body)  # type: ignore[no-any-return]


def life(*does: Does, **how: Any) -> tuple[Rig, Told]:
    rig = lives({"a": list(does)}, **how)
    return rig, rig.told["a"]


BUSY = error(status=503)
