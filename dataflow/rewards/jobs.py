"""From samples to scoring jobs, and from a job's outcome back to its requests.

Jobs are made for a few rows at a time, so that a large step does not block calls in flight; and not for more rows than
can start soon, so that the first calls of a large step do not compete with the decoding of its last responses. Answers
in the ledger are not requested again; with ``share_equal``, requests in flight with the same prompt and response share
one job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from loguru import logger

from dataflow.batch import Batch
from dataflow.errors import RewardFailed
from dataflow.rewards.decode import Decode
from dataflow.rewards.ledger import Answer, Ledger, key_of
from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.router import router_of
from dataflow.rewards.records import Latencies
from dataflow.rewards.requests import Failed, Outcome, Request, Scored, ScoringJob, StepRequests
from dataflow.rewards.results import read_amount, tokens_used
from dataflow.system import clock
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import attempt, message_of
from dataflow.usercode.load import name_of, raised

_ADMITTED = 64  # rows admitted before the event loop runs something else
_AHEAD = 4 * _ADMITTED  # queued jobs of a step from which on no further rows are admitted

Keywords = tuple[dict[str, Any], bytes | None]
"""Arguments of a call, and their key."""


class Jobs:
    """The scoring jobs of an agent.

    Args:
        reward: the user's reward object, which may have methods ``endpoint`` and ``tokens``.
        limits: they decide which of these methods are called.
        ledger: where requests and answers are recorded, if anywhere.
        share_equal: whether equal requests in flight share a job.
        scorer: identifies how samples are scored, as a part of their keys.
        counts: of the agent; ``cached``, ``shared`` and ``tokens`` are counted here.
    """

    def __init__(
        self,
        reward: Any,
        limits: Limits,
        ledger: Ledger | None,
        share_equal: bool,
        scorer: str,
        counts: Counter[str],
    ) -> None:
        self._router = router_of(reward)
        named = limits.endpoints and self._router is None
        self._endpoint = getattr(reward, "endpoint", None) if named else None
        rated = any(each.tpm is not None for each in (limits, *limits.endpoints.values()))
        self._tokens = getattr(reward, "tokens", None) if rated else None
        self._unmetered = rated and self._tokens is None
        # With keys or endpoints all rows are admitted at once: equal rows must be found, and no queue may run empty
        # behind another.
        together = ledger is not None or share_equal or self._endpoint is not None
        self._ahead = math.inf if together else _AHEAD
        self._reward = reward
        self._compares = callable(getattr(reward, "compute_group", None))
        self._ledger = ledger
        self._share_equal = share_equal
        self._scorer = scorer
        self._counts = counts
        self._by_key: dict[bytes, ScoringJob] = {}
        self._sequence = 0
        self.latency_s = Latencies()

    def may_admit(self, state: StepRequests) -> bool:
        """Whether further rows of the step should be admitted now."""
        return bool(state.unadmitted) and state.queued_jobs < self._ahead

    def admit(self, state: StepRequests) -> Iterator[tuple[Request, Outcome | ScoringJob]]:
        """Admits the next rows of a step.

        Yields:
            A request with its outcome, where that is known already, or with a job that is to be queued: a new one, or
            one that the request gave a better priority.
        """
        rows = state.unadmitted[0]
        begin, rows.admitted = rows.admitted, min(rows.admitted + _ADMITTED, len(rows.requests))
        if rows.admitted == len(rows.requests):
            state.unadmitted.popleft()
        arguments = rows.arguments(begin, rows.admitted)
        for request, keywords, answer in self._look_up(state, rows.requests[begin : rows.admitted], arguments):
            if not request.open:
                continue  # its group was dropped meanwhile
            if self._compares:
                request.arguments = keywords[0]
            if answer is not None:
                self._counts["cached"] += 1
                request.begin = request.end = clock.now()
                # Samples with the same key have the same answer, each with columns of its own.
                yield request, Scored(answer.score, own_copy(answer.extras), "ledger")
            elif (job := self._job(state, request, rows.begin, *keywords)) is not None:
                yield request, job

    def _look_up(
        self, state: StepRequests, requests: list[Request], arguments: list[dict[str, Any]]
    ) -> list[tuple[Request, Keywords, Answer | None]]:
        """Returns each request with its arguments, its key, and its answer in the ledger."""
        if self._ledger is None and not self._share_equal:
            return [(request, (keywords, None), None) for request, keywords in zip(requests, arguments, strict=True)]
        keys = [key_of(keywords, self._scorer) for keywords in arguments]
        rows = [(request.group, request.sample, key) for request, key in zip(requests, keys, strict=True)]
        known = {} if self._ledger is None else self._ledger.submitted(state.key, rows)
        return [
            (request, (keywords, key), known.get((request.group, request.sample)))
            for request, keywords, key in zip(requests, arguments, keys, strict=True)
        ]

    def _job(
        self, state: StepRequests, request: Request, begin: float, arguments: dict[str, Any], key: bytes | None
    ) -> ScoringJob | None:
        """Returns the request's job if it is to be queued; None if it shares one that keeps its priority."""
        shared = key if self._share_equal else None
        job = None if shared is None else self._by_key.get(shared)
        if job is not None:
            self._counts["shared"] += 1
            request.source, request.job = "shared", job
            job.requests.append(request)
            if state.priority >= job.priority[:2]:
                return None
            # A job has the priority of the earliest step that needs it.
            job.priority = self._priority(state)
            return job
        job = ScoringJob(arguments, key, self._priority(state), [request])
        if self._endpoint is not None or self._tokens is not None:
            self._measure(job)
        if self._router is not None:
            job.prefers = self._router.prefers(job.arguments)
        if shared is not None:
            self._by_key[shared] = job
        request.job = job
        job.queued_at = begin
        state.queued_jobs += 1
        return job

    def _priority(self, state: StepRequests) -> tuple[int, int, int]:
        self._sequence += 1
        return (*state.priority, self._sequence)

    def _measure(self, job: ScoringJob) -> None:
        """Calls the user's ``endpoint`` and ``tokens`` for a job."""
        if self._endpoint is not None:
            job.endpoint = _result_of(self._endpoint, job.arguments)
        if self._tokens is not None:
            job.tokens = _estimate(self._tokens, job.arguments)

    def end(self, job: ScoringJob, outcome: Outcome) -> Iterator[tuple[Request, Outcome]]:
        """Records the outcome of a job, and yields each of its requests with the outcome of that."""
        requests, end = self._take_requests(job), clock.now()
        if isinstance(outcome, Scored):
            self.latency_s.append(end - job.begin)
            self._count_tokens(outcome.extras)
        alone, failed_tries = len(requests) == 1, "; ".join(job.errors)
        for request in requests:
            _stamp(request, job, end)
            if self._ledger is not None and job.key is not None:
                where = request.step.key, request.group, request.sample, job.key
                if isinstance(outcome, Failed):
                    self._ledger.failed(*where, outcome.message, failed_tries)
                else:
                    answer = Answer(outcome.score, outcome.extras, end - job.begin, job.tries - job.resent)
                    self._ledger.answered(*where, answer, failed_tries)
            if request.open:
                if isinstance(outcome, Scored) and not alone:
                    yield request, Scored(outcome.score, own_copy(outcome.extras), outcome.source)
                else:
                    yield request, outcome

    def _count_tokens(self, extras: dict[str, Any]) -> None:
        used = tokens_used(extras)
        self._counts["tokens"] += used or 0
        if self._unmetered:
            self._unmetered = False
            if used is None:
                logger.warning(
                    "reward.tpm limits nothing: '{}' has no method tokens, and its answers have no column 'tokens'.",
                    name_of(self._reward),
                )

    def detach(self, request: Request) -> ScoringJob | None:
        """Removes a request from its job; returns the job if no other request needs it."""
        job, request.job = request.job, None
        if job is None:
            return None
        job.requests.remove(request)
        if job.requests:
            return None
        self._take_requests(job)
        return job

    def _take_requests(self, job: ScoringJob) -> list[Request]:
        requests, job.requests = job.requests, []
        if job.key is not None and self._by_key.get(job.key) is job:
            del self._by_key[job.key]
        for request in requests:
            request.job = None
        return requests


