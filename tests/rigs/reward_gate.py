"""The rig with which the state machine drives the reward agent: a clock that it moves and calls that it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from tests.rigs.reward_model import Model

TURNS = 24
"""Of the event loop, in which everything that one event brings about is over."""


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is what the test says."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Runs until there is nothing left to do at this time."""

        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.run_until_complete(turns())


class Lost(ConnectionError):
    """Another try may succeed, after a while."""

    def __init__(self, wait: float) -> None:
        super().__init__("gone")
        self.retry_after = wait


class Throttled(Exception):
    status = 429

    def __init__(self, wait: float) -> None:
        super().__init__("slow down")
        self.retry_after = wait


class Fatal(Exception):
    fatal = True


@dataclass(eq=False)
class Call:
    key: Any
    future: asyncio.Future[Any]
    limit: float


class Gate:
    """The reward function: its calls end when the machine lets them."""

    def __init__(self, model: Model, loop: Clock) -> None:
        self.model, self.loop = model, loop
        self.calls: list[Call] = []

    async def compute_score(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        key = extra_info.get("at", solution_str)
        call = Call(key, self.loop.create_future(), self.model.started(key, self.loop.now))
        self.calls.append(call)
        try:
            return await call.future
        finally:
            self.calls.remove(call)
