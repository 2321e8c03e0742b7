"""The actor of a remote agent: scores its groups of each step with a local agent, and reports finished groups.

Samples come as columns and rewards go back as columns, many groups at a time; nothing is sent once per sample. The
other side is in rewards/remote/agent.py.
"""

from __future__ import annotations

import asyncio
import importlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dataflow.batch import Batch
from dataflow.cluster.answer import cause
from dataflow.cluster.log import KEPT, Lines, keep_lines
from dataflow.cluster.nodes import beside
from dataflow.cluster.process import settle_memory
from dataflow.errors import ConfigError, DataflowError, RunError
from dataflow.graph import Hosted
from dataflow.rewards.failure import FailedShare, FailureRule
from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.server import Address
from dataflow.rewards.limits.shared import SharedLimits
from dataflow.rewards.remote.metrics import in_ray_worker
from dataflow.rewards.requests import NOTES, Request, RequestState, Step, StepRequests
from dataflow.system import clock
from dataflow.system.children import restore_path
from dataflow.system.secrets import redact_logs
from dataflow.usercode.load import describe

if TYPE_CHECKING:
    from dataflow.reward_agent import RewardAgent

_BUILD_S = 600.0
_COLUMNS = ("extra_info", "raw_prompt", "finish_reason", "response_mask")  # optional ones
_GATHER_S = 0.05  # finished groups are collected for this long, since a message costs more than many groups


class Facts(NamedTuple):
    """What the other side needs of an agent: limits, failure rules, whether it has a ledger and reads token ids."""

    limits: Limits
    rule: FailureRule
    max_failed_share: float
    ledger: bool
    ids: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    """Finished groups of a step, as columns.

    Attributes:
        records: of each sample, see :func:`~dataflow.rewards.records.record`.
        kept: whether a loss may use the sample; None under a rule that drops nothing.
        limits: changes of limits since the last arrival.
        last_failure: message of the last failure that the step's rule handled.
        stats: of the agent, with the last groups of the step; else None.
    """

    step: Step
    records: list[dict[str, Any]]
    scores: list[float]
    extras: dict[str, list[Any]]
    kept: list[bool] | None
    limits: list[tuple[float, str, int]]
    last_failure: str
    stats: dict[str, Any] | None

    def fill_in(self, request: Request, row: int) -> RequestState:
        """Sets the score and the facts of a request from a row; returns the state that it ends in."""
        record = self.records[row]
        request.score = self.scores[row]
        request.extras = {name: column[row] for name, column in self.extras.items()}
        request.kept = self.kept is None or self.kept[row]
        request.begin, request.end = record["begin"], record["end"]
        request.tries, how = record.get("tries", 1), record.get("how", "")
        request.notes = {name: record[name] for name in NOTES if name in record}
        if how in (RequestState.FAILED.value, RequestState.CANCELLED.value):
            return RequestState(how)
        request.source = how
        return RequestState.SCORED


class Failure(NamedTuple):
    """A step that failed in the actor, and why."""

    step: Step
    message: str


