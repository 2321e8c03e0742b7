"""RewardAgent: sends every response to the reward function, and returns whole groups as they finish.

It runs on one event loop without polling. Every request ends in exactly one of scored, failed (and handled by the
declared rule) or cancelled; none is lost, and no score silently becomes zero.

A free slot goes to the oldest queued request: training steps by number, then validations. So a straggler holds one slot
and delays nothing else. ``dataflow/rewards/__init__.py`` shows the way of one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from dataflow.batch import Batch
from dataflow.cluster.frozen import FrozenExit
from dataflow.errors import ConfigError, DataflowError
from dataflow.rewards.decode import Decode
from dataflow.rewards.failure import parse_rule
from dataflow.rewards.filter import GroupFilter
from dataflow.rewards.functions import check_methods, load_reward
from dataflow.rewards.groups import GroupCalls, close_reward, group_method, usage_of
from dataflow.rewards.hedge import parse_hedge
from dataflow.rewards.jobs import Arguments, Jobs
from dataflow.rewards.ledger import Ledger
from dataflow.rewards.limits.limits import Limits, check_endpoints
from dataflow.rewards.limits.queues import EndpointQueue, Limiter
from dataflow.rewards.limits.router import pooled, router_of
from dataflow.rewards.metrics import Metrics
from dataflow.rewards.naming import MAIN, metric
from dataflow.rewards.records import latency_summary
from dataflow.rewards.requests import (
    BESIDE,
    ENDED,
    GroupJob,
    JobState,
    Order,
    Outcome,
    Request,
    Rows,
    Scored,
    ScoringJob,
    Step,
    StepRequests,
    Ticket,
)
from dataflow.rewards.retry import Retry
from dataflow.rewards.scorer import Scorer
from dataflow.rewards.steps import Steps
from dataflow.system import clock
from dataflow.usercode.calls import Calls
from dataflow.usercode.failures import is_ours
from dataflow.usercode.load import describe, name_of

__all__ = ["BESIDE", "MAIN", "GroupFilter", "Limits", "Retry", "RewardAgent", "Ticket", "latency_summary",
           "load_reward", "metric"]  # fmt: skip

_NO_SUMS = frozenset(
    [
        *("requested", "scored", "failed", "cancelled", "cached", "shared", "retried", "hedged", *ENDED),
        *("waiting", "running", "peak", "abandoned", "steps", "limit", "latency_s"),
    ]
)
"""Stats that are those of now, or that the summary of a step counts itself; all others are sums so far."""


class RewardAgent:
    """Scores the responses of several steps at once, never mixing them.

    Args:
        compute_score: a function, sync or async, called with verl's keywords ``data_source``, ``solution_str``,
            ``ground_truth`` and ``extra_info`` (a dict, to which ``raw_prompt``, ``response_length`` and
            ``finish_reason`` are added where the samples have them); or an object with such a method and optionally
            ``compute_group`` or ``post_process_scores``, ``log``, ``close``, ``usage``, ``retry_on``,
            ``endpoint`` and ``tokens`` (docs/rewards.md). It returns a finite number, a tuple (score, query,
            explanation), or a dict with ``score`` and further columns. Sync functions run in threads.
        limits: calls in flight, requests and tokens a minute.
        retry: time-outs and tries.
        hedge_after: a second call is sent for a first one that takes longer than this: a percentile of the latencies
            (``"p95"``) or seconds.
        on_failure: what happens to a sample without a score, see :class:`~dataflow.rewards.failure.FailureRule`.
        max_failed_share: the run stops when more than this share of its latest requests has failed, see
            :class:`~dataflow.rewards.failure.FailedShare`.
        max_abandoned: number of abandoned calls that may still be running; None for as many as there are slots.
        post_process_scores: sync or async; takes the scores of one whole group, in sample order, and returns as many,
            which replace them. Used instead of the object's method.
        ledger: where requests and answers are recorded.
        share_equal: whether requests in flight with the same prompt and response share one call.
        scorer: identifies what scores (its file, the judge's prompt); answers in the ledger by another one are not
            used.
        decode: converts the token ids of responses to texts, for samples without ``response_text``.
        metrics: receives the stats about once a second while they change (Ray's own metrics).
        frozen_exit: ends this process, which is the agent's own, when a call freezes it.
        name: of the agent among several of a run; its messages and metrics have it.

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
        max_abandoned: int | None = None,
        post_process_scores: Callable[[list[float]], Any] | None = None,
        ledger: Ledger | None = None,
        share_equal: bool = False,
        scorer: str = "",
        decode: Decode | None = None,
        metrics: Metrics | None = None,
        frozen_exit: FrozenExit | None = None,
        name: str = MAIN,
    ) -> None:
        self.name, self._reward = name, compute_score
        self._wants_ids = bool(getattr(compute_score, "wants_response_ids", False))
        self._function = getattr(compute_score, "compute_score", compute_score)
        self._post_process = group_method(compute_score, post_process_scores)
        if isinstance(compute_score, type) or not callable(self._function):
            raise ConfigError(f"compute_score={compute_score!r}; give a function or an object with compute_score.")
        self.retry = retry or Retry()
        self.ledger = ledger
        self.steps = Steps(parse_rule(on_failure), max_failed_share, self._on_cancel, self._on_end, name)
        parse_hedge(hedge_after)
        check_methods(compute_score)
        self._router = router_of(compute_score)
        check_endpoints(compute_score, limits or Limits())
        self.limits = pooled(limits or Limits(), self._router)
        if self.retry.predicate is None and callable(predicate := getattr(compute_score, "retry_on", None)):
            self.retry = replace(self.retry, predicate=predicate)
        self._max_abandoned = self.limits.concurrency if max_abandoned is None else max_abandoned
        self._hedge_after = hedge_after
        self._decode, self._metrics = decode, metrics
        self._report_timer: asyncio.TimerHandle | None = None
        self._frozen_exit = frozen_exit
        counts = self.steps.counts
        self._jobs = Jobs(compute_score, self.limits, ledger, share_equal, scorer, counts)
        self._reported: dict[str, float] = {}
        # Bound to the event loop by the first submit.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: Calls
        self._limiter: Limiter
        self._scorer: Scorer
        self._groups: GroupCalls

    def submit(
        self,
        step: Step,
        samples: Batch,
        *,
        extra_groups: int = 0,
        more: bool = False,
        group_filter: GroupFilter | None = None,
    ) -> Ticket:
        """Queues a request for each row and returns at once; call it on the agent's event loop.

        Args:
            step: number of a training step, or a name: ``"beside:3"`` for requests served with those of step 3, another
                one like ``"val:3"`` for requests served after those of all steps.
            samples: columns ``data_source``, ``ground_truth`` and ``response_text`` (or ``responses``, token ids
                ``[rows, R]``, where the agent has ``decode``); optionally ``extra_info`` and ``raw_prompt``.
            extra_groups: groups beyond those that will be collected; the rest of them is cancelled at the end.
            more: further chunks of the step may follow, as from a streaming rollout, each with the same
                ``extra_groups`` and ``more``; the last :meth:`collect` has ``last``.
            group_filter: which finished groups are left out, for extra ones to take their place.

        Raises:
            DataflowError: a step submitted before, no rows, no group to collect, a group twice, a missing column, a
                closed agent.
            RewardFailed: the agent has stopped, for too many failures or a budget that is spent; or the step has
                failed since its first chunk was submitted.
        """
        self.steps.check(step, samples, extra_groups, more)
        arguments = Arguments(samples, self._decode, self._wants_ids)
        self._bind()
        state, requests, ticket = self.steps.add(step, samples, extra_groups, more, group_filter)
        state.unadmitted.append(Rows(arguments.rows, requests, clock.now()))
        self._report_soon()
        self._admit_soon(state)
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
        """Waits for the next k groups of a step and returns their rewards, groups in order of their ids.

        Args:
            step: as submitted.
            k: number of groups; None for all that no other call collects.
            order: ``arrival`` takes the groups that finish first, ``index`` the next ones by id.
            last: the last call for a step submitted with ``more`` or collected by ``groups``; cancels the rest.
            groups: the ids to wait for, in place of the next k.

        Returns:
            ``score`` float32 ``[rows]`` and an object column for each extra one, None where a sample lacks it; under
            a rule that drops samples ``kept`` bool ``[rows]``, with a score of NaN where it is False.
            ``meta``: ``records``, dicts with group, sample, begin and end (seconds of ``clock.now()``) of each
            request, ``tries`` if there was more than one, and ``how`` if it has no score from a call of its own;
            ``latency_s``, their durations; ``limits``, the changes of limits since the last collect; and with the last
            groups of the step ``step``, its counts and latencies.

        Raises:
            RewardFailed: a request of the step failed, the step was cancelled, or one of ``groups`` is lost.
            DataflowError: a step never submitted or collected in full, k or order out of range.
        """
        if self._loop is not None:
            self._bind()
        batch = await self.steps.collect(step, k, order, last, groups)
        batch.meta["limits"] = self._scorer.limit_changes()
        self._groups.log(batch)
        if self.ledger is not None:
            self.ledger.collected(step, batch.ids)
        return batch

    def cancel(self, step: Step) -> int:
        """Cancels the rest of a step; its waiters get RewardFailed.

        Returns:
            The number of requests that were waiting or running; 0 for a step that is not there.
        """
        return self.steps.cancel(step)

    def stats(self) -> dict[str, Any]:
        """Returns counts of requests so far, what waits and runs now, and the latency of the scored ones.

        ``running`` counts slots in use, including those of threads whose request was cancelled; ``abandoned`` counts
        abandoned calls, which keep running after their time-out.

        Raises:
            DataflowError: the user's ``usage`` raised an error or returned something else than finite numbers.
        """
        names = ("requested", "scored", "failed", "cancelled", "cached", "shared")
        counts = {name: self.steps.counts[name] for name in names}
        now: dict[str, Any] = {"waiting": 0, "running": 0, "peak": 0, "abandoned": 0, "steps": len(self.steps.live)}
        tried = dict.fromkeys(("retried", "hedged", "timed_out", "throttled"), 0)
        if self._loop is not None:
            tried = {name: self._scorer.counts[name] for name in tried}
            queues = self._limiter.queues
            now |= {
                "waiting": self.steps.waiting(),
                "running": self._limiter.running,
                "peak": self._limiter.peak,
                "abandoned": self._calls.abandoned,
                "limit": {name: int(queue.limit) for name, queue in queues.items()},
                "rate_limit_wait_s": sum(queue.waited_s for queue in queues.values()),
            }
        spent = usage_of(self._reward, self.steps.counts["tokens"])
        return {**counts, **tried, **now, **spent, "latency_s": self._jobs.latency_s.summary()}

    def used(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """Returns how much the sums among the stats have grown since the last call: the share of one step."""
        now = {name: float(value) for name, value in stats.items() if name not in _NO_SUMS}
        grown = {name: max(0.0, value - self._reported.get(name, 0.0)) for name, value in now.items()}
        self._reported = now
        return grown

    async def close(self) -> None:
        """Cancels everything and closes the user's object, if it has ``close``. May be called twice."""
        if not self.steps.close():
            return
        self._report()
        if self._loop is not None:
            self._limiter.close()
            # User code may ignore its cancellation, which must not keep the process alive.
            await self._calls.close()
            await self._scorer.close()
        try:
            if self.ledger is not None:
                await asyncio.to_thread(self.ledger.close)
        finally:  # a ledger that cannot be written must not leave the user's connections open
            try:
                await close_reward(self._reward)
            finally:
                if self._frozen_exit is not None and self._loop is not None:
                    self._frozen_exit.close()

    def _bind(self) -> None:
        """Binds the agent to the running event loop.

        Raises:
            DataflowError: no loop runs, or the agent is bound to another one.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise DataflowError("reward agent: submit and collect must be called on a running event loop.") from error
        if self._loop is None:
            self._open(loop)
            self._loop = loop
        if self._loop is not loop:
            raise DataflowError("reward agent: it lives on another event loop; use one agent a loop.")

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes what runs on the agent's event loop."""
        if self._frozen_exit is not None:
            self._frozen_exit.start()
        retry, on_bug = self.retry, self.steps.on_bug
        calls = self._calls = Calls(self._on_abandoned, on_bug)
        limiter = self._limiter = Limiter(self.limits, self._start, on_bug)
        options = retry, self._hedge_after, self._on_outcome, self._router
        self._scorer = Scorer(self._function, calls, limiter, *options)
        post, log = self._post_process, getattr(self._reward, "log", None)
        self._groups = GroupCalls(post, log, calls, limiter, retry.timeout_s, self.steps)

    def _admit_soon(self, state: StepRequests) -> None:
        """Schedules the admission of a step's next rows, unless enough of its jobs are queued."""
        if not state.admitting and self._jobs.may_admit(state):
            state.admitting = True
            asyncio.get_running_loop().call_soon(self._admit, state)

    def _admit(self, state: StepRequests) -> None:
        """Queues jobs for the next rows of a step, and routes the outcomes that are known already."""
        state.admitting = False
        if state.over or not state.unadmitted:
            return
        try:
            for request, found in self._jobs.admit(state):
                if not isinstance(found, ScoringJob):
                    self._route(request, found)
                elif found.state is JobState.NEW:
                    self._scorer.score(found)
                else:
                    self._scorer.reprioritise(found)
                if state.over:
                    return
        except BaseException as error:  # reading a request may run the user's code
            if is_ours(error):
                raise
            why = describe(error).rstrip(".")
            self.steps.fail(state, f"reward agent: step {state.key} cannot be sent: {why}.", error)
            return
        self._limiter.fill()
        self._admit_soon(state)

    def _start(self, item: ScoringJob | GroupJob, queue: EndpointQueue) -> None:
        """Starts what the limiter grants a slot."""
        if isinstance(item, GroupJob):
            self._groups.start(item, queue)
            return
        if not item.tries:
            self._on_dequeued(item.requests[0].step)
        self._scorer.start(item, queue)

    def _on_dequeued(self, state: StepRequests) -> None:
        state.queued_jobs -= 1
        self._admit_soon(state)

    def _on_outcome(self, job: ScoringJob, outcome: Outcome) -> None:
        for request, own in self._jobs.end(job, outcome):
            self._route(request, own)
        self._report_soon()

    def _route(self, request: Request, outcome: Outcome) -> None:
        """Gives a request its outcome, and passes its group on if it is the last one of that."""
        state = request.step
        if isinstance(outcome, Scored):
            whole = self.steps.scored(request, outcome)
        else:
            whole = self.steps.failed(request, outcome.message, outcome.error)
        if whole:
            self._groups.finish(state, request.group)
        if not isinstance(outcome, Scored):
            self.steps.check_failed_share(state, outcome.error)

    def _on_cancel(self, request: Request) -> None:
        """Cancels the job of a request, unless other requests share it."""
        job = self._jobs.detach(request)
        if job is not None:
            if not job.tries:
                self._on_dequeued(request.step)
            self._scorer.cancel(job)

    def _on_end(self, _state: StepRequests) -> None:
        self._report_soon()
        if self._loop is not None and not self.steps.closed:
            self._limiter.fill()

    def _on_abandoned(self, count: int) -> None:
        if count > self._max_abandoned and not self.steps.closed:
            name, limit = name_of(self._function), f"more than reward.max_abandoned={self._max_abandoned} allows"
            fix = "give its own requests a time-out, or raise reward.timeout"
            self.steps.halt(f"{count} calls of '{name}' keep running after their time is over, {limit}; {fix}.", None)

    def _report_soon(self) -> None:
        """Schedules a report to the metrics, which covers all changes until then."""
        if self._metrics is not None and self._report_timer is None and self._loop is not None:
            self._report_timer = self._loop.call_later(self._metrics.every_s, self._report)

    def _report(self) -> None:
        if self._report_timer is None or self._metrics is None:
            return
        self._report_timer.cancel()
        self._report_timer = None
        try:
            self._metrics.report(self.stats())
        except Exception as error:
            self.steps.on_bug(error)
