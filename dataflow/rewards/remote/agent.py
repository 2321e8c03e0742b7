"""The reward agent in Ray actors: the interface of the local agent, with the requests scored elsewhere.

Each actor serves whole groups of every step with a local agent of its own, and all keep to one agent's limits. Finished
groups come back as columns and are returned here by the same class as in the local agent, so that order of arrival
or index, extra groups, chunks, cancelling and failing mean the same. Nothing polls: one call to each actor waits for
its news.

Invariants:

* A group is returned once, whatever died and was sent again.
* A step that fails in one actor has failed in all.
* When an actor dies, its groups go to a new one if the agents have a ledger, so that no answer is paid for twice;
  otherwise the agent stops with an error. No waiter is left waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loguru import logger

from dataflow.batch import Batch
from dataflow.cluster.answer import cause, died, fetch, last_words
from dataflow.cluster.log import Lines, log_lines
from dataflow.cluster.pickling import pickled
from dataflow.errors import ConfigError, RewardFailed, counted
from dataflow.rewards.filter import GroupFilter
from dataflow.rewards.limits.server import Address
from dataflow.rewards.limits.shared import start_limits
from dataflow.rewards.records import Latencies
from dataflow.rewards.remote.host import Arrival, Facts, Failure, answers, hosted, needed, start
from dataflow.rewards.requests import Order, Request, RequestState, Step, StepRequests, Ticket
from dataflow.rewards.steps import Steps
from dataflow.system import clock

_CLOSE_S = 10.0
_OWN = ("requested", "scored", "failed", "cancelled", "cached", "shared")
"""Counts that are kept here; the actors have the others."""
_NONE_YET: Mapping[str, Any] = dict.fromkeys(
    ("retried", "hedged", "timed_out", "throttled", "running", "peak", "abandoned", "tokens", "rate_limit_wait_s"), 0
)


@dataclass(eq=False)
class Assignment:
    """The groups of a step that one actor scores, of all its chunks."""

    owed: dict[int, Any] = field(default_factory=dict)
    """Groups that have not come back, each with the object ref of its chunk's samples."""
    sends: list[asyncio.Task[None]] = field(default_factory=list)
    """Each ends when the actor has a chunk."""


@dataclass(eq=False)
class Shard:
    """One actor, or the one that replaced it."""

    name: str
    actor: Any
    steps: dict[Step, Assignment] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def owed(self) -> int:
        """Number of groups that have not come back."""
        return sum(len(assignment.owed) for assignment in self.steps.values())

    def submit(self, state: StepRequests, owed: Mapping[int, Any]) -> list[Any]:
        """Sends the samples of groups, chunk by chunk; returns the refs of the calls."""
        chunks: dict[Any, list[int]] = {}
        for group, samples in owed.items():
            chunks.setdefault(samples, []).append(group)
        submit = self.actor.submit.remote
        return [submit(state.key, samples, groups, state.more) for samples, groups in chunks.items()]


