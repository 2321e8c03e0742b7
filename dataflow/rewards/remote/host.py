"""The actor's side of a remote agent: serves its part of each step with an agent of its own, and tells what is whole.

Samples come as columns and rewards go back as columns, many groups at a time; nothing travels once per sample. The
other side is in rewards/remote/agent.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dataflow.batch import Batch
from dataflow.cluster.process import settle_memory
from dataflow.errors import DataflowError
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.failure import FailedShare, FailureRule
from dataflow.rewards.limits.queues import Limits
from dataflow.rewards.limits.server import Address
from dataflow.rewards.limits.shared import SharedLimits
from dataflow.rewards.requests import Step, StepRequests
from dataflow.system import clock
from dataflow.system.children import restore_path
from dataflow.usercode.load import describe

_GATHER_S = 0.05  # a message costs more than many groups: not one for each


class Facts(NamedTuple):
    """What the other side must know of an agent: its limits and failure rules, and whether it journals."""

    limits: Limits
    rule: FailureRule
    max_failed_share: float
    ledger: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    """Whole groups of a step, as columns.

    Attributes:
        records: of each sample, see :func:`~dataflow.rewards.requests.record`.
        kept: whether a loss may use it; None where the rule leaves nothing out.
        limits: changes of limits since the last arrival.
        story: of the last failure that the step's rule took care of.
        stats: of the agent, with the last groups that it has of the step.
    """

    step: Step
    records: list[dict[str, Any]]
    scores: list[float]
    extras: dict[str, list[Any]]
    kept: list[bool] | None
    limits: list[tuple[float, str, int]]
    story: str
    stats: dict[str, Any] | None


class Failure(NamedTuple):
    """A step that ended in the actor, and why."""

    step: Step
    message: str


class RewardHost:
    """An agent in a process of its own."""

    def __init__(self) -> None:
        restore_path()
        self._built = asyncio.Event()
        self._news: list[Arrival | Failure] = []
        self._more = asyncio.Event()
        self._serving: dict[Step, asyncio.Task[None]] = {}
        self._agent: RewardAgent

    async def build(
        self, blob: bytes, name: str, shared: Address | None = None, anchor: clock.Anchor | None = None
    ) -> Facts:
        """Builds the agent.

        Args:
            blob: pickled :class:`~dataflow.graph.Hosted`, whose factory returns the agent.
            name: of the agent, for whoever shares its limits.
            shared: the server of these limits.
            anchor: of the clock of the process that starts it; None keeps its own.

        Raises:
            ConfigError: as the factory does.
        """
        if anchor is not None:
            clock.adopt(anchor)
        import cloudpickle  # type: ignore[import-untyped]

        # What the first Batch to arrive would import: seconds that belong to start-up, not to a step.
        import torch  # noqa: F401

        spec, _stages = cloudpickle.loads(blob)
        self._agent = agent = spec.build()
        facts = Facts(agent.limits, agent.rule, agent.failures.most, agent._ledger is not None)
        agent.failures = FailedShare(1.0)  # the share is of all actors' requests, which only the other side sees
        if agent.rule.kind == "replace_group":
            # The other side replaces: only there is known which groups of the step are left.
            agent.rule = FailureRule("drop_group")
        if shared is not None:
            self.share(name, shared)
        settle_memory()
        self._built.set()
        return facts

    def share(self, name: str, shared: Address) -> None:
        """Makes the limits those of a server, from the first request on."""
        self._agent._shared = SharedLimits(shared, name)

    async def submit(self, step: Step, samples: Batch, groups: Sequence[int] | None = None, more: bool = False) -> None:
        """Queues a step, or these groups of it.

        Args:
            step: as the agent's ``submit`` takes it.
            samples: likewise.
            groups: of the samples, those to score; None for all.
            more: further groups may follow, in any order of the calls, until :meth:`cancel` ends the step.

        Raises:
            DataflowError: as the agent's ``submit`` does.
        """
        await self._built.wait()
        if groups is not None:
            samples = samples.select(groups)
        self._agent.submit(step, samples, more=more)
        if step not in self._serving:
            self._serving[step] = asyncio.create_task(self._serve(self._agent._steps[step]))

    async def cancel(self, step: Step) -> None:
        """Cancels what is left of a step, of which nothing more is told."""
        await self._built.wait()
        if (serving := self._serving.pop(step, None)) is not None:
            serving.cancel()
        self._agent.cancel(step)

    async def news(self) -> list[Arrival | Failure]:
        """Waits until something has arrived or failed, and returns all that has; for one caller at a time."""
        await self._more.wait()
        self._more.clear()
        news, self._news = self._news, []
        return news

    async def stats(self) -> dict[str, Any]:
        await self._built.wait()
        return self._agent.stats()

    async def close(self) -> None:
        """Ends the agent well."""
        await self._built.wait()
        for task in self._serving.values():
            task.cancel()
        await self._agent.close()

    async def _serve(self, state: StepRequests) -> None:
        step, ended = state.key, False
        try:
            while not ended:
                came = [await self._agent.collect(step, 1)]
                if state.left:
                    came += await self._further(state)
                ended = "step" in came[-1].meta
                stats = None if state.left else self._agent.stats()
                self._put(*(self._arrival(state, each) for each in came[:-1]), self._arrival(state, came[-1], stats))
        except Exception as error:  # whatever it is, whoever waits for the step must hear of it
            message = str(error) if isinstance(error, DataflowError) else f"step {step}: {describe(error)}"
            self._put(Failure(step, message))
        finally:
            self._serving.pop(step, None)

    async def _further(self, state: StepRequests) -> list[Batch]:
        """Returns what else is whole after a while, or sooner if it is all there is."""
        try:
            return [await asyncio.wait_for(self._agent.collect(state.key), _GATHER_S)]
        except TimeoutError:
            arrived = len(state.arrived)
            return [await self._agent.collect(state.key, arrived)] if arrived else []

    def _arrival(self, state: StepRequests, rewards: Batch, stats: dict[str, Any] | None = None) -> Arrival:
        columns, meta = rewards.columns, rewards.meta
        return Arrival(
            state.key,
            meta["records"],
            columns.pop("score").tolist(),
            {name: list(column) for name, column in columns.items() if name != "kept"},
            columns["kept"].tolist() if "kept" in columns else None,
            meta["limits"],
            state.story,
            stats,
        )

    def _put(self, *news: Arrival | Failure) -> None:
        self._news += news
        self._more.set()
