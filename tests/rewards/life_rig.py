"""Lifecycles on a clock that takes no time: each ask's calls do what the test says, and all that is told is kept."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dataflow.rewards.lifecycle import Lifecycle
from dataflow.rewards.limits.queues import Limiter, Limits
from dataflow.rewards.requests import Ask
from dataflow.rewards.retry import Retry
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
    """How an ask ended."""

    score: float | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    how: str = ""
    story: str = ""
    error: BaseException | None = None
    at: float = 0.0
    times: int = 0


class Rig:
    """A lifecycle with its calls and limits.

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
            limits or Limits(), lambda ask, line: self.life.start(ask, line), on_bug=self.bugs.append
        )
        self.life = Lifecycle(
            self.compute_score,
            self.calls,
            self.limiter,
            retry or Retry(backoff_s=0.0, max_backoff_s=0.0),
            hedge_after,
            self,
        )
        self.begun: list[tuple[float, str]] = []
        self.cancelled: Counter[str] = Counter()
        self.now = self.most = 0
        self.asks: dict[str, Ask] = {}
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
        """Asks for all in the plan, or for these."""
        for name in names or self.plan:
            place = (0, step, len(self.asks))
            self.asks[name] = Ask({"name": name}, None, place, [object()], endpoint, tokens)  # type: ignore[list-item]
            self.told[name] = Told()
            self.life.queue(self.asks[name])
        self.life.fill()

    def drop(self, name: str) -> None:
        """Nobody wants it any more, as Asks.detach has it."""
        self.asks[name].requests = []
        self.life.drop(self.asks[name])
        self.limiter.fill()

    # --- Lifecycle's Outcome ----------------------------------------------------------------------------------

    def started(self, ask: Ask) -> None:
        assert ask.tries == 1
        assert self.told[ask.arguments["name"]].times == 0

    def settled(self, ask: Ask, score: float, extras: dict[str, Any], how: str) -> None:
        told = self._end(ask)
        told.score, told.extras, told.how = score, extras, how

    def gave_up(self, ask: Ask, story: str, error: BaseException) -> None:
        told = self._end(ask)
        told.story, told.error = story, error

    def _end(self, ask: Ask) -> Told:
        ask.requests = []
        told = self.told[ask.arguments["name"]]
        told.at = self.loop.time()
        told.times += 1
        self.changed.set()
        return told

    async def end(self) -> None:
        """Waits until all asks have ended, and their calls."""
        while not all(told.times for told in self.told.values()):
            self.changed.clear()
            await self.changed.wait()
        while self.calls.live:
            await asyncio.sleep(1)
        self.idle()

    def idle(self) -> None:
        """Nothing is left behind."""
        assert self.bugs == []
        assert (self.limiter.running, self.limiter.waiting(), self.now) == (0, 0, 0)
        assert all(line.running == 0 for line in self.limiter.lines.values())
        assert all(ask.timer is None and not ask.live for ask in self.asks.values())
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
    """Runs all asks of a plan to their end; returns what came of them."""

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
