"""RewardAgent: sends every response to the reward function, and returns whole groups as they finish.

A request is one coroutine, :meth:`RewardAgent._run_job`, whose body is its whole life: wait for a slot, call with a
time-out, decide about another try, end. Equal requests may share one, and an answer in the ledger needs none. All runs
on one event loop without polling. Every request ends in exactly one of scored, failed (and handled by the declared
rule) or cancelled; none is lost, and no score silently becomes zero.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from loguru import logger

from dataflow.batch import Batch
from dataflow.errors import ConfigError, DataflowError
from dataflow.rewards.failure import parse_rule
from dataflow.rewards.functions import check_methods, load_reward
from dataflow.rewards.ledger import Answer, Ledger, key_of
from dataflow.rewards.naming import MAIN, metric
from dataflow.rewards.results import read_number, read_result, read_scores, tokens_used
from dataflow.rewards.retry import Hedge, Retry, brief, is_overload, is_throttle, is_timeout, retry_after_s
from dataflow.rewards.slots import Item, Limits, Slot, Slots
from dataflow.rewards.steps import (
    BESIDE,
    ENDED,
    GroupFilter,
    Job,
    Order,
    Request,
    Step,
    StepRequests,
    Steps,
    Ticket,
    latency_summary,
)
from dataflow.system import clock
from dataflow.system.frozen import FrozenExit
from dataflow.system.secrets import redact_known
from dataflow.usercode.calls import Calls
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import TimedOut, message_of
from dataflow.usercode.load import describe, fix_of, name_of, raised, what_happened

__all__ = ["BESIDE", "MAIN", "GroupFilter", "Limits", "Retry", "RewardAgent", "Ticket", "latency_summary",
           "load_reward", "metric"]  # fmt: skip

_COUNTS = ("requested", "scored", "failed", "cancelled", "cached", "shared", "retried", "hedged", *ENDED)
_NO_SUMS = frozenset((*_COUNTS, "waiting", "running", "peak", "abandoned", "steps", "limit", "latency_s"))
"""Stats that are no running totals, or that a step's own summary reports."""
_COLUMNS = ("data_source", "response_text", "ground_truth")
_OPTIONAL = ("extra_info", "raw_prompt", "finish_reason", "response_mask")
_ADMITTED = 64
"""Rows for which jobs are made before the event loop runs something else."""
_LATEST = 10_000
"""Latencies of which the stats tell percentiles."""
_CLOSE_S, _CLOSE_REWARD_S = 3.0, 10.0


Scored = tuple[float, dict[str, Any]]
"""The score and the further columns that a call returned."""


class BadScore(ValueError):
    """The value that a reward function returned is not a score."""

    fix = "return a finite number, (score, query, explanation) or a dict with 'score'"


