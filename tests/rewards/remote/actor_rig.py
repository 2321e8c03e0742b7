"""Actors of a remote agent without Ray: in this process, on a virtual clock, killed on command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import pytest

from dataflow.reward_agent import RewardAgent
from dataflow.rewards.ledger.ledger import Answer
from dataflow.rewards.remote import agent as remote
from dataflow.rewards.remote.agent import RemoteAgent
from dataflow.rewards.remote.host import RewardHost

FACTORIES: dict[int, Callable[[], RewardAgent]] = {}
"""They stay here, with what they share with their test, while their number travels."""


class Actor:
    """Runs a host's methods as Ray does: calls overtake each other, and all end with their process.

    Args:
        delays_s: how long each call is on its way, in turn.
    """

    def __init__(self, delays_s: Iterator[float] | None = None) -> None:
        self.host = RewardHost()
        self.dead = False
        self._delays_s = delays_s or repeat(0.0)
        self._calls: dict[asyncio.Task[Any], asyncio.Future[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": staticmethod(partial(self._call, name))})

    def _call(self, name: str, *values: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        if self.dead:
            self._lose(answer)
        elif name == "build":
            blob, of, _limits, _anchor, _imports = values
            answer.set_result(_at_once(self.host.build(blob, of)))
        elif name == "share":  # each has the whole job's limits
            answer.set_result(None)
        elif name == "alive":
            pass
        else:
            if name == "close":
                self.host._agent.ledger = None  # which would be closed in a thread
            work = loop.create_task(self._run(getattr(self.host, name), values, next(self._delays_s)))
            self._calls[work] = answer
            work.add_done_callback(self._done)
        return answer

    async def _run(self, method: Callable[..., Any], values: Sequence[Any], delay_s: float) -> Any:
        await asyncio.sleep(delay_s)
        return await method(*values)

    def _done(self, work: asyncio.Task[Any]) -> None:
        answer = self._calls.pop(work)
        if answer.done():
            return
        if work.cancelled():
            answer.cancel()
        elif (error := work.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(work.result())

    def kill(self) -> None:
        """Ends the process: nothing of it keeps running, and pending calls raise an error."""
        if self.dead:
            return
        self.dead = True
        for answer in self._calls.values():
            if not answer.done():
                self._lose(answer)
        for work in self._calls:
            work.cancel()
        for serving in self.host._serving.values():
            serving.cancel()
        if not self.host._built.is_set():
            return
        agent = self.host._agent
        agent.ledger = agent._jobs._ledger = None  # what it hears of its calls from now on nobody learns
        for state in list(agent.steps.live.values()):
            agent.steps.fail(state, "killed", None)

    def _lose(self, answer: asyncio.Future[Any]) -> None:
        from ray.exceptions import RayActorError

        answer.set_exception(RayActorError())
        answer.exception()  # who waits for it hears of it; who does not need not


def _at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """Returns what a coroutine returns that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


class Book:
    """A ledger in memory, of all actors."""

    def __init__(self) -> None:
        self.answers: dict[Any, Answer] = {}

    def submitted(self, step: Any, rows: Sequence[tuple[int, int, Any]]) -> dict[tuple[int, int], Answer]:
        return {row[:2]: self.answers[step, *row] for row in rows if (step, *row) in self.answers}

    def answered(self, step: Any, group: int, sample: int, key: Any, answer: Answer) -> None:
        self.answers[step, group, sample, key] = answer

    def failed(self, *_request: Any) -> None:
        """Is asked again."""

    def collected(self, *_groups: Any) -> None:
        """Changes nothing."""

    def close(self) -> None:
        """Has nothing to close."""


def built(number: int) -> RewardAgent:
    from tests.rewards.remote.actor_rig import FACTORIES  # not the copy that travels with this function

    return FACTORIES[number]()


def remote_agents(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., RewardAgent], delays_s: Iterator[float] | None = None
) -> Callable[..., RemoteAgent]:
    """Returns a function that takes the arguments of ``make`` and returns such an agent, in two actors.

    Args:
        monkeypatch: takes the place of Ray.
        make: returns an agent.
        delays_s: how long each call of an actor is on its way, in turn.
    """
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "kill", Actor.kill)
    monkeypatch.setattr(remote, "start", lambda _options: Actor(delays_s))
    monkeypatch.setattr(remote, "answers", lambda refs: [ref.result() for ref in refs])
    monkeypatch.setattr(remote, "start_limits", lambda _limits: (Actor(), ("", 0)))

    def agent(*values: Any, actors: int = 2, **options: Any) -> RemoteAgent:
        number = len(FACTORIES)
        FACTORIES[number] = partial(make, *values, **options)
        return RemoteAgent(partial(built, number), actors=actors, restarts=99)

    return agent
