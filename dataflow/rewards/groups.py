"""From ended requests to whole groups: the failure rule, the user's post-processing, and waking those who wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from loguru import logger

from dataflow.batch import Batch
from dataflow.rewards.failure import FailedShare
from dataflow.rewards.limits.queues import Limiter, Line
from dataflow.rewards.requests import Finish, Request, StepRequests
from dataflow.rewards.sentinel.frozen import Frozen, FrozenCall
from dataflow.rewards.sentinel.sentinel import Kind
from dataflow.rewards.user.results import read_scores
from dataflow.system import clock
from dataflow.usercode.calls import Call, Calls
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import attribute_of, is_ours, message_of
from dataflow.usercode.load import describe, name_of, raised

_LOGS = 8  # calls of the user's log at a time


class Owner(Protocol):
    """The agent: it ends steps."""

    counts: Counter[str]
    failures: FailedShare

    def fail(self, state: StepRequests, message: str, error: BaseException | None) -> None: ...

    def halt(self, message: str, error: BaseException | None) -> None: ...

    def detach(self, request: Request) -> None: ...


class Groups:
    """Takes requests whose scoring has ended, and hands on the groups that are whole.

    Args:
        post: the user's ``post_process_scores``, if there is one.
        log: the user's ``log``, if there is one.
        calls: runs both.
        limiter: gives the slots for the first.
        timeout_s: of one call of either.
        frozen: calls that are not to be made again.
        owner: ends steps that cannot go on.
    """

    def __init__(
        self,
        post: Callable[[list[float]], Any] | None,
        log: Callable[..., Any] | None,
        calls: Calls,
        limiter: Limiter,
        timeout_s: float | None,
        frozen: Frozen,
        owner: Owner,
    ) -> None:
        self._frozen = frozen
        self._post = post
        self._log = log
        self._log_failed = False
        self._logging = 0
        self._calls = calls
        self._limiter = limiter
        self._timeout_s = timeout_s
        self._owner = owner

    def scored(self, request: Request, score: float, extras: dict[str, Any], how: str) -> None:
        """The request has its score."""
        self._owner.counts["scored"] += 1
        self._owner.failures.ended()
        request.score, request.extras, request.how = score, extras, how
        self._one_less(request)

    def broken(self, request: Request, message: str, error: BaseException) -> None:
        """The request has failed; the rule of its step is carried out."""
        state, failures = request.step, self._owner.failures
        self._owner.counts["failed"] += 1
        failures.ended(message)
        request.how, state.story = "failed", message
        fatal = attribute_of(error, "fatal") is True
        if fatal or state.rule.kind == "fail":
            state.open -= 1
            request.ended = True
            if fatal:
                self._owner.halt(message, error)
            else:
                self._owner.fail(state, message, error)
            return
        if not state.failed:
            # The first one of a step; how many there were is in its metrics.
            logger.warning("{} (reward.on_failure={})", message.rstrip("."), state.rule)
        state.failed += 1
        if state.rule.kind == "score":
            request.score = state.rule.score
            self._one_less(request)
        elif state.rule.kind == "drop_sample":
            request.kept = False
            self._one_less(request)
        else:
            self._leave_out(request, error)
        if passed := failures.passed(state.more):
            self._owner.halt(passed, error)

    def _leave_out(self, failed: Request, error: BaseException) -> None:
        """One sample failed, so its whole group is dropped, or replaced by one that is still to come."""
        state, group, now = failed.step, failed.group, clock.now()
        failed.ended = True
        state.open -= 1
        for request in state.groups[group]:
            if not request.ended:
                self._owner.counts["cancelled"] += 1
                state.open -= 1
                began = request.ask.begin if request.ask is not None else 0.0
                request.how, request.begin, request.end = "cancelled", began or now, now
                self._owner.detach(request)
            request.kept, request.score = False, float("nan")
        del state.unfinished[group]
        if state.rule.kind == "drop_group":
            self._arrive(state, group)
            return
        replaced = state.groups.pop(group)
        state.ended += replaced
        state.replaced += replaced
        state.lost += 1
        state.spare -= 1
        if state.spare < 0:
            self._owner.fail(state, _short_of_groups(state), error)
        else:
            self.serve(state)

    def _one_less(self, request: Request) -> None:
        """A request has ended; the last one of a group also finishes the group."""
        state, group = request.step, request.group
        request.ended = True
        state.open -= 1
        state.unfinished[group] -= 1
        if state.unfinished[group]:
            return
        if self._post is not None and any(r.kept for r in state.groups[group]):
            # It runs in a slot, before all of its step that still waits.
            self._limiter.push_here(Finish(state, group, (*state.priority, 0)))
            self._limiter.fill()
        else:
            self._arrive(state, group)

    def post_process(self, item: Finish, line: Line) -> None:
        """A group's turn to be post-processed has come, and its slot is taken."""
        assert self._post is not None
        sentinel = self._calls.sentinel
        if story := self._frozen.group(item.step.key, item.group):
            self._limiter.release(line, clock.now())
            self._owner.fail(item.step, f"group {item.group} of step {item.step.key}: {story}", FrozenCall(story))
            return
        scores = [request.score for request in item.step.groups[item.group] if request.kept]
        self._calls.start(
            partial(self._post, scores),
            {},
            on_done=partial(self._post_processed, item),
            on_freed=lambda call: self._limiter.release(line, call.begin),
            timeout_s=self._timeout_s,
            mark=None if sentinel is None else sentinel.mark(Kind.POST_PROCESS, item.step.key, item.group),
        )

    def _post_processed(self, item: Finish, call: Call) -> None:
        state, group = item.step, item.group
        if state.over:
            return
        requests = [request for request in state.groups[group] if request.kept]
        where, post, scores = f"group {group} of step {state.key}", self._post, call.result
        if call.error is not None:
            self._owner.fail(state, raised(where, post, call.error), call.error)
            return
        try:
            for request, score in zip(requests, read_scores(scores, len(requests)), strict=True):
                request.score = score
        except BaseException as error:  # what it returned may be an object of the user's own kind
            if is_ours(error):
                raise
            what = message_of(error) if type(error) is ValueError else f"what cannot be read: {describe(error)}"
            fix = f"return a list of {len(requests)} finite numbers"
            self._owner.fail(state, f"{where}: '{name_of(post)}' returned {what}; {fix}.", error)
            return
        self._arrive(state, group)

    def _arrive(self, state: StepRequests, group: int) -> None:
        state.unfinished.pop(group, None)
        state.arrived.append(group)
        self.serve(state)

    def serve(self, state: StepRequests) -> None:
        """Wakes those who wait for the step and whose groups are there, first come first served."""
        while state.waiters:
            waiter = state.waiters[0]
            if not waiter.future.done():
                chosen = state.pick(waiter.take, waiter.order)
                if chosen is None:
                    return
                waiter.future.set_result(chosen)
            state.waiters.popleft()

    def tell(self, step: StepRequests, rewards: Batch) -> None:
        """Hands what was collected to the user's ``log``; what that raises is said once and ends nothing."""
        if self._log is None:
            return
        if self._frozen.log:
            self._say_of_log(f"is left out: {self._frozen.log.rstrip('.')}")
            return
        sentinel = self._calls.sentinel
        if self._logging >= _LOGS:
            self._say_of_log(f"has not returned from {_LOGS} calls, so that it is left out of further ones")
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
            on_done=self._told,
            mark=None if sentinel is None else sentinel.mark(Kind.LOG, step.key, int(rewards.ids[0])),
            on_freed=self._logged,  # without a time-out: it holds up nothing, and a stray would count as a scorer's
        )

    def _logged(self, _call: Call) -> None:
        self._logging -= 1

    def _told(self, call: Call) -> None:
        if call.error is not None:
            self._say_of_log(f"raised {describe(call.error)}")

    def _say_of_log(self, what: str) -> None:
        if not self._log_failed:
            self._log_failed = True
            logger.warning("reward log: '{}' {}; the run goes on.", name_of(self._log), what)


def _short_of_groups(state: StepRequests) -> str:
    return (
        f"step {state.key}: {state.lost} groups failed, one more than reward.spare_groups can replace; raise it. "
        f"The last failure: {state.story}"
    )
