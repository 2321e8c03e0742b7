"""RewardAgent: sends every response to the reward function and hands back whole groups as they finish.

One event loop, no polling: a finished request wakes whoever waits for it. Every request ends in exactly one of
scored, failed (and handled by the declared rule), cancelled; none is lost and none is silently zero.

Over 400 lines, as it is one object whose methods are its contract: what they do is in the files of rewards/.

A slot that falls free goes to the oldest waiting request: training steps by number, then validation streams; so a
straggler holds one slot and nothing else. How a single request is tried: rewards/lifecycle.py.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import numbers
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from loguru import logger

from dataflow.batch import Batch
from dataflow.errors import ConfigError, DataflowError, RewardFailed
from dataflow.rewards.asks import Asks
from dataflow.rewards.decode import Decode
from dataflow.rewards.failure import FailedShare, parse_rule
from dataflow.rewards.groups import Groups
from dataflow.rewards.hedge import parse_hedge
from dataflow.rewards.ledger.ledger import Ledger
from dataflow.rewards.lifecycle import Lifecycle
from dataflow.rewards.limits.queues import Limiter, Limits, Line, Permits, check_endpoints
from dataflow.rewards.remote.metrics import in_ray_worker
from dataflow.rewards.requests import (
    Arguments,
    Ask,
    Finish,
    Order,
    Request,
    Step,
    StepRequests,
    Ticket,
    Waiter,
    latency_summary,
    rewards_of,
    step_summary,
)
from dataflow.rewards.retry import Retry
from dataflow.rewards.sentinel.frozen import Frozen
from dataflow.rewards.sentinel.leftovers import end_children
from dataflow.rewards.sentinel.sentinel import Sentinel
from dataflow.rewards.user.function import check_methods, load_reward
from dataflow.rewards.user.results import read_usage
from dataflow.usercode.calls import Calls
from dataflow.usercode.failures import Contained, UserExit, is_ours
from dataflow.usercode.load import describe, name_of, raised

__all__ = ["Limits", "Retry", "RewardAgent", "Ticket", "latency_summary", "load_reward"]

_CLOSE_S = 10.0  # what the user's object may take to close
_SUMS = ("throttled", "timed_out", "tokens", "cost", "rate_limit_wait_s")  # of the stats, beside the counts
_REMEMBERED = 4096  # ended steps whose end a later collect is told


class Metrics(Protocol):
    """Who is told the stats, so many seconds after the first change since the last time."""

    every_s: float

    def tell(self, stats: Mapping[str, Any]) -> None: ...


class RewardAgent:
    """Scores the responses of several steps at once, never mixing them.

    Args:
        compute_score: a function, sync or async, called with verl's keywords ``data_source``, ``solution_str``,
            ``ground_truth`` and ``extra_info`` (a dict, to which ``raw_prompt``, the chat messages, and
            ``response_length``, in tokens, are added where the samples have them); or an object with such a method
            and optionally ``post_process_scores``, ``log``, ``close``, ``usage``, ``retry_on``, ``endpoint`` and
            ``tokens`` (docs/rewards.md). It returns a finite number, a tuple (score, query, explanation), or a dict
            with ``score`` and further columns. Sync ones run in threads.
        limits: calls in flight, requests and tokens a minute.
        retry: time-outs and tries.
        hedge_after: a second call for one that takes longer than this percentile (``"p95"``) or so many seconds.
        on_failure: what becomes of a sample without a score, see :class:`~dataflow.rewards.failure.FailureRule`.
        max_failed_share: the run stops when more than this share of its latest requests has failed, see
            :class:`~dataflow.rewards.failure.FailedShare`.
        max_strays: calls that may go on running after their time is over.
        post_process_scores: sync or async; given the scores of one whole group, in sample order, it returns
            as many, which replace them. Wins over the object's method.
        ledger: where requests and answers are journaled.
        share_equal: whether requests in flight with the same prompt and response are asked once.
        scorer: says what scores (its file, the judge's prompt); the ledger's answers of another one do not count.
        decode: turns the token ids of responses into texts, for samples without ``response_text``.
        shared: permits that several agents share, by endpoint.
        metrics: told the stats about once a second while they change (Ray's own metrics).
        sentinel: ends this process when a call freezes it; the agent is then this process's purpose, and ends with
            its children.
        frozen: calls that froze an agent before, and fail without being made.

    Raises:
        ConfigError: ``compute_score`` cannot be called, or an option is out of range.
    """

    def __init__(
        self,
        compute_score: Any,
        *,
        limits: Limits | None = None,
        retry: Retry | None = None,
        hedge_after: str | float | None = None,
        on_failure: str = "fail",
        max_failed_share: float = 0.1,
        max_strays: int | None = None,
        post_process_scores: Callable[[list[float]], Any] | None = None,
        ledger: Ledger | None = None,
        share_equal: bool = False,
        scorer: str = "",
        decode: Decode | None = None,
        shared: Callable[[str], Permits] | None = None,
        metrics: Metrics | None = None,
        sentinel: Sentinel | None = None,
        frozen: Frozen | None = None,
    ) -> None:
        self._owner = compute_score
        self._score = getattr(compute_score, "compute_score", compute_score)
        self._post = post_process_scores or getattr(compute_score, "post_process_scores", None)
        if isinstance(compute_score, type) or not callable(self._score):
            raise ConfigError(f"compute_score={compute_score!r}; give a function or an object with compute_score.")
        self.failures = FailedShare(max_failed_share)
        self.limits = limits or Limits()
        self.retry = retry or Retry()
        self.rule = parse_rule(on_failure)
        parse_hedge(hedge_after)
        check_methods(compute_score)
        check_endpoints(compute_score, self.limits)
        if self.retry.predicate is None and callable(predicate := getattr(compute_score, "retry_on", None)):
            self.retry = replace(self.retry, predicate=predicate)
        self._max_strays = self.limits.concurrency if max_strays is None else max_strays
        self._hedge_after = hedge_after
        self._ledger = ledger
        self._decode = decode
        self._shared = shared
        self._metrics = metrics
        self._measuring: asyncio.TimerHandle | None = None
        self._log = getattr(compute_score, "log", None)
        self._sentinel = sentinel
        self._frozen = frozen or Frozen()
        self._steps: dict[Step, StepRequests] = {}
        self._ended: OrderedDict[Step, tuple[type[DataflowError], str, BaseException | None]] = OrderedDict()
        self.counts: Counter[str] = Counter()
        self._told: dict[str, float] = {}
        self._asks = Asks(
            compute_score,
            self.limits,
            ledger,
            share_equal,
            scorer,
            self.counts,
            self.fail,
            self._measure,
            self._frozen,
            sentinel,
        )
        self._halted: tuple[str, BaseException | None] | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: Calls
        self._limiter: Limiter
        self._life: Lifecycle
        self._groups: Groups

    def submit(self, step: Step, samples: Batch, *, spare: int = 0, more: bool = False) -> Ticket:
        """Queues a request for each row and returns at once; call it on the agent's event loop.

        Args:
            step: number of a training step, or a name like ``"val:3"`` for requests served after all those.
            samples: columns ``data_source``, ``ground_truth`` and ``response_text`` (or ``responses``, token ids
                ``[rows, R]``, where the agent has ``decode``); ``extra_info`` and ``raw_prompt`` where there are
                such.
            spare: groups more than will be collected of the step; those that are left over in the end are cancelled.
            more: further groups of the step may follow, as a streaming rollout hands them on, each time with the same
                ``spare`` and ``more``; :meth:`collect` is told which of its calls is the last.

        Raises:
            DataflowError: a step submitted before, no rows, nothing but spare groups, a group twice, a missing
                column, a closed agent.
            RewardFailed: the agent has stopped, for too many failures or a budget that is spent; or the step has
                failed since its first groups were submitted.
        """
        if self._closed:
            raise DataflowError(f"reward agent: step {step} was submitted after close().")
        if self._halted is not None:
            raise RewardFailed(self._halted[0]) from self._halted[1]
        known = self._steps.get(step)
        if more and step in self._ended:
            raise self._gone(step)
        if step in self._ended or (known is not None and not (more and known.more)):
            raise DataflowError(f"reward agent: step {step} was submitted before; submit each step once.")
        if not len(samples):
            raise DataflowError(f"reward agent: step {step} has no samples to score.")
        ids = samples.ids
        before = () if known is None else known.seen
        if len({*ids, *before}) != len(ids) + len(before):
            twice = next(group for group, count in Counter([*before, *ids]).items() if count > 1)
            raise DataflowError(f"reward agent: step {step} holds group {twice} twice; sort rows by group.")
        if spare < 0 or (spare >= len(ids) and not more):
            raise DataflowError(f"reward agent: step {step} has {len(ids)} groups, {spare} of which cannot be spare.")
        arguments = Arguments(samples, self._decode, getattr(self._owner, "wants_response_ids", False))
        self._bind()
        training = isinstance(step, numbers.Integral)
        priority = (0, int(step)) if training else (1, 0)
        state = known or StepRequests(
            step, self.rule if training else self.rule.for_validation(), priority, spare, more
        )
        rows = state.add(samples.groups.tolist())
        self._steps[step] = state
        self.counts["requested"] += len(samples)
        self.failures.submitted(len(samples), state.rows)
        self._measure()
        self._asks.add(state, arguments, rows)
        return Ticket(step, ids, len(samples))

    async def collect(self, step: Step, k: int | None = None, order: Order = "arrival", *, last: bool = False) -> Batch:
        """Waits for the next k groups of a step and returns their rewards, groups in order of their ids.

        Args:
            step: as submitted.
            k: how many groups; None for all that nobody else collects.
            order: ``arrival`` takes the groups that finish first, ``index`` the next ones by id.
            last: nobody will collect more of a step that was submitted with ``more``: what is left is spare.

        Returns:
            ``score`` float32 ``[rows]`` and a column of objects for each extra one, None where a sample lacks it;
            under a rule that drops samples ``kept`` bool ``[rows]``, with a score of NaN where it is False.
            ``meta``: ``records``, dicts with group, sample, begin and end (seconds of ``clock.now()``) of each
            request, and ``tries`` and ``how`` where they are not 1 and by a call of its own; ``latency_s``, their
            durations; ``limits``, the changes of limits since the last collect; and with the last groups of the step
            ``step``, its counts and latencies.

        Raises:
            RewardFailed: a request of the step failed, or the step was cancelled.
            DataflowError: a step never submitted or collected in full, k or order out of range.
        """
        if order not in ("arrival", "index"):
            raise DataflowError(f"reward agent: order '{order}' is unknown; give 'arrival' or 'index'.")
        state = self._steps.get(step)
        if state is None:
            raise self._gone(step)
        take = state.left if k is None else k
        if k is None and not take:
            raise DataflowError(f"reward agent: all groups of step {step} are being collected already.")
        if take < 1 or (take > state.left and not (state.more and k is not None)):
            raise DataflowError(f"reward agent: step {step} has {state.left} groups left to collect, not {take}.")
        waiter = Waiter(take, order, self._bind().create_future())
        state.waiters.append(waiter)
        self._groups.serve(state)
        try:
            chosen = await waiter.future
        except asyncio.CancelledError:
            # Whoever gives up leaves its groups to the next.
            if waiter in state.waiters:
                state.waiters.remove(waiter)
            elif not waiter.future.cancelled() and not waiter.future.exception():
                state.arrived = waiter.future.result() + state.arrived
            self._groups.serve(state)
            raise
        final = last if state.more else len(state.groups) <= state.spare + len(chosen)
        if final and state.more and not state.over and (passed := self.failures.passed()):
            self.halt(passed, None)  # only now is it known of how many
            raise self._gone(step)
        batch = rewards_of(state, chosen)
        batch.meta["limits"] = self._limiter.changes()
        self._groups.tell(state, batch)
        if self._ledger is not None:
            self._ledger.collected(step, chosen)
        if final and not state.over:
            batch.meta["step"] = step_summary(state)
            state.ended.clear()  # requests and their step would else wait for the garbage collector
            self._leave(state)
            self._end(state, DataflowError, f"reward agent: step {step} has been collected in full.", None)
            self._dismiss(state)
        return batch

    def cancel(self, step: Step) -> int:
        """Cancels what is left of a step; whoever waits for it gets RewardFailed.

        Returns:
            How many requests were waiting or running; 0 for a step that is not there.
        """
        state = self._steps.get(step)
        if state is None:
            return 0
        count = state.open
        self.fail(state, f"step {step}: its reward requests were cancelled.", None)
        return count

    def stats(self) -> dict[str, Any]:
        """Returns counts of requests so far, what waits and runs now, and the latency of the scored ones.

        ``running`` counts slots in use, also by a thread that goes on behind a cancelled request; ``strays`` are
        the calls that run on although their time is over.
        """
        names = ("requested", "scored", "failed", "cancelled", "cached", "shared")
        counts = {name: self.counts[name] for name in names}
        now: dict[str, Any] = {"waiting": 0, "running": 0, "peak": 0, "strays": 0, "steps": len(self._steps)}
        tried = dict.fromkeys(("retried", "hedged", "timed_out", "throttled"), 0)
        if self._loop is not None:
            tried = {name: self._life.counts[name] for name in tried}
            lines = self._limiter.lines
            now |= {
                "waiting": sum(state.waiting() for state in self._steps.values()),
                "running": self._limiter.running,
                "peak": self._limiter.peak,
                "strays": self._calls.abandoned,
                "limit": {name: int(line.limit) for name, line in lines.items()},
                "rate_limit_wait_s": sum(line.waited_s for line in lines.values()),
            }
        usage = getattr(self._owner, "usage", None)
        try:
            said = usage() if callable(usage) else {"tokens": self.counts["tokens"]}
        except BaseException as error:
            if is_ours(error):
                raise
            raise DataflowError(raised("reward agent: stats", usage, error)) from error
        try:
            spent = read_usage(said)
        except ValueError as error:
            what = f"reward agent: stats: '{name_of(usage)}' returned {error}"
            raise DataflowError(f"{what}; return finite numbers by name.") from error
        return {**counts, **tried, **now, **spent, "latency_s": self._asks.latency_s.summary()}

    def used(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """Returns by how much the sums among the stats have grown since the last call: a step's share of them."""
        now = {name: float(stats[name]) for name in _SUMS if name in stats}
        # The sums of an agent in actors fall when one of these is replaced.
        grown = {name: max(0.0, value - self._told.get(name, 0.0)) for name, value in now.items()}
        self._told = now
        return grown

    async def close(self) -> None:
        """Cancels everything and closes the user's object, if it has ``close``. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for state in list(self._steps.values()):
            self.fail(state, f"step {state.key}: the reward agent was closed.", None)
        self._tell_metrics()
        if self._loop is not None:
            self._limiter.close()
            # User code may refuse to be cancelled; it must not keep the process.
            await self._calls.close()
        try:
            if self._ledger is not None:
                await asyncio.to_thread(self._ledger.close)
        finally:  # a ledger that cannot be written must not leave the user's connections open
            try:
                await self._close_owner()
            finally:
                if self._sentinel is not None and self._loop is not None:
                    await asyncio.to_thread(self._end_processes, self._sentinel)

    def _end_processes(self, sentinel: Sentinel) -> None:
        """Ends the sentinel, and the programs that calls have started and that go on."""
        sentinel.close()
        if (since_s := self._calls.since_s(all_of_them=in_ray_worker())) is not None and (
            killed := end_children(since_s, but=[process.pid or 0 for process in multiprocessing.active_children()])
        ):
            logger.warning("reward agent: '{}' left {} processes behind; ended.", name_of(self._score), len(killed))

    async def _close_owner(self) -> None:
        """Closes the user's object.

        Raises:
            DataflowError: its ``close`` raised.
        """
        close = getattr(self._owner, "close", None)
        if not callable(close):
            return
        try:
            if not inspect.isawaitable(ending := close()):
                return
            task = asyncio.ensure_future(Contained(ending) if inspect.iscoroutine(ending) else ending)
            if (await asyncio.wait([task], timeout=_CLOSE_S))[0]:
                task.result()
                return
        except BaseException as error:
            own = isinstance(error, DataflowError) and not isinstance(error, UserExit)
            if own or is_ours(error):
                raise
            what = error.__cause__ if isinstance(error, UserExit) and error.__cause__ is not None else error
            raise DataflowError(raised("reward agent", close, what)) from error
        task.cancel()
        logger.warning("reward agent: '{}' has not closed within {:g} s.", name_of(self._owner), _CLOSE_S)

    def _bind(self) -> asyncio.AbstractEventLoop:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise DataflowError("reward agent: submit and collect must be called on a running event loop.") from error
        if self._loop is None:
            if self._sentinel is not None:
                self._sentinel.start(loop)
            self._loop = loop
            self._calls = Calls(self._strayed, self._bug, self._sentinel)
            self._limiter = Limiter(self.limits, self._start, self._shared, self._bug)
            self._life = Lifecycle(self._score, self._calls, self._limiter, self.retry, self._hedge_after, self._asks)
            timeout_s = self.retry.timeout_s
            self._groups = Groups(self._post, self._log, self._calls, self._limiter, timeout_s, self._frozen, self)
            self._asks.life, self._asks.ends = self._life, self._groups
        if self._loop is not loop:
            raise DataflowError("reward agent: it lives on another event loop; use one agent a loop.")
        return loop

    def _start(self, item: Ask | Finish, line: Line) -> None:
        if isinstance(item, Ask):
            self._life.start(item, line)
        else:
            self._groups.post_process(item, line)

    def detach(self, request: Request) -> None:
        """A request has ended otherwise: nobody is asked for it any more."""
        self._asks.detach(request)

    # --- ends of steps (Groups' Owner) --------------------------------------------------------------------

    def fail(self, state: StepRequests, message: str, error: BaseException | None) -> None:
        """Ends a step for all who wait and will wait for it, and cancels the rest of its requests."""
        if state.over:
            return
        self._end(state, RewardFailed, message, error)
        self._dismiss(state)
        self._leave(state)
        if self._loop is not None and not self._closed:
            self._limiter.fill()

    def _dismiss(self, state: StepRequests) -> None:
        """Those who still wait for a step that has ended hear why."""
        for waiter in state.waiters:
            if not waiter.future.done():
                waiter.future.set_exception(self._gone(state.key))
        state.waiters.clear()

    def _leave(self, state: StepRequests) -> None:
        """What is left of a step is wanted no more."""
        self.counts["cancelled"] += state.open
        state.open = 0
        state.unfinished.clear()
        state.unready.clear()
        for requests in state.groups.values():
            for request in requests:
                if not request.ended:
                    self.detach(request)

    def halt(self, message: str, error: BaseException | None) -> None:
        """Ends every step, now and later: what is wrong is not the matter of one."""
        if self._halted is None:
            self._halted = message, error
        for state in list(self._steps.values()):
            self.fail(state, message, error)

    def _measure(self) -> None:
        """Something has changed: the metrics are told before long, with all that changes until then."""
        if self._metrics is not None and self._measuring is None and self._loop is not None:
            self._measuring = self._loop.call_later(self._metrics.every_s, self._tell_metrics)

    def _tell_metrics(self) -> None:
        if self._measuring is None or self._metrics is None:
            return
        self._measuring.cancel()
        self._measuring = None
        try:
            self._metrics.tell(self.stats())
        except Exception as error:
            self._bug(error)

    def _strayed(self, strays: int) -> None:
        if strays > self._max_strays and not self._closed:
            name, limit = name_of(self._score), f"more than reward.max_strays={self._max_strays} allows"
            fix = "give its own requests a time-out, or raise reward.timeout"
            self.halt(f"{strays} calls of '{name}' go on running after their time is over, {limit}; {fix}.", None)

    def _bug(self, error: Exception) -> None:
        """Nobody may wait for ever for what an error of ours has lost."""
        if isinstance(error, DataflowError):
            self.halt(str(error), error.__cause__)  # it knows better what to do
            return
        logger.opt(exception=error).error("reward agent: {}", describe(error))
        self.halt(f"reward agent: an error of its own, {describe(error)}; please report it with the log.", error)

    def _end(self, state: StepRequests, kind: type[DataflowError], message: str, cause: BaseException | None) -> None:
        state.over = True
        self._measure()
        del self._steps[state.key]
        self._ended[state.key] = (kind, message, cause)
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _gone(self, step: Step) -> DataflowError:
        """Returns why a step is not there; a new exception each time, as one raised twice mixes traces."""
        if step in self._ended:
            kind, message, cause = self._ended[step]
            error = kind(message)
            error.__cause__ = cause
            return error
        live = ", ".join(map(str, self._steps)) or "none"
        return DataflowError(f"reward agent: step {step} was never submitted (in flight: {live}).")
