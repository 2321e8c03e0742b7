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

FACTORIES: dict[int, partial[RewardAgent]] = {}
"""They stay here, with what they share with their test, while their number travels."""
BUILT: list[tuple[RewardAgent, Cut | None]] = []
"""The agent that was built last, and its way to the ledger."""


class Cut:
    """What one actor has of a ledger, until it dies."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name) if not self.dead else lambda *_values: {}


class Actor:
    """Runs a host's methods as Ray does: calls overtake each other, and all end with their process.

    Args:
        delays_s: how long each call is on its way, in turn.
        actors: where it is found by the name of its agent, once it has one.

    Attributes:
        agent: that lives in the actor, once it is built.
    """

    def __init__(self, delays_s: Iterator[float] | None = None, actors: dict[str, Actor] | None = None) -> None:
        self.host = RewardHost()
        self.agent: RewardAgent | None = None
        self.dead = False
        self._ledger: Cut | None = None
        self._actors = {} if actors is None else actors
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
            self.agent, self._ledger = BUILT.pop()
            self._actors[of] = self
        elif name == "share":  # each has the whole job's limits
            answer.set_result(None)
        elif name == "alive":
            pass
        else:
            if name == "close":
                assert self.agent is not None
                self.agent.ledger = None  # which would be closed in a thread
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
        if self._ledger is not None:
            self._ledger.dead = True  # what it hears of its calls from now on nobody learns
        if self.agent is not None:
            for state in list(self.agent.steps.live.values()):
                self.agent.steps.fail(state, "killed", None)

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

    def answered(self, step: Any, group: int, sample: int, key: Any, answer: Answer, failed_tries: str | None) -> None:
        self.answers[step, group, sample, key] = answer

    def failed(self, *_request: Any) -> None:
        """Is asked again."""

    def collected(self, *_groups: Any) -> None:
        """Changes nothing."""

    def close(self) -> None:
        """Has nothing to close."""


def built(number: int) -> RewardAgent:
    from tests.rewards.remote.actor_rig import BUILT, FACTORIES, Cut  # not the copies that travel with this function

    make = FACTORIES[number]
    ledger = make.keywords.get("ledger")
    cut = None if ledger is None else Cut(ledger)
    agent: RewardAgent = make() if cut is None else make(ledger=cut)
    BUILT.append((agent, cut))
    return agent


class RemoteAgents:
    """Makes remote agents whose actors live in this process; called with the arguments of ``make``.

    Args:
        monkeypatch: takes the place of Ray.
        make: returns an agent.
        delays_s: how long each call of an actor is on its way, in turn.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        make: Callable[..., RewardAgent],
        delays_s: Iterator[float] | None = None,
    ) -> None:
        import ray

        self._make = make
        self._actors: dict[str, Actor] = {}
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "put", lambda value: value)
        monkeypatch.setattr(ray, "kill", Actor.kill)
        monkeypatch.setattr(remote, "start", lambda _options: Actor(delays_s, self._actors))
        monkeypatch.setattr(remote, "answers", lambda refs: [ref.result() for ref in refs])
        monkeypatch.setattr(remote, "start_limits", lambda _limits: (Actor(), ("", 0)))

    def __call__(self, *values: Any, actors: int = 2, **options: Any) -> RemoteAgent:
        number = len(FACTORIES)
        FACTORIES[number] = partial(self._make, *values, **options)
        return RemoteAgent(partial(built, number), actors=actors, restarts=99)

    def kill(self, number: int) -> None:
        """Kills an actor of the last agent, or the one that has replaced it."""
        self._actors[f"reward {number}"].kill()

    @property
    def hosted(self) -> list[RewardAgent]:
        """What lives in the actors of the last agent, in their order."""
        return [actor.agent for _name, actor in sorted(self._actors.items()) if actor.agent is not None]