class Arguments:
    """Builds the keyword arguments of each row's call, under verl's names, on demand.

    Args:
        samples: columns ``data_source``, ``ground_truth`` and ``response_text``, or in place of the last
            ``responses`` and ``response_mask``, token ids ``[rows, R]``; optionally ``extra_info``, ``raw_prompt``
            and ``finish_reason``.
        decode: converts token ids to texts.
        with_ids: adds ``response_ids``, a list of the response's token ids, to ``extra_info``.

    Raises:
        DataflowError: a column is missing.
    """

    def __init__(self, samples: Batch, decode: Decode | None, with_ids: bool = False) -> None:
        self._decode = decode if "response_text" not in samples else None
        self._text = "responses" if self._decode else "response_text"
        optional = ("extra_info", "raw_prompt", "finish_reason", "response_mask", "responses" if with_ids else "")
        names = dict.fromkeys(("data_source", "ground_truth", self._text))
        names |= dict.fromkeys(name for name in optional if name in samples)
        # Unread: the first requests need not wait for the columns of all.
        self._samples, self._with_ids = samples.only(*names), with_ids

    def rows(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Returns the keywords of the rows from begin to end."""
        some = self._samples.rows(np.arange(begin, end))
        ends = own = None
        if "response_mask" in some:
            ends, own = _ends(some["response_mask"]), some.nonzero("response_mask").tolist()
        texts = self._texts(some, ends)
        sources, truths = some["data_source"], some["ground_truth"]
        names = ("extra_info", "raw_prompt", "finish_reason", "responses" if self._with_ids else "")
        extras, prompts, finishes, ids = (some[n] if n in some else None for n in names)  # noqa: SIM401
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

    def _texts(self, some: Batch, ends: list[int] | None) -> list[str]:
        if self._decode is None:
            return list(some[self._text])
        ids = list(some[self._text].numpy())
        return self._decode(ids if ends is None else [row[:end] for row, end in zip(ids, ends, strict=True)])


def _ends(mask: Any) -> list[int]:
    """Returns where each response ends; tokens inside it may be masked out of the loss (a tool's)."""
    backwards = mask.cpu().numpy()[:, ::-1].astype(bool)
    last = mask.shape[-1] - backwards.argmax(axis=1)
    return np.where(backwards.any(axis=1), last, 0).tolist()  # type: ignore[no-any-return]


def _result_of(method: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Returns what the user's method returns for a request.

    Raises:
        RewardFailed: it raised an error.
    """
    result, error = attempt(method, **own_copy(arguments))
    if error is not None:
        raise RewardFailed(raised("before a request is sent", method, error).rstrip(".")) from error
    return result


def _estimate(method: Callable[..., Any], arguments: dict[str, Any]) -> int:
    """Returns the tokens that a request is expected to use."""
    amount, error = attempt(read_amount, _result_of(method, arguments))
    if error is not None:
        what = f"before a request is sent: '{name_of(method)}' returned {message_of(error)}"
        raise RewardFailed(f"{what}; return a number of 0 or more") from error
    return int(amount)


def _stamp(request: Request, job: ScoringJob, end: float) -> None:
    """Sets the times of a request; one that shared another's call used no time of the service."""
    request.end = end
    if request.source == "shared":
        request.begin, request.tries = end, 0
    else:
        request.begin, request.tries, request.notes = job.begin, job.tries - job.resent, job.notes