class RemoteAgent:
    """An agent whose requests are sent by Ray actors; it is used like :class:`~dataflow.reward_agent.RewardAgent`.

    Differences: samples that an actor refuses (token ids that it cannot decode) fail at ``collect``, since ``submit``
    does not wait for the actors. The user's object exists once in each actor: its ``log`` is called with groups as they
    arrive, and its budget and equal requests in flight are counted in each actor separately. ``stats`` is what each
    actor sent with the last groups of a step, or at :meth:`refresh`.

    Args:
        factory: returns the local agent; called in each actor. ``functools.partial`` of
            :func:`~dataflow.running.services.agent.build_agent`, or any function that can be pickled.
        actors: number of actors, which share the groups of a step and the limits of one agent.
        restarts: how many actors that died are replaced, in all.
        shared: a limit server that others use too; None starts one if there are several actors.
        name: of the agent, in messages and metrics, and for others that share its limits.
        options: of the actors, over ``num_cpus=0`` and this node, where the file of a ledger is.
        imports: modules that each actor imports before it builds its agent, so that the first step need not wait for
            them.

    Raises:
        ConfigError: the agent cannot be built, Ray does not run, a number out of range.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        actors: int = 1,
        restarts: int = 3,
        shared: Address | None = None,
        name: str = "reward",
        options: Mapping[str, Any] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        if actors < 1 or restarts < 0:
            raise ConfigError(f"reward agent: actors={actors}, restarts={restarts}; give 1 and 0 or more.")
        self.name = name
        self._blob = pickled(hosted(factory), {})
        self._options = dict(options or {})
        self._imports = tuple(imports)
        self._restarts = restarts
        self._deaths = 0
        self._shards = [Shard(f"{name} {i}", start(self._options)) for i in range(actors)]
        self._limits_actor: Any = None
        self._facts, self._address = self._open(shared)
        self.limits = self._facts.limits
        self.steps = Steps(self._facts.rule, self._facts.max_failed_share, _ignore, self._on_end, name)
        self._latency_s = Latencies()
        self._limit_changes: list[tuple[float, str, int]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self,
        step: Step,
        samples: Batch,
        *,
        extra_groups: int = 0,
        more: bool = False,
        group_filter: GroupFilter | None = None,
    ) -> Ticket:
        """Sends each actor its share of the groups; see ``RewardAgent.submit``."""
        import ray

        self.steps.check(step, samples, extra_groups, more)
        sent = needed(samples, self._facts.ids)
        self.steps.bind(self._receive_all)
        state, _requests, ticket = self.steps.add(step, samples, extra_groups, more, group_filter)
        # In turn over all chunks of the step, so that small chunks give each actor as many groups as another.
        before, actors = len(state.seen) - len(ticket.groups), len(self._shards)
        for i, shard in enumerate(self._shards):
            if groups := ticket.groups[(i - before) % actors :: actors]:
                owed = dict.fromkeys(groups, ray.put(sent.select(groups)))
                shard.steps.setdefault(step, Assignment()).owed |= owed
                self._send(shard, state, owed)
        return ticket

    async def collect(
        self,
        step: Step,
        k: int | None = None,
        order: Order = "arrival",
        *,
        last: bool = False,
        groups: Iterable[int] | None = None,
    ) -> Batch:
        """Waits for the next k groups of a step and returns their rewards; see ``RewardAgent.collect``."""
        if self.steps.loop is not None:
            self.steps.bind(self._receive_all)
        batch = await self.steps.collect(step, k, order, last, groups)
        batch.meta["limits"], self._limit_changes = sorted(self._limit_changes), []
        return batch

    def cancel(self, step: Step) -> int:
        """Cancels the rest of a step; see ``RewardAgent.cancel``."""
        return self.steps.cancel(step)

    def stats(self) -> dict[str, Any]:
        """Returns the local agents' numbers, summed, and the latencies of all; limits are the job's.

        ``peak`` is the sum of the actors' peaks, which need not have been at the same time.
        """
        latest = [shard.stats for shard in self._shards if shard.stats]
        names = dict.fromkeys(name for stats in latest for name in stats if name not in ("limit", "latency_s"))
        added: dict[str, Any] = {name: sum(stats.get(name, 0) for stats in latest) for name in names}
        added["limit"] = {
            name: limits.concurrency for name, limits in {"": self.limits, **self.limits.endpoints}.items()
        }
        for stats in latest:
            added["limit"] = stats.get("limit", added["limit"])
        if self._address is not None:
            # Each actor reports the whole job's wait, as of its last message.
            added["rate_limit_wait_s"] = max((stats.get("rate_limit_wait_s", 0.0) for stats in latest), default=0.0)
        own = {name: self.steps.counts[name] for name in _OWN}
        now = {"steps": len(self.steps.live), "actors_died": self._deaths, "latency_s": self._latency_s.summary()}
        return {**_NONE_YET, "waiting": self.steps.waiting(), **added, **own, **now}

    def used(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """Returns how much the sums among the stats have grown since the last call; see ``RewardAgent.used``."""
        return self.steps.used(stats)

    async def refresh(self) -> dict[str, Any]:
        """Fetches the actors' stats, and returns their sum."""

        async def fetch_stats(shard: Shard) -> None:
            shard.stats = await shard.actor.stats.remote()

        await asyncio.gather(*map(fetch_stats, self._shards))
        return self.stats()

    async def close(self) -> None:
        """Cancels everything, closes the user's objects and ends the actors. May be called twice."""
        if not self.steps.close():
            return
        for task in self._tasks:
            task.cancel()
        closing: list[asyncio.Future[Lines]] = [
            asyncio.ensure_future(fetch(shard.actor.close.remote())) for shard in self._shards
        ]
        _done, late = await asyncio.wait(closing, timeout=_CLOSE_S)
        for call in late:
            call.cancel()
        self._kill()
        errors = []
        for call in closing:
            if call not in late:
                if (error := call.exception()) is None:
                    log_lines(call.result())
                elif not died(error):
                    errors.append(error)
        if errors:
            raise cause(errors[0])

    # --- actors ---------------------------------------------------------------------------------------------

    def _open(self, shared: Address | None) -> tuple[Facts, Address | None]:
        """Builds the agents in parallel, and lets them share their limits."""
        try:
            facts = answers([self._build(shard, shared) for shard in self._shards])[0]
            if shared is None and len(self._shards) > 1:
                self._limits_actor, shared = start_limits(facts.limits)
                answers([shard.actor.share.remote(shard.name, shared) for shard in self._shards])
        except BaseException:
            self._kill()
            raise
        return facts, shared

    def _build(self, shard: Shard, shared: Address | None) -> Any:
        return shard.actor.build.remote(self._blob, shard.name, shared, clock.anchor(), self._imports)

    def _kill(self) -> None:
        import ray

        for actor in [shard.actor for shard in self._shards] + [self._limits_actor]:
            if actor is not None and ray.is_initialized():
                ray.kill(actor)

    def _receive_all(self, _loop: asyncio.AbstractEventLoop) -> None:
        """Starts the tasks that receive news of the actors."""
        for shard in self._shards:
            self._spawn(self._receive, shard)
        if self._limits_actor is not None:
            self._spawn(self._watch_limits)

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *values: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._guarded(work, *values))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, None]], *values: Any) -> None:
        try:
            await work(*values)
        except Exception as error:
            self.steps.on_bug(error)

    async def _receive(self, shard: Shard) -> None:
        """Handles an actor's news, and replaces it when it dies."""
        while True:
            try:
                news, lines = await shard.actor.news.remote()
            except Exception as error:
                if not died(error):
                    raise
                if not self._replace(shard, error):
                    return
                continue
            log_lines(lines)
            for item in news:
                if isinstance(item, Failure):
                    self._fail(item.step, RewardFailed(item.message))
                else:
                    self._on_arrival(shard, item)

    async def _watch_limits(self) -> None:
        try:
            await self._limits_actor.alive.remote()
        except Exception as error:
            words = f"the actor that holds the shared limits of '{self._shards[0].name}' and others died"
            self.steps.halt(f"{words} ({last_words(error)}); start the run again.", error)

    def _replace(self, shard: Shard, error: Exception) -> bool:
        """Starts an actor in place of one that died and sends it the groups that it owed; returns whether it could."""
        import ray

        self._deaths += 1
        owed, halt = shard.owed, self.steps.halt
        words = (
            f"the actor of reward agent '{shard.name}' died with {counted(owed, 'group')} to come ({last_words(error)})"
        )
        if self.steps.halted is not None:
            return False
        if owed and not self._facts.ledger:
            halt(f"{words}; with a ledger (reward.ledger=true) a new one could take them over.", error)
        elif self._deaths > self._restarts:
            halt(f"{words}, after {self._restarts} that were replaced; see what ends it.", error)
        else:
            logger.warning("{}; a new one takes over.", words)
            ray.kill(shard.actor)  # it may only have seemed dead
            shard.actor = start(self._options)
            self._spawn(self._await_build, self._build(shard, self._address))
            for step, assignment in shard.steps.items():
                self._send(shard, self.steps.live[step], assignment.owed)
            return True
        return False

    async def _await_build(self, ref: Any) -> None:
        try:
            await ref
        except Exception as error:
            if not died(error):  # a death is handled where the news are received
                self.steps.halt(f"no new reward agent could be built: {cause(error)}", cause(error))

    # --- steps ----------------------------------------------------------------------------------------------

    def _send(self, shard: Shard, state: StepRequests, owed: Mapping[int, Any]) -> None:
        sends = [self._spawn(self._await_send, state.key, ref) for ref in shard.submit(state, owed)]
        shard.steps[state.key].sends += sends

    async def _await_send(self, step: Step, ref: Any) -> None:
        try:
            await ref
        except Exception as error:
            if not died(error):
                self._fail(step, cause(error))

    def _fail(self, step: Step, error: BaseException) -> None:
        if (state := self.steps.live.get(step)) is not None:
            self.steps.fail(state, str(error), error)

    def _on_arrival(self, shard: Shard, arrival: Arrival) -> None:
        """Adds the groups that an actor finished, as if they had been scored here."""
        shard.stats = arrival.stats or shard.stats
        # Every actor reports the changes of a shared limit.
        self._limit_changes += [change for change in arrival.limits if change not in self._limit_changes]
        state, assignment = self.steps.live.get(arrival.step), shard.steps.get(arrival.step)
        if state is None or assignment is None:
            return
        state.last_failure = arrival.last_failure or state.last_failure
        rows: dict[int, list[int]] = {}
        for row, record in enumerate(arrival.records):
            rows.setdefault(record["group"], []).append(row)
        for group, of_group in rows.items():
            assignment.owed.pop(group, None)
            if not state.over:
                self._end_group(state, group, arrival, of_group)
        if not state.over:
            self.steps.check_failed_share(state, None)
        self.steps.serve(state)

    def _end_group(self, state: StepRequests, group: int, arrival: Arrival, rows: Sequence[int]) -> None:
        failed: Request | None = None
        for row in rows:
            request = state.groups[group][arrival.records[row]["sample"]]
            state.end(request, arrival.fill_in(request, row))
            self._count(request)
            if failed is None and request.state is RequestState.FAILED:
                failed = request
        if failed is not None and state.rule.kind == "replace_group":
            self.steps.drop_group(failed, RewardFailed(state.last_failure))
        else:
            state.finish(group)

    def _count(self, request: Request) -> None:
        counts, failures = self.steps.counts, self.steps.failures
        counts[request.state.value] += 1
        if request.state is RequestState.SCORED:
            failures.ended()
            if request.source in ("ledger", "shared"):
                counts["cached" if request.source == "ledger" else "shared"] += 1
            else:
                self._latency_s.append(request.end - request.begin)
        elif request.state is RequestState.FAILED:
            failures.ended(request.step.last_failure or str(request))

    def _on_end(self, state: StepRequests) -> None:
        """Cancels a step that has ended in the actors that still have groups of it."""
        for shard in self._shards:
            assignment = shard.steps.pop(state.key, None)
            if assignment is not None and (assignment.owed or state.more) and not self.steps.closed:
                self._spawn(self._cancel_there, shard, state.key, assignment.sends)

    async def _cancel_there(self, shard: Shard, step: Step, sends: Sequence[asyncio.Task[None]]) -> None:
        """Cancels a step in an actor, once that has all its chunks: Ray does not keep the order of calls."""
        if sends:
            await asyncio.wait(sends)
        await self._await_send(step, shard.actor.cancel.remote(step))


def _ignore(_request: Request) -> None:
    """Nothing is to be cancelled here for a single request: the actors have the calls."""