class RewardAgent:
    """Scores the responses of several steps at once, never mixing them.

    Args:
        compute_score: a function, sync or async, called with verl's keywords ``data_source``, ``solution_str``,
            ``ground_truth`` and ``extra_info`` (a dict, to which ``raw_prompt``, ``response_length`` and
            ``finish_reason`` are added where the samples have them); or an object with such a method and optionally
            ``compute_group`` or ``post_process_scores``, ``log``, ``close``, ``usage``, ``retry_on`` and ``tokens``
            (docs/rewards.md). It returns a finite number, a tuple (score, query, explanation), or a dict with ``score``
            and further columns. Sync functions run in threads.
        limits: calls in flight, requests and tokens a minute.
        retry: time-outs and tries.
        hedge_after: a second call is sent for a first one that takes longer than this: a percentile of the latencies
            (``"p95"``) or seconds.
        on_failure: what happens to a sample without a score, see :class:`~dataflow.rewards.failure.FailureRule`.
        max_failed_share: the run stops when more than this share of its latest requests has failed, see
            :class:`~dataflow.rewards.failure.FailedShare`.
        max_abandoned: number of abandoned calls that may still be running; None for as many as there are slots.
        ledger: where requests and answers are recorded.
        share_equal: whether requests in flight with the same prompt and response share one call.
        scorer: identifies what scores (its file, the judge's prompt); answers in the ledger by another one are not
            used.
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
        ledger: Ledger | None = None,
        share_equal: bool = False,
        scorer: str = "",
        frozen_exit: FrozenExit | None = None,
        name: str = MAIN,
    ) -> None:
        self.name, self._reward = name, compute_score
        self.limits, self.retry, self.ledger = limits or Limits(), retry or Retry(), ledger
        self._function = getattr(compute_score, "compute_score", compute_score)
        if isinstance(compute_score, type) or not callable(self._function):
            raise ConfigError(f"compute_score={compute_score!r}; give a function or an object with compute_score.")
        check_methods(compute_score)
        if self.retry.predicate is None and callable(predicate := getattr(compute_score, "retry_on", None)):
            self.retry = replace(self.retry, predicate=predicate)
        self._compares = getattr(compute_score, "compute_group", None) is not None
        method = "compute_group" if self._compares else "post_process_scores"
        self._group_method: Callable[..., Any] | None = getattr(compute_score, method, None)
        wants_ids = getattr(compute_score, "wants_response_ids", False)
        self._optional = (*_OPTIONAL, "responses") if wants_ids else _OPTIONAL
        self._log = getattr(compute_score, "log", None)
        self._tokens = getattr(compute_score, "tokens", None) if self.limits.tpm is not None else None
        self._max_abandoned = self.limits.concurrency if max_abandoned is None else max_abandoned
        self._share_equal, self._scorer = share_equal, scorer
        self._hedge, self._frozen_exit, self._watched = Hedge(hedge_after), frozen_exit, False
        self.steps = Steps(parse_rule(on_failure), max_failed_share, self._on_cancel, name)
        self._counts: Counter[str] = self.steps.counts
        self._latency_s: deque[float] = deque(maxlen=_LATEST)
        self._by_key: dict[bytes, Job] = {}
        self._sequence, self._ended = 0, False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._log_failed = False
        self._reported: dict[str, float] = {}
        self._calls, self._slots = Calls(self._on_abandoned), Slots(self.limits)

    # --- what stages call ---------------------------------------------------------------------------------------

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
            samples: columns ``data_source``, ``ground_truth`` and ``response_text``; optionally ``extra_info``,
                ``raw_prompt`` and ``finish_reason``.
            extra_groups: groups beyond those that will be collected; the rest of them is cancelled at the end.
            more: further chunks of the step may follow, as from a streaming rollout, each with the same
                ``extra_groups`` and ``more``; the last :meth:`collect` has ``last``.
            group_filter: which finished groups are left out, for extra ones to take their place.

        Raises:
            DataflowError: a step submitted before, no rows, a group twice, a missing column, a closed agent, no event
                loop.
            RewardFailed: the agent has stopped, for too many failures or a budget that is spent; or the step has
                failed since its first chunk was submitted.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError as error:
            raise DataflowError(
                f"reward agent: step {step} was submitted outside an event loop; submit it in the coroutine that "
                "collects."
            ) from error
        columns = [*_COLUMNS, *(name for name in self._optional if name in samples)]
        # Unread: the first requests need not wait for the columns of all.
        read = samples.only(*columns)
        if self._frozen_exit is not None and not self._watched:
            self._frozen_exit.start()
            self._watched = True
        state, requests, ticket = self.steps.add(step, samples, extra_groups, more, group_filter)
        self._spawn(self._admit(state, requests, read, clock.now()))
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
        batch = await self.steps.collect(step, k, order, last, groups)
        batch.meta["limits"] = self._slots.take_changes()
        if self._log is not None:
            self._spawn(self._call_log(self._log, batch))
        return batch

    async def settled(self, step: Step) -> None:
        """Waits until all requests of a step have ended, and what is made of whole groups; collects nothing."""
        await self.steps.settled(step)

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
        return {
            **{name: self._counts[name] for name in _COUNTS},
            "steps": len(self.steps.live),
            "waiting": self.steps.waiting(),
            "running": self._slots.running,
            "peak": self._slots.peak,
            "abandoned": self._calls.abandoned,
            "limit": int(self._slots.limit),
            "rate_limit_wait_s": self._slots.waited_s,
            "tokens": self._counts["tokens"],
            **self._usage(),
            "latency_s": latency_summary(self._latency_s),
        }

    def _usage(self) -> dict[str, float]:
        usage = getattr(self._reward, "usage", None)
        if not callable(usage):
            return {}
        try:
            return {name: read_number(value) for name, value in usage().items()}
        except Exception as error:
            what = f"reward agent: '{name_of(usage)}' {what_happened(error)}"
            raise DataflowError(f"{what}; return finite numbers by name.") from error

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
        if self._tasks:  # all but calls of the user's log have been cancelled
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        for task in self._tasks:
            task.cancel()
        self._slots.close()
        await self._calls.close()
        self._ended = True
        try:
            if self.ledger is not None:
                await asyncio.to_thread(self.ledger.close)
        finally:  # a ledger that cannot be written must not leave the user's connections open
            try:
                await self._close_reward()
            finally:
                if self._frozen_exit is not None and self._watched:
                    self._frozen_exit.close()

    async def _close_reward(self) -> None:
        close = getattr(self._reward, "close", None)
        limit = asyncio.timeout(_CLOSE_REWARD_S)
        try:
            if callable(close) and inspect.isawaitable(ending := close()):
                async with limit:
                    await ending
        except DataflowError:
            raise
        except Exception as error:
            if not (isinstance(error, TimeoutError) and limit.expired()):
                raise DataflowError(raised("reward agent", close, error)) from error
            logger.warning("reward agent: '{}' has not closed within {:g} s.", name_of(self._reward), _CLOSE_REWARD_S)

    # --- the life of a request ----------------------------------------------------------------------------------

    async def _admit(self, state: StepRequests, requests: Sequence[Request], samples: Batch, submitted: float) -> None:
        """Starts the life of each request, or ends it with the answer that the ledger has.

        A few rows at a time, so that a large step does not block calls in flight.
        """
        for begin in range(0, len(requests), _ADMITTED):
            if state.over:
                return
            rows = requests[begin : begin + _ADMITTED]
            try:
                keywords = arguments_of(samples.rows(np.arange(begin, begin + len(rows))))
                self._admit_rows(state, rows, keywords, submitted)
            except Exception as error:  # reading a request may run the user's code
                why = describe(error).rstrip(".")
                self.steps.fail(state, f"reward agent: step {state.key} cannot be sent: {why}.", error)
            await asyncio.sleep(0)

    def _admit_rows(
        self, state: StepRequests, requests: Sequence[Request], keywords: list[dict[str, Any]], submitted: float
    ) -> None:
        keyed = self.ledger is not None or self._share_equal
        keys = [key_of(own, self._scorer) if keyed else b"" for own in keywords]
        rows = [(request.group, request.sample, key) for request, key in zip(requests, keys, strict=True)]
        known = {} if self.ledger is None else self.ledger.submitted(state.key, rows)
        for request, own, key in zip(requests, keywords, keys, strict=True):
            if self._compares:
                request.arguments = own
            if not request.open:
                continue  # its group was dropped meanwhile, or its step has failed
            if (answer := known.get((request.group, request.sample))) is not None:
                self._counts["cached"] += 1
                request.begin = request.end = clock.now()
                request.source = "ledger"
                # Samples with the same key have the same answer, each with columns of its own.
                self._scored(request, answer.score, own_copy(answer.extras))
            else:
                self._start(state, request, own, key, submitted)

    def _start(
        self, state: StepRequests, request: Request, keywords: dict[str, Any], key: bytes, submitted: float
    ) -> None:
        """Starts a job for a request, or adds the request to the one in flight for an equal one."""
        self._sequence += 1
        priority = (*state.priority, self._sequence)
        job = self._by_key.get(key) if self._share_equal else None
        if job is not None:
            self._counts["shared"] += 1
            request.source, request.job = "shared", job
            job.requests.append(request)
            if state.priority < job.priority[:2]:  # a job has the priority of the earliest step that needs it
                job.priority = priority
                self._slots.promote(job)
            return
        job = request.job = Job(priority, submitted, arguments=keywords, key=key, requests=[request])
        if self._tokens is not None:
            job.tokens = int(estimate := read_number(self._tokens(**own_copy(keywords))))
            if estimate < 0:
                raise ValueError(f"'{name_of(self._tokens)}' returned {estimate:g}; return a number of 0 or more")
        if self._share_equal:
            self._by_key[key] = job
        job.task = self._spawn(self._run_job(job))

    async def _run_job(self, job: Job) -> None:
        """The life of a request, from its wait for a first slot to its end: this is all that happens to it.

        A failed try is followed by another one while the error is transient (:func:`is_transient`, or the user's
        ``retry_on``), tries are left, and the deadline allows it. Calls that the service refused for its rate use up no
        tries. One that answers 429 with a Retry-After gets no new request until that, or a deadline, is over
        (:meth:`_call`); this one waits for it and a random backoff.
        """
        error: Exception | None = None
        deadline, used = f"its deadline of {self.retry.deadline_s or 0:g} s", 0
        while True:
            slot = await self._slot(job)
            if slot is None:
                assert error is not None
                why = f"{deadline} passed while it was queued for another"
                break
            answer = await self._try(job, slot)
            if not isinstance(answer, Exception):
                self._finish_job(job, answer)
                return
            over = isinstance(answer, TimedOut) and self._now() >= job.deadline
            if over and error is not None and is_throttle(error):  # which says what to do
                why = f"{deadline} passed during the last"
                break
            error, why = answer, ""
            # A refusal by rate uses up no try while a deadline bounds it: a service may refuse all for a minute.
            used += self.retry.deadline_s is None or not is_throttle(error)
            if getattr(error, "fatal", None) is True or used >= self.retry.tries:
                break
            try:
                if not self.retry.again(error):
                    break
            except Exception as own:
                error, why = own, f"the predicate for retries raised {describe(own)}"
                break
            wait_s = self.retry.wait_s(job.tries, error)
            if self._now() + wait_s >= job.deadline:
                why = f"{deadline} leaves no time for another"
                break
            job.errors[-1] += f", {wait_s:.3g} s"
            await asyncio.sleep(wait_s)
        self._fail_job(job, error, why)

    async def _slot(self, job: Job) -> Slot | None:
        """Waits for a slot; returns None if the deadline of the job passes before it has one."""
        try:
            async with asyncio.timeout_at(None if job.deadline == math.inf else job.deadline):
                return await self._slots.acquire(job)
        except TimeoutError:
            return None

    async def _try(self, job: Job, slot: Slot) -> Scored | Exception:
        """Returns the answer of one try, or its error. A call that takes long gets a second one beside it: a hedge."""
        begun = clock.now()
        if not job.tries:
            job.begin, job.first_held_by = begun, job.held_by
            if self.retry.deadline_s is not None:
                job.deadline = self._now() + self.retry.deadline_s
        job.tries += 1
        self._counts["retried"] += job.tries > 1
        after_s = self._hedge.after_s
        first = self._call(job, slot)
        answer = await (first if after_s is None else self._hedged(job, first, after_s))
        if not isinstance(answer, Exception):
            # Also if the second call was faster: a percentile of the winners alone would keep falling.
            self._hedge.answered(clock.now() - begun)
        return answer

    async def _hedged(
        self, job: Job, first: Coroutine[Any, Any, Scored | Exception], after_s: float
    ) -> Scored | Exception:
        """Returns the first answer of two calls, the second of which begins after some seconds; or the last error."""
        own: asyncio.Future[Scored | Exception | None] = asyncio.ensure_future(first)
        calls, last = {own}, None
        try:
            if not (await asyncio.wait(calls, timeout=after_s))[0]:
                calls.add(asyncio.ensure_future(self._second(job)))
            while calls:
                done, calls = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    answer = call.result()
                    if isinstance(answer, tuple):
                        job.source = "" if call is own else "hedged"
                        return answer
                    last = answer or last
                if not job.running:
                    break  # a second call that still waits for a slot is not sent
        finally:
            for call in calls:
                call.cancel()
        assert last is not None
        return last

    async def _second(self, job: Job) -> Scored | Exception | None:
        slot = await self._slot(job)
        if slot is None:
            return None
        if not job.running:  # the first has ended meanwhile
            self._slots.give_back(slot)
            return None
        self._counts["hedged"] += 1
        return await self._call(job, slot)

    async def _call(self, job: Job, slot: Slot) -> Scored | Exception:
        """Calls the user's function in a slot, which is free when its code has ended or is abandoned."""

        def free(result: Any, error: BaseException | None) -> None:
            if job.cancelled is not None and error is None:
                self._keep(job, job.cancelled, result)
            overloaded = error is not None and is_overload(error)
            if error is not None and overloaded and (pause_s := retry_after_s(error)):
                # Before the slot is free, which would start the next request. And no longer than a deadline, so that
                # queued requests try once and fail by theirs, instead of waiting out the pause.
                self._slots.pause(min(pause_s, self.retry.deadline_s or math.inf))
            self._slots.release(slot, overloaded, error is not None, tokens_used(result))

        left_s = max(0.0, job.deadline - self._now())
        timeout_s = min(left_s, self.retry.timeout_s or math.inf)
        begun = clock.now()
        job.running += 1
        try:
            # A copy: a try must not see what an earlier one, or another sample's, changed.
            given = own_copy(job.arguments)
            result = await self._calls.run(self._function, given, None if timeout_s == math.inf else timeout_s, free)
            try:
                return _read(result)
            except Exception as bad:  # reading it may run the user's code: a tensor's, a mapping's
                raise BadScore(message_of(bad)) from bad
        except Exception as error:
            job.errors.append(brief(error))
            for way, is_so in zip(ENDED, (is_throttle(error), is_timeout(error)), strict=True):
                self._counts[way] += is_so
                job.ended[way] += is_so
            job.last_s = clock.now() - begun
            return error
        finally:
            job.running -= 1

    def _keep(self, job: Job, request: Request, result: Any) -> None:
        """Stores the answer to a request that was cancelled meanwhile: it is paid for, and a resumed run may use it."""
        if self.ledger is None or self._ended:
            return
        try:
            score, extras = _read(result)
        except ValueError:
            return  # no answer
        answer = Answer(score, extras, clock.now() - job.begin, job.tries)
        self.ledger.answered(request.step.key, request.group, request.sample, job.key, answer)

    def _finish_job(self, job: Job, scored: Scored) -> None:
        """Ends each request of a job with its score: writes it to the ledger, and gives it to its step."""
        score, extras = scored
        requests, end = self._take_requests(job), clock.now()
        self._latency_s.append(end - job.begin)
        self._counts["tokens"] += tokens_used(extras) or 0
        for request in requests:
            self._ends(request, job, end)
            if self.ledger is not None:
                answer = Answer(score, extras, end - job.begin, request.tries)
                where = request.step.key, request.group, request.sample, job.key
                self.ledger.answered(*where, answer, "; ".join(job.errors))
            if request.open:
                self._scored(request, score, extras if len(requests) == 1 else own_copy(extras))

    def _fail_job(self, job: Job, error: Exception, why: str) -> None:
        """Ends each request of a job without a score: with what happened and how to fix it."""
        name = f"'{name_of(self._function)}'"
        verb = f"returned {error}" if isinstance(error, BadScore) else what_happened(error)
        reasons = Counter(each.partition(",")[0] for each in job.errors)
        if job.tries > 1 and len(reasons) > 1:
            told = ", ".join(reason if times == 1 else f"{reason} ({times} times)" for reason, times in reasons.items())
            verb = f"failed on each of {job.tries} tries: {told}; it {verb}"
        elif job.tries > 1:
            verb += f" on each of {job.tries} tries"
        if job.tries > 1 or isinstance(error, TimeoutError):
            verb += f" (last: {job.last_s:.1f} s)"
        message, end = f"{name} {verb}{'; ' + why if why else ''}; {fix_of(error)}.", clock.now()
        for request in self._take_requests(job):
            self._ends(request, job, end)
            state = request.step
            if self.ledger is not None:
                where = state.key, request.group, request.sample, job.key
                self.ledger.failed(*where, message, "; ".join(job.errors))
            if request.open:
                if self.steps.failed(request, message, error):
                    self._whole(state, request.group)
                self.steps.check_failed_share(state, error)

    def _ends(self, request: Request, job: Job, end: float) -> None:
        request.begin = request.end = end
        if request.source != "shared":  # which used no time of the service
            request.begin, request.tries, request.notes, request.source = job.begin, job.tries, job.notes, job.source

    def _scored(self, request: Request, score: float, extras: dict[str, Any]) -> None:
        if self.steps.scored(request, score, extras):
            self._whole(request.step, request.group)

    def _whole(self, state: StepRequests, group: int) -> None:
        """Passes on a group whose last request has ended."""
        if self._group_method is not None and any(request.kept for request in state.groups[group]):
            state.post_processing.append(self._spawn(self._post_process_group(state, group)))
        else:
            self.steps.arrive(state, group)

    async def _post_process_group(self, state: StepRequests, group: int) -> None:
        """Replaces the scores of a whole group by what the user's method returns for them, and passes the group on."""
        function = self._group_method
        assert function is not None
        slot = await self._slots.acquire(Item((*state.priority, 0), clock.now()), local=True)
        kept = [request for request in state.groups[group] if request.kept]
        given: list[Any] = [[request.score for request in kept]]
        if self._compares:
            given.insert(0, [own_copy(dict(request.arguments or {})) for request in kept])
        where = f"group {group} of step {state.key}"
        try:
            call, free = partial(function, *given), lambda _result, _error: self._slots.release(slot)
            result = await self._calls.run(call, {}, self.retry.timeout_s, free)
        except Exception as error:
            self.steps.fail(state, raised(where, function, error), error)
            return
        try:
            scores = read_scores(result, len(kept))
        except Exception as error:
            what, fix = message_of(error), f"return a list of {len(kept)} finite numbers"
            self.steps.fail(state, f"{where}: '{name_of(function)}' returned {what}; {fix}.", error)
            return
        for request, score in zip(kept, scores, strict=True):
            request.score = score
        self.steps.arrive(state, group)

    def _on_cancel(self, request: Request) -> None:
        """Cancels the job of a request, unless other requests share it."""
        job, request.job = request.job, None
        if job is None:
            return
        job.requests.remove(request)
        if job.requests:
            if request.source != "shared":  # the next one's is the call now
                job.requests[0].source = ""
            return
        self._take_requests(job)
        job.cancelled = request
        if job.task is not None:
            job.task.cancel()

    def _take_requests(self, job: Job) -> list[Request]:
        requests, job.requests = job.requests, []
        if self._by_key.get(job.key) is job:
            del self._by_key[job.key]
        for request in requests:
            request.job = None
        return requests

    # --- the event loop -----------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine as a task of the agent; an error of it, which is the agent's own, ends all steps."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.steps.on_bug(error)

    def _on_abandoned(self, count: int) -> None:
        if count > self._max_abandoned and not self.steps.closed:
            name, limit = name_of(self._function), f"more than reward.max_abandoned={self._max_abandoned} allows"
            fix = "give its own requests a time-out, or raise reward.timeout"
            self.steps.halt(f"{count} calls of '{name}' keep running after their time is over, {limit}; {fix}.", None)

    async def _call_log(self, log: Callable[..., Any], rewards: Batch) -> None:
        """Calls the user's ``log`` with collected rewards; its first error is logged, and none ends the run."""
        records, columns = rewards.meta["records"], rewards.columns
        keywords = {
            "timestamps": [record["begin"] for record in records],
            "queries": own_copy(list(columns.get("query", [None] * len(records)))),
            "results": rewards["score"].tolist(),
            "latencies": [record["end"] - record["begin"] for record in records],
            "group_uids": rewards.groups.tolist(),
        }
        try:
            # Without a time-out: it delays nothing, and an abandoned call would count as one of the function.
            await self._calls.run(log, keywords)
        except Exception as error:
            if not self._log_failed:
                logger.warning("reward log: '{}' raised {}; the run continues.", name_of(log), describe(error))
            self._log_failed = True


