"""Calls of the user's other methods: on whole groups ``compute_group``, ``post_process_scores`` and ``log``; ``usage``;
``close``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from loguru import logger

from dataflow.batch import Batch
from dataflow.errors import DataflowError
from dataflow.rewards.limits.queues import EndpointQueue, Limiter
from dataflow.rewards.requests import GroupJob, StepRequests
from dataflow.rewards.results import read_scores, read_usage
from dataflow.rewards.steps import Steps
from dataflow.usercode.calls import Call, Calls
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import UserExit, attempt, contained, message_of
from dataflow.usercode.load import describe, name_of, raised

_CLOSE_S = 10.0  # time limit of close
_LOGS = 8  # concurrent calls of the user's log


class GroupMethod(NamedTuple):
    """A method that replaces the scores of a group.

    Attributes:
        function: takes the scores of the group, or its samples and their scores; returns as many scores.
        takes_samples: whether it takes the samples as well, each as the keywords of ``compute_score``.
    """

    function: Callable[..., Any]
    takes_samples: bool


def group_method(reward: Any, post_process_scores: Callable[[list[float]], Any] | None) -> GroupMethod | None:
    """Returns the method that replaces the scores of a group: one that was given, else the reward's, if it has one."""
    found = post_process_scores or getattr(reward, "post_process_scores", None)
    if found is not None:
        return GroupMethod(found, False)
    compute = getattr(reward, "compute_group", None)
    return None if compute is None else GroupMethod(compute, True)


class GroupCalls:
    """Runs the user's ``compute_group`` or ``post_process_scores``, and ``log``.

    Args:
        post_process: the user's ``compute_group`` or ``post_process_scores``, if there is one.
        log: the user's ``log``, if there is one.
        calls: runs both.
        limiter: grants the slots of ``post_process``; its ``start`` callback must call :meth:`start`.
        timeout_s: of a call of ``post_process``; None for no limit.
        steps: gets the finished groups, and the failures of ``post_process``.
    """

    def __init__(
        self,
        post_process: GroupMethod | None,
        log: Callable[..., Any] | None,
        calls: Calls,
        limiter: Limiter,
        timeout_s: float | None,
        steps: Steps,
    ) -> None:
        self._post_process = post_process
        self._log = log
        self._log_failed = False
        self._logging = 0
        self._calls = calls
        self._limiter = limiter
        self._timeout_s = timeout_s
        self._steps = steps

    def finish(self, state: StepRequests, group: int) -> None:
        """Queues a group whose samples have their scores for post-processing; without any it arrives at once."""
        if self._post_process is not None and any(request.kept for request in state.groups[group]):
            # It needs a slot, and has priority over the other jobs of its step.
            self._limiter.push_local(GroupJob(state, group, (*state.priority, 0)))
            self._limiter.fill()
        else:
            self._steps.arrive(state, group)

    def start(self, job: GroupJob, queue: EndpointQueue) -> None:
        """Starts the call for a group whose slot is taken."""
        assert self._post_process is not None
        state, group = job.step, job.group
        kept = [request for request in state.groups[group] if request.kept]
        given: list[Any] = [[request.score for request in kept]]
        if self._post_process.takes_samples:
            given.insert(0, [own_copy(dict(request.arguments or {})) for request in kept])
        self._calls.start(
            partial(self._post_process.function, *given),
            {},
            on_done=partial(self._on_post_processed, job),
            on_freed=lambda call: self._limiter.release(queue, call.begin),
            timeout_s=self._timeout_s,
        )

    def _on_post_processed(self, job: GroupJob, call: Call) -> None:
        state, group = job.step, job.group
        if state.over:
            return
        requests = [request for request in state.groups[group] if request.kept]
        assert self._post_process is not None
        where, function = f"group {group} of step {state.key}", self._post_process.function
        if call.error is not None:
            self._steps.fail(state, raised(where, function, call.error), call.error)
            return
        scores, error = attempt(read_scores, call.result, len(requests))  # it may be of the user's own class
        if error is not None:
            fix = f"return a list of {len(requests)} finite numbers"
            self._steps.fail(state, f"{where}: '{name_of(function)}' returned {message_of(error)}; {fix}.", error)
            return
        for request, score in zip(requests, scores, strict=True):
            request.score = score
        self._steps.arrive(state, group)

    def log(self, rewards: Batch) -> None:
        """Calls the user's ``log`` with collected rewards; its first error is logged, and none ends the run."""
        if self._log is None:
            return
        if self._logging >= _LOGS:
            self._warn(f"has not returned from {_LOGS} calls, so that it is left out of further ones")
            return
        self._logging += 1
        records, columns = rewards.meta["records"], rewards.columns
        self._calls.start(
            self._log,
            {
                "timestamps": [record["begin"] for record in records],
                "queries": own_copy(list(columns.get("query", [None] * len(records)))),
                "results": rewards["score"].tolist(),
                "latencies": [record["end"] - record["begin"] for record in records],
                "group_uids": rewards.groups.tolist(),
            },
            on_done=self._on_logged,
            # Without a time-out: it delays nothing, and an abandoned call would count as one of the scoring function.
            on_freed=self._on_log_freed,
        )

    def _on_log_freed(self, _call: Call) -> None:
        self._logging -= 1

    def _on_logged(self, call: Call) -> None:
        if call.error is not None:
            self._warn(f"raised {describe(call.error)}")

    def _warn(self, what: str) -> None:
        if not self._log_failed:
            self._log_failed = True
            logger.warning("reward log: '{}' {}; the run continues.", name_of(self._log), what)


def usage_of(reward: Any, tokens: int) -> Mapping[str, float]:
    """Returns what the calls have used: the tokens of the answers, and what the user's ``usage`` says.

    Args:
        reward: what scores.
        tokens: of the answers; ``usage`` may give another number.

    Raises:
        DataflowError: it raised an error, or returned something else than finite numbers.
    """
    usage = getattr(reward, "usage", None)
    used, error = attempt(usage) if callable(usage) else ({}, None)
    if error is not None:
        raise DataflowError(raised("reward agent: stats", usage, error)) from error
    read, error = attempt(read_usage, used)
    if error is not None:
        what = f"reward agent: stats: '{name_of(usage)}' returned {message_of(error)}"
        raise DataflowError(f"{what}; return finite numbers by name.") from error
    return {"tokens": tokens, **read}


async def close_reward(reward: Any) -> None:
    """Calls the user's ``close``, if there is one.

    Raises:
        DataflowError: it raised an error.
    """
    close = getattr(reward, "close", None)
    if not callable(close):
        return
    ending, error = attempt(close)
    if error is None:
        if not inspect.isawaitable(ending):
            return
        task = asyncio.ensure_future(contained(ending))
        if not (await asyncio.wait([task], timeout=_CLOSE_S))[0]:
            task.cancel()
            logger.warning("reward agent: '{}' has not closed within {:g} s.", name_of(reward), _CLOSE_S)
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is None:
        return
    if isinstance(error, UserExit) and error.__cause__ is not None:
        error = error.__cause__
    elif isinstance(error, DataflowError):
        raise error
    raise DataflowError(raised("reward agent", close, error)) from error