class RewardHost:
    """A local agent in an actor."""

    def __init__(self) -> None:
        restore_path()
        if in_ray_worker():
            redact_logs()
            keep_lines()
        self._built = asyncio.Event()
        self._news: list[Arrival | Failure] = []
        self._more = asyncio.Event()
        self._serving: dict[Step, asyncio.Task[None]] = {}
        self._agent: RewardAgent

    async def build(
        self,
        blob: bytes,
        name: str,
        shared: Address | None = None,
        anchor: clock.Anchor | None = None,
        imports: Sequence[str] = (),
    ) -> Facts:
        """Builds the agent.

        Args:
            blob: pickled :class:`~dataflow.graph.Hosted`, whose factory returns the agent.
            name: of the agent, for others that share its limits.
            shared: the server of these limits.
            anchor: of the clock of the process that starts it; None keeps this process's.
            imports: modules to import before.

        Raises:
            ConfigError: as the factory does.
        """
        if anchor is not None:
            clock.adopt(anchor)
        for module in imports:
            importlib.import_module(module)
        spec, _stages = pickle.loads(blob)
        self._agent = agent = spec.build()
        wants = agent.ledger is not None, agent.wants_response_ids
        facts = Facts(agent.limits, agent.steps.rule, agent.steps.failures.most, *wants)
        agent.steps.failures = FailedShare(1.0)  # the share is of all actors' requests, which the other side counts
        if agent.steps.rule.kind == "replace_group":
            # The other side replaces groups, since it has all groups of the step.
            agent.steps.rule = FailureRule("drop_group")
        if shared is not None:
            self.share(name, shared)
        settle_memory()
        self._built.set()
        return facts

    def share(self, name: str, shared: Address) -> None:
        """Shares the limits of a server, from the first request on."""
        self._agent.share_limits(SharedLimits(shared, name).queue)

    async def submit(self, step: Step, samples: Batch, groups: Sequence[int] | None = None, more: bool = False) -> None:
        """Queues a step, or some groups of it.

        Args:
            step: as the agent's ``submit`` takes it.
            samples: likewise.
            groups: the groups to score; None for all of the samples.
            more: further groups may follow, in any order of the calls, until :meth:`cancel` ends the step.

        Raises:
            DataflowError: as the agent's ``submit`` does.
        """
        await self._built.wait()
        if groups is not None:
            samples = samples.select(groups)
        self._agent.submit(step, samples, more=more)
        if step not in self._serving:
            self._serving[step] = asyncio.create_task(self._serve(self._agent.steps.live[step]))

    async def cancel(self, step: Step) -> None:
        """Cancels the rest of a step, of which nothing more is reported."""
        await self._built.wait()
        if (serving := self._serving.pop(step, None)) is not None:
            serving.cancel()
        self._agent.cancel(step)

    async def news(self) -> tuple[list[Arrival | Failure], Lines]:
        """Waits until something has arrived or failed; for one caller at a time.

        Returns:
            Everything that has arrived or failed since the last call, and the warnings that were logged.
        """
        await self._more.wait()
        self._more.clear()
        news, self._news = self._news, []
        return news, KEPT.take()

    async def stats(self) -> dict[str, Any]:
        await self._built.wait()
        return self._agent.stats()

    async def close(self) -> Lines:
        """Closes the agent; returns the warnings that were logged since the last news."""
        await self._built.wait()
        for task in self._serving.values():
            task.cancel()
        await self._agent.close()
        return KEPT.take()

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
        except Exception as error:  # of any kind: it must reach the waiters of the step
            message = str(error) if isinstance(error, DataflowError) else f"step {step}: {describe(error)}"
            self._put(Failure(step, message))
        finally:
            self._serving.pop(step, None)

    async def _further(self, state: StepRequests) -> list[Batch]:
        """Returns further groups that finish within a short time, or earlier if they are the last ones."""
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
            meta["scores"],
            {name: list(column) for name, column in columns.items() if name not in ("kept", "score")},
            columns["kept"].tolist() if "kept" in columns else None,
            meta["limits"],
            state.last_failure,
            stats,
        )

    def _put(self, *news: Arrival | Failure) -> None:
        self._news += news
        self._more.set()


def hosted(factory: Callable[[], Any]) -> Hosted:
    """Returns what an actor builds its agent from."""
    if isinstance(factory, partial):
        module, factory = factory.func.__module__, partial(factory)
        factory.__module__ = module  # pickled by value if the actors could not import that module
    return Hosted("reward", factory)


def start(options: Mapping[str, Any]) -> Any:
    """Starts an actor, without an agent yet.

    Raises:
        ConfigError: Ray does not run.
    """
    import ray

    if not ray.is_initialized():
        raise ConfigError("reward agent: Ray does not run here; call ray.init() before, or use RewardAgent.")
    chosen = {"num_cpus": 0, **beside(), **options}
    return ray.remote(RewardHost).options(**chosen).remote()


def answers(refs: Sequence[Any]) -> list[Any]:
    """Returns the results of calls to actors that start.

    Raises:
        RunError: they are not up in time.
    """
    import ray

    try:
        return list(ray.get(list(refs), timeout=_BUILD_S))
    except ray.exceptions.GetTimeoutError:
        raise RunError(f"reward agent: its actors are not up after {_BUILD_S:g} s; see 'ray status'.") from None
    except Exception as error:
        raise cause(error) from None


def needed(samples: Batch, ids: bool = False) -> Batch:
    """Returns the columns that rewards are computed from, in their smallest types; the others are not sent.

    Args:
        samples: of a step.
        ids: whether the reward reads token ids beside texts.

    Raises:
        DataflowError: one is missing.
    """
    import torch

    text = "response_text" if "response_text" in samples else "responses"
    columns = {name: samples[name] for name in ("data_source", "ground_truth", text)}
    columns |= {name: samples[name] for name in (*_COLUMNS, *["responses"] * ids) if name in samples}
    for name, small in (("responses", torch.int32), ("response_mask", torch.bool)):
        if isinstance(columns.get(name), torch.Tensor):
            columns[name] = columns[name].to(small)
    return samples.like(**columns)
