"""Scores jobs: tries, time-outs, backoff and hedges, until a job has exactly one outcome.

A job holds a slot only while a call runs for it. Between two tries it waits on a timer, and is then queued again with
its old priority, ahead of everything submitted later. :data:`~dataflow.rewards.requests.CHANGES` has the states.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from loguru import logger

from dataflow.rewards.hedge import Hedge
from dataflow.rewards.limits.queues import EndpointQueue, Limiter
from dataflow.rewards.limits.rates import LONG_S
from dataflow.rewards.limits.router import Router, is_doubtful
from dataflow.rewards.requests import Failed, JobState, Outcome, Scored, ScoringJob
from dataflow.rewards.results import read_result, tokens_used
from dataflow.rewards.retry import Retry, is_overload, is_throttle, is_timeout, retry_after_s, status_of
from dataflow.system import clock
from dataflow.system.secrets import redact_known
from dataflow.usercode.calls import Call, Calls
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import attempt, is_ours, message_of, parts_of
from dataflow.usercode.load import describe, fix_of, is_async, name_of, what_happened


class BadScore(ValueError):
    """The value that a reward function returned is not a score."""

    fix = "return a finite number, (score, query, explanation) or a dict with 'score'"


class Scorer:
    """Scores jobs with the user's function.

    Args:
        function: the user's function.
        calls: runs it.
        limiter: grants the slots; its ``start`` callback must call :meth:`start`.
        retry: tries and time-outs of a job.
        hedge_after: how long a first call may take before a second one is sent, see
            :func:`~dataflow.rewards.hedge.parse_hedge`; None never sends one.
        on_outcome: called once for each job that is not cancelled, when it is done.
        router: of the servers among which the limiter chooses.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        calls: Calls,
        limiter: Limiter,
        retry: Retry,
        hedge_after: str | float | None,
        on_outcome: Callable[[ScoringJob, Outcome], None],
        router: Router | None = None,
    ) -> None:
        self._function = function
        self._is_async = is_async(function)
        self._calls = calls
        self._limiter = limiter
        self._retry = retry
        limits_s = [limit for limit in (retry.timeout_s, retry.deadline_s) if limit is not None]
        # The same for all first calls, so that they share a timer.
        self._first_s = min(limits_s, default=None)
        self._hedge = Hedge(hedge_after)
        self._on_outcome = on_outcome
        self._router = router
        if router is not None:
            router.open(limiter.queues, retry.deadline_s)
        self.counts: Counter[str] = Counter()
        self._logged_until = 0.0

    def score(self, job: ScoringJob) -> None:
        """Queues a job, new or after its backoff; ``limiter.fill`` starts it."""
        job.to(JobState.QUEUED)
        self._limiter.push(job)

    def reprioritise(self, job: ScoringJob) -> None:
        """Moves a queued job to its new priority; one that is not queued has it at its next try."""
        if job.wanted:
            self._limiter.push(job)

    def start(self, job: ScoringJob, queue: EndpointQueue) -> None:
        """Starts a call of a job whose slot is taken."""
        loop = self._calls.loop
        hedge = job.state is JobState.HEDGING
        job.to(JobState.RUNNING)
        timeout_s = self._first_s
        if not job.tries:
            job.begin = clock.now()
            job.held_by = self._limiter.held_by(queue, job.queued_at)
            if self._retry.deadline_s is not None:
                job.deadline = loop.time() + self._retry.deadline_s
        elif timeout_s is not None:
            self._stop_timer(job)
            timeout_s = min(self._retry.timeout_s or math.inf, max(0.0, job.deadline - loop.time()))
        if hedge:
            self.counts["hedged"] += 1
        else:
            job.tries += 1
            if job.again:
                self.counts["retried"] += 1
                job.again = False
        job.server = queue.name
        call = self._calls.start(
            self._function,
            own_copy(job.arguments),  # a try must not see what an earlier one, or another sample's, changed
            on_done=partial(self._on_done, job, queue),
            on_freed=partial(self._on_freed, job, queue),
            timeout_s=timeout_s,
            awaits=self._is_async,
            endpoint=queue.name,
        )
        job.live[call] = hedge
        threshold_s = None if hedge else self._hedge.after_s
        if threshold_s is not None:
            job.timer = loop.call_later(threshold_s, self._queue_hedge, job)

    def cancel(self, job: ScoringJob) -> None:
        """Ends a job without an outcome, and cancels its calls."""
        job.to(JobState.DONE)
        self._stop_timer(job)
        calls, job.live = job.live, {}
        for call in calls:
            call.cancel()

    def limit_changes(self) -> list[tuple[float, str, int]]:
        """Returns (seconds of ``clock.now()``, endpoint, limit) of each change since the last call."""
        changes = self._limiter.changes()
        return changes if self._router is None else sorted(changes + self._router.take_changes())

    async def close(self) -> None:
        """Ends what the router of the servers runs."""
        if self._router is not None:
            await self._router.close()

    def _finish(self, job: ScoringJob, outcome: Outcome) -> None:
        self.cancel(job)
        self._on_outcome(job, outcome)

    def _on_freed(self, job: ScoringJob, queue: EndpointQueue, call: Call) -> None:
        error = call.error
        overloaded = error is not None and is_overload(error)
        used = tokens_used(call.result)
        extra_tokens = 0 if used is None else used - job.tokens
        self._limiter.release(queue, call.begin, overloaded, extra_tokens, error)
        # The call itself is kept until its time-out; its result need not be.
        call.result = call.error = None

    def _on_done(self, job: ScoringJob, queue: EndpointQueue, call: Call) -> None:
        hedge = job.live.pop(call)
        error = call.error
        if error is None:
            try:
                score, extras = read_result(call.result)
                if extras:
                    extras = redact_known(extras)  # these columns hold texts of servers, and are kept and shown
            except BaseException as bad:  # reading it may run the user's code: a tensor's, a mapping's
                if is_ours(bad):
                    raise
                error = BadScore(message_of(bad))
            else:
                self._hedge.answered(self._latency_s(job, call))
                job.server = queue.name
                if self._router is not None:
                    overtaken = {slower.endpoint: slower.begin for slower, late in job.live.items() if not late}
                    self._router.answered(queue.name, overtaken)
                self._finish(job, Scored(score, extras, "hedged" if hedge else ""))
                return
        self._on_failed(job, queue, call, error)

    def _latency_s(self, job: ScoringJob, call: Call) -> float:
        """Returns the duration of the call, or of the slower one that it overtook, as far as it ran.

        A percentile of the winners alone would keep falling, since the percentile decides which calls are hedged.
        """
        return max([call.seconds, *(clock.now() - slower.begin for slower in job.live)]) if job.live else call.seconds

    def _log_long_pause(self, pause_s: float, queue: EndpointQueue) -> None:
        """Logs a long pause, which looks like a run that stands still; during it, no further one."""
        if pause_s > LONG_S and clock.now() >= self._logged_until:
            self._logged_until = clock.now() + pause_s
            logger.warning(
                "reward agent: {} asks for a pause of {:.0f} s (Retry-After), in which nothing is sent to it; lower "
                "reward.concurrency, or set reward.rpm.",
                queue.name or "the service",
                pause_s,
            )

    def _on_failed(self, job: ScoringJob, queue: EndpointQueue, call: Call, error: BaseException) -> None:
        job.errors.append(_brief(error))
        job.error, job.last_s = error, call.seconds
        if is_timeout(error):
            self.counts["timed_out"] += 1
            job.timed_out += 1
        if is_overload(error):
            # No longer than a deadline: jobs queued behind it must find out by their own tries that it is out of reach.
            pause_s = min(retry_after_s(error), self._retry.deadline_s or math.inf)
            if is_throttle(error):
                self.counts["throttled"] += 1
                job.throttled += 1
            if pause_s:
                queue.pause(pause_s)
                self._log_long_pause(pause_s, queue)
        elsewhere = self._router is not None and self._router.failed(queue.name, error)
        if self._router is not None and is_doubtful(error):
            job.doubted = (*job.doubted, queue.name)
        if job.live:
            return  # its other call may still succeed
        self._stop_timer(job)
        now = self._calls.loop.time()
        if elsewhere and self._resend(job, queue, now):
            return
        again, own = False, None
        if getattr(error, "fatal", None) is not True:
            again, own = attempt(lambda: bool(self._retry.again(error)))
        if own is not None:
            self._give_up(job, own, f"the predicate for retries raised {describe(own)}")
            return
        tries = job.tries - job.resent
        if not again or tries >= self._retry.tries:
            differs = self._router is not None and self._router.may_differ(queue.name, job.doubted, error)
            if differs and self._resend(job, queue, now):
                return
            self._give_up(job, error)
            return
        # A hedge that is still queued becomes the next try.
        wait_s = 0.0 if job.wanted else self._retry.wait_s(tries, error)
        if now + wait_s >= job.deadline:
            self._give_up(job, error, f"its deadline of {self._retry.deadline_s:g} s leaves no time for another")
            return
        job.again = True
        job.errors[-1] += f", {wait_s:.3g} s"
        if self._router is not None:
            job.avoids = self._router.avoiding(queue.name, job.avoids)
        if job.wanted:
            self._become_try(job)
        else:
            job.to(JobState.BACKOFF)
            job.timer = self._calls.loop.call_later(wait_s, self._queue_again, job)

    def _resend(self, job: ScoringJob, queue: EndpointQueue, now: float) -> bool:
        """Queues a job for another server; returns False if each had its call in this try, or the deadline passed."""
        assert self._router is not None
        others = len(self._router.names) - 1
        if job.resent >= others * (job.tries - job.resent) or now >= job.deadline:
            return False
        job.resent += 1
        self._router.counts["resent"] += 1
        job.avoids = self._router.avoiding(queue.name, job.avoids)
        if job.wanted:
            self._become_try(job)
        else:
            job.to(JobState.BACKOFF)
            self._queue_again(job)
        return True

    def _become_try(self, job: ScoringJob) -> None:
        """Makes a hedge that is still queued the next call of a job; it may avoid other servers now."""
        job.to(JobState.QUEUED)
        self._watch_deadline(job)
        if self._router is not None:
            self._limiter.push(job)

    def _queue_again(self, job: ScoringJob) -> None:
        self._watch_deadline(job)
        self.score(job)
        self._limiter.fill()

    def _watch_deadline(self, job: ScoringJob) -> None:
        """Ends a queued try when the job's deadline passes."""
        job.timer = None
        if job.deadline < math.inf:
            job.timer = self._calls.loop.call_at(job.deadline, self._calls.guarded, self._on_deadline, job)

    def _stop_timer(self, job: ScoringJob) -> None:
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None

    def _on_deadline(self, job: ScoringJob) -> None:
        assert job.error is not None
        why = f"its deadline of {self._retry.deadline_s:g} s passed while it was queued for another"
        self._give_up(job, job.error, why)

    def _queue_hedge(self, job: ScoringJob) -> None:
        job.timer = None
        if job.state is JobState.RUNNING:
            job.to(JobState.HEDGING)
            if self._router is not None:
                job.avoids = self._router.avoiding(job.server, job.avoids)
            self._limiter.push(job)
            self._limiter.fill()

    def _give_up(self, job: ScoringJob, error: BaseException, why: str = "") -> None:
        self._finish(job, Failed(self._message(job, error, why), error))

    def _message(self, job: ScoringJob, error: BaseException, why: str) -> str:
        """Returns what happened and how to fix it."""
        name = f"'{name_of(self._function)}'"
        verb = f"returned {error}" if isinstance(error, BadScore) else what_happened(error)
        reasons = [each.partition(",")[0] for each in job.errors]
        if job.tries > 1 and len(set(reasons)) > 1:
            verb = f"failed on each of {job.tries} tries: {', '.join(reasons)}; it {verb}"
        elif job.tries > 1:
            verb += f" on each of {job.tries} tries"
        if job.tries > 1 or isinstance(error, TimeoutError):
            verb += f" (last: {job.last_s:.1f} s)"
        return f"{name} {verb}{'; ' + why if why else ''}; {fix_of(error)}."


def _brief(error: BaseException) -> str:
    if is_timeout(error):
        return "time-out"
    names = [f"HTTP {status_of(one)}" if status_of(one) is not None else type(one).__name__ for one in parts_of(error)]
    return " and ".join(dict.fromkeys(names))