def _read(result: Any) -> Scored:
    score, extras = read_result(result)
    # These columns hold texts of servers, and are kept and shown.
    return score, redact_known(extras) if extras else extras


def arguments_of(samples: Batch) -> list[dict[str, Any]]:
    """Returns the keywords of the call for each row, under verl's names.

    If the samples have a column ``responses``, tokens ``[rows, R]``, their ids are added.
    """
    ends = own = None
    if "response_mask" in samples:
        own = samples.nonzero("response_mask").tolist()
        # Tokens inside a response may be masked out of the loss (a tool's).
        backwards = samples["response_mask"].cpu().numpy()[:, ::-1].astype(bool)
        ends = np.where(backwards.any(axis=1), backwards.shape[1] - backwards.argmax(axis=1), 0)
    texts, sources, truths = samples["response_text"], samples["data_source"], samples["ground_truth"]
    names = ("extra_info", "raw_prompt", "finish_reason", "responses")
    extras, prompts, finishes, ids = (samples[name] if name in samples else None for name in names)  # noqa: SIM401
    found = []
    for row, text in enumerate(texts):
        extra = dict((None if extras is None else extras[row]) or {})
        if prompts is not None and prompts[row] is not None:
            extra["raw_prompt"] = prompts[row]
        if finishes is not None:
            extra["finish_reason"] = finishes[row]
        if own is not None:
            extra["response_length"] = own[row]
        if ids is not None:
            extra["response_ids"] = ids[row][: None if ends is None else ends[row]].tolist()
        given = {"data_source": sources[row], "solution_str": text, "ground_truth": truths[row]}
        found.append({**given, "extra_info": extra})
    return found
