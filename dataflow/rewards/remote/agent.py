"""The reward agent in Ray actors: the same object to whoever submits and collects, with the requests tried elsewhere.

Each actor serves whole groups of every step with an agent of its own, and all stay within the limits of one. What
is whole comes back as columns and is handed out here, by the code of the local agent; so first come, next by id,
spare groups, sets, cancelling and failing mean the same. Nothing polls: one call to each actor waits for its news.

Invariants:

* A group is handed out once, whatever died and was sent again.
* A step that fails in one actor has failed in all.
* When an actor dies, its part goes to a new one if the agents journal, so that no answer is paid for twice; else
  the agent stops and says so. Nobody is left waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn, cast

from loguru import logger

from dataflow.batch import Batch
from dataflow.cluster.answer import cause, died, fetch, last_words
from dataflow.cluster.pickling import pickled
from dataflow.errors import ConfigError, DataflowError, RewardFailed
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.asks import Asks
from dataflow.rewards.latencies import Latencies
from dataflow.rewards.limits.server import Address
from dataflow.rewards.limits.shared import start_limits
from dataflow.rewards.remote.host import Arrival, Facts, Failure
from dataflow.rewards.remote.shard import Part, Shard, answers, hosted, needed, start
from dataflow.rewards.requests import NOTES, Request, Step, StepRequests, Ticket
from dataflow.system import clock

_CLOSE_S = 10.0


class RemoteAgent(RewardAgent):
    """An agent whose requests are sent by Ray actors; used as :class:`~dataflow.reward_agent.RewardAgent` is.

    What differs: what an actor refuses (token ids that it cannot decode) fails at ``collect``, as ``submit`` does not
    wait for the actors. The user's object lives in the actors, one in each: its ``log`` is told of groups as they
    arrive, its budget and equal requests in flight count in each actor by itself. ``stats``
    is as each actor said with the last groups that it had of a step, or at :meth:`refresh`.

    Args:
        factory: returns the agent; called in each actor. ``functools.partial`` of
            :func:`~dataflow.rewards.build.build_agent`, or any function that can be pickled.
        actors: how many share the groups of a step, and the limits of one agent.
        restarts: how often an actor that died is replaced, in all.
        shared: a limit server that others use too; None starts one where there are several actors.
        name: of the agent, for whoever shares its limits.
        options: of the actors, over ``num_cpus=0`` and this node, where the file of a ledger is.

    Raises:
        ConfigError: the agent cannot be built, Ray does not run, a number out of range.
    """

    def __init__(
        self,
        factory: Callable[[], RewardAgent],
        *,
        actors: int = 1,
        restarts: int = 3,
        shared: Address | None = None,
        name: str = "reward",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if actors < 1 or restarts < 0:
            raise ConfigError(f"reward agent: actors={actors}, restarts={restarts}; give 1 and 0 or more.")
        self._blob = pickled(hosted(factory), {})
        self._options = dict(options or {})
        self._restarts = restarts
        self._deaths = 0
        self._shards = [Shard(f"{name} {i}", start(self._options)) for i in range(actors)]
        self._limits_actor: Any = None
        self._facts, self._address = self._open(shared)
        self._tasks: set[asyncio.Task[None]] = set()
        limits, share = self._facts.limits, self._facts.max_failed_share
        super().__init__(_There(), limits=limits, decode=_elsewhere, max_failed_share=share)
        self.rule = self._facts.rule
        self._asks = cast(Asks, _Elsewhere())

    def submit(self, step: Step, samples: Batch, *, spare: int = 0, more: bool = False) -> Ticket:
        import ray

        ticket = super().submit(step, samples, spare=spare, more=more)
        state, sent, actors = self._steps[step], needed(samples), len(self._shards)
        # In turn over all of the step: of small sets, too, each actor gets as many groups as another.
        before = len(state.seen) - len(ticket.groups)
        for i, shard in enumerate(self._shards):
            if groups := ticket.groups[(i - before) % actors :: actors]:
                owed = dict.fromkeys(groups, ray.put(sent.select(groups)))
                shard.parts.setdefault(state.key, Part()).owed |= owed
                self._send(shard, state, owed)
        return ticket

    def stats(self) -> dict[str, Any]:
        """Returns the local agent's numbers: added up, and the latencies of all; limits are the job's.

        ``peak`` is the sum of the actors', which they need not have had at once.
        """
        said = [shard.stats for shard in self._shards if shard.stats]
        names = dict.fromkeys(name for stats in said for name in stats if name not in ("limit", "latency_s"))
        added: dict[str, Any] = {name: sum(stats.get(name, 0) for stats in said) for name in names}
        for stats in said:
            added["limit"] = stats.get("limit", added.get("limit", {}))
        if self._address is not None:
            # Each says the job's, as it last heard it.
            added["rate_limit_wait_s"] = max((stats.get("rate_limit_wait_s", 0.0) for stats in said), default=0.0)
        own = ("requested", "scored", "failed", "cancelled", "cached", "shared")
        now = {name: self.counts[name] for name in own} | {"steps": len(self._steps), "actors_died": self._deaths}
        return super().stats() | added | now | {"latency_s": self._asks.latency_s.summary()}

    async def refresh(self) -> dict[str, Any]:
        """Asks the actors for their stats, and returns those of all."""

        async def ask(shard: Shard) -> None:
            shard.stats = await shard.actor.stats.remote()

        await asyncio.gather(*map(ask, self._shards))
        return self.stats()

    async def close(self) -> None:
        """Cancels everything, closes the user's objects and ends the actors. May be called twice."""
        if self._closed:
            return
        await super().close()
        for task in self._tasks:
            task.cancel()
        closing = [asyncio.ensure_future(fetch(shard.actor.close.remote())) for shard in self._shards]
        _done, late = await asyncio.wait(closing, timeout=_CLOSE_S)
        for task in late:
            task.cancel()
        self._kill()
        errors = [error for task in closing if task not in late and (error := task.exception()) and not died(error)]
        if errors:
            raise cause(errors[0])

    # --- actors ---------------------------------------------------------------------------------------------

    def _open(self, shared: Address | None) -> tuple[Facts, Address | None]:
        """Builds the agents, side by side, and lets them share their limits."""
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
        return shard.actor.build.remote(self._blob, shard.name, shared, clock.anchor())

    def _kill(self) -> None:
        import ray

        for actor in [shard.actor for shard in self._shards] + [self._limits_actor]:
            if actor is not None and ray.is_initialized():
                ray.kill(actor)

    def _bind(self) -> asyncio.AbstractEventLoop:
        first = self._loop is None
        loop = super()._bind()
        if first:
            for shard in self._shards:
                self._spawn(self._pump, shard)
            if self._limits_actor is not None:
                self._spawn(self._watch_limits)
        return loop

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *values: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._guarded(work, *values))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, None]], *values: Any) -> None:
        try:
            await work(*values)
        except Exception as error:
            self._bug(error)

    async def _pump(self, shard: Shard) -> None:
        """Takes an actor's news, and replaces it when it dies."""
        while True:
            try:
                news = await shard.actor.news.remote()
            except Exception as error:
                if not died(error):
                    raise
                if not self._replace(shard, error):
                    return
                continue
            for item in news:
                if isinstance(item, Failure):
                    self._failed(item.step, RewardFailed(item.message))
                else:
                    self._arrived(shard, item)

    async def _watch_limits(self) -> None:
        try:
            await self._limits_actor.alive.remote()
        except Exception as error:
            words = f"the actor that holds the shared limits of '{self._shards[0].name}' and others died"
            self.halt(f"{words} ({last_words(error)}); start the run again.", error)

    def _replace(self, shard: Shard, error: Exception) -> bool:
        """Starts an actor in place of one that died and sends it what that still owed; returns whether it could."""
        import ray

        self._deaths += 1
        owed = shard.owed
        words = f"the actor of reward agent '{shard.name}' died with {owed} groups to come ({last_words(error)})"
        if self._halted is not None:
            return False
        if owed and not self._facts.ledger:
            self.halt(f"{words}; with a ledger (reward.ledger=true) a new one could take them over.", error)
        elif self._deaths > self._restarts:
            self.halt(f"{words}, after {self._restarts} that were replaced; see what ends it.", error)
        else:
            logger.warning("{}; a new one takes over.", words)
            ray.kill(shard.actor)  # one that only seemed dead
            shard.actor = start(self._options)
            self._spawn(self._built, self._build(shard, self._address))
            for step, part in shard.parts.items():
                self._send(shard, self._steps[step], part.owed)
            return True
        return False

    async def _built(self, ref: Any) -> None:
        try:
            await ref
        except Exception as error:
            if not died(error):  # of a death the news tell
                self.halt(f"no new reward agent could be built: {cause(error)}", cause(error))

    # --- steps ----------------------------------------------------------------------------------------------

    def _send(self, shard: Shard, state: StepRequests, owed: Mapping[int, Any]) -> None:
        sends = [self._spawn(self._sent, state.key, ref) for ref in shard.submit(state, owed)]
        shard.parts[state.key].sends += sends

    async def _sent(self, step: Step, ref: Any) -> None:
        try:
            await ref
        except Exception as error:
            if not died(error):
                self._failed(step, cause(error))

    def _failed(self, step: Step, error: BaseException) -> None:
        if (state := self._steps.get(step)) is not None:
            self.fail(state, str(error), error)

    def _arrived(self, shard: Shard, arrival: Arrival) -> None:
        """Groups are whole: they are as if they had been scored here."""
        shard.stats = arrival.stats or shard.stats
        for at, endpoint, limit in arrival.limits:
            self._level(at, endpoint, limit)
        state, part = self._steps.get(arrival.step), shard.parts.get(arrival.step)
        if state is None or part is None:
            return
        state.story = arrival.story or state.story
        came: dict[int, list[Request]] = {}
        for row, record in enumerate(arrival.records):
            request = state.groups[record["group"]][record["sample"]]
            _fill_in(request, arrival, row, record)
            came.setdefault(request.group, []).append(request)
        for group, requests in came.items():
            part.owed.pop(group, None)
            if not state.over:
                self._whole(state, group, requests)
        if not state.over and (passed := self.failures.passed(state.more)):
            self.halt(passed, None)
        self._groups.serve(state)

    def _whole(self, state: StepRequests, group: int, requests: Sequence[Request]) -> None:
        dropped = state.rule.kind == "replace_group" and not requests[0].kept
        failed = next((request for request in requests if request.how == "failed"), None)
        for request in requests:
            self._count(request)
            if not dropped or request is not failed:
                request.ended = True
                state.open -= 1
        if dropped and failed is not None:
            self._groups._leave_out(failed, RewardFailed(state.story))
        else:
            del state.unfinished[group]
            state.arrived.append(group)

    def _count(self, request: Request) -> None:
        if request.how != "cancelled":
            self.failures.ended((request.step.story or str(request)) if request.how == "failed" else "")
        self.counts[request.how if request.how in ("failed", "cancelled") else "scored"] += 1
        if request.how in ("ledger", "shared"):
            self.counts["cached" if request.how == "ledger" else "shared"] += 1
        elif request.how not in ("failed", "cancelled"):
            self._asks.latency_s.append(request.end - request.begin)

    def _level(self, at: float, endpoint: str, limit: int) -> None:
        """Of a shared limit's changes each actor tells."""
        line = self._limiter.lines.get(endpoint) or self._limiter.lines[""]
        if (at, limit) not in line.changes:
            line.changes.append((at, limit))

    def _end(self, state: StepRequests, kind: type[DataflowError], message: str, error: BaseException | None) -> None:
        super()._end(state, kind, message, error)
        for shard in self._shards:
            part = shard.parts.pop(state.key, None)
            if part is not None and (part.owed or state.more) and not self._closed:
                self._spawn(self._cancel_there, shard, state.key, part.sends)

    async def _cancel_there(self, shard: Shard, step: Step, sends: Sequence[asyncio.Task[None]]) -> None:
        """Tells an actor that nobody wants more of a step, once all its sets are there: Ray keeps no order of calls."""
        await asyncio.wait(sends)
        await self._sent(step, shard.actor.cancel.remote(step))


class _Elsewhere:
    """The asks of an agent that has none: its actors have them."""

    def __init__(self) -> None:
        self.latency_s = Latencies()

    def add(self, *_arguments: Any) -> None:
        """Nothing of a new step is tried here."""

    def detach(self, request: Request) -> None:
        request.ended = True


def _elsewhere(*_arguments: Any, **_keywords: Any) -> NoReturn:
    raise DataflowError("reward agent: rewards are scored in its actors.")


class _There:
    """Stands in for the reward object: each actor has one, and has seen to it that the limits are for its endpoints."""

    compute_score = endpoint = staticmethod(_elsewhere)


def _fill_in(request: Request, arrival: Arrival, row: int, record: Mapping[str, Any]) -> None:
    request.score = arrival.scores[row]
    request.extras = {name: column[row] for name, column in arrival.extras.items()}
    request.kept = arrival.kept is None or arrival.kept[row]
    request.begin, request.end = record["begin"], record["end"]
    request.tries, request.how = record.get("tries", 1), record.get("how", "")
    request.notes = {name: record[name] for name in NOTES if name in record}
