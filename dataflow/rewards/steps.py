"""The steps in flight: submit, the failure rule, and the waiters that collect whole groups."""

from __future__ import annotations

import asyncio
import numbers
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loguru import logger

from dataflow.batch import Batch
from dataflow.errors import DataflowError, RewardFailed, counted
from dataflow.rewards.failure import FailedShare, FailureRule
from dataflow.rewards.naming import MAIN, prefixed
from dataflow.rewards.requests import (
    BESIDE,
    ENDED,
    GroupFilter,
    Order,
    Request,
    State,
    Step,
    StepRequests,
    Ticket,
    Waiter,
    latency_summary,
    record,
)
from dataflow.system import clock
from dataflow.usercode.load import describe

_REMEMBERED = 4096  # ended steps that keep their message for later collects


class Steps:
    """Steps in flight.

    Args:
        rule: what happens to samples without a score.
        max_failed_share: see :class:`~dataflow.rewards.failure.FailedShare`.
        on_cancel: called with each request that is cancelled, after it has ended.
        agent: name of the agent, in messages.
    """

    def __init__(
        self, rule: FailureRule, max_failed_share: float, on_cancel: Callable[[Request], None], agent: str = MAIN
    ) -> None:
        self._rule, self._agent, self._on_cancel = rule, agent, on_cancel
        self._failures = FailedShare(max_failed_share)
        self.counts: Counter[str] = Counter()
        self.live: dict[Step, StepRequests] = {}
        self.closed = False
        self._halted: tuple[str, BaseException | None] | None = None
        self._ended: OrderedDict[Step, tuple[type[DataflowError], str, BaseException | None]] = OrderedDict()

    # --- submit -------------------------------------------------------------------------------------------------

    def add(
        self, step: Step, samples: Batch, extra_groups: int, more: bool, group_filter: GroupFilter | None
    ) -> tuple[StepRequests, list[Request], Ticket]:
        """Adds samples; returns their step, a request for each row, and their ticket.

        Raises:
            DataflowError: see :meth:`RewardAgent.submit <dataflow.reward_agent.RewardAgent.submit>`.
            RewardFailed: likewise.
        """
        if self.closed:
            raise DataflowError(f"reward agent: step {step} was submitted after close().")
        if self._halted is not None:
            raise RewardFailed(prefixed(self._halted[0], self._agent)) from self._halted[1]
        state = self.live.get(step)
        if more and step in self._ended:
            raise self._gone(step)
        if step in self._ended or (state is not None and not (more and state.more)):
            raise DataflowError(f"reward agent: step {step} was submitted before; submit each step once.")
        if not len(samples):
            raise DataflowError(f"reward agent: step {step} has no samples to score.")
        ids = samples.ids
        before = () if state is None else state.seen
        if len({*ids, *before}) != len(ids) + len(before):
            twice = next(group for group, count in Counter([*before, *ids]).items() if count > 1)
            raise DataflowError(f"reward agent: step {step} holds group {twice} twice; sort rows by group.")
        if state is None:
            training = isinstance(step, numbers.Integral)
            number = str(step).removeprefix(BESIDE)
            priority = (0, int(number)) if training or number != step else (1, 0)
            rule = self._rule if training else self._rule.for_validation()
            state = self.live[step] = StepRequests(step, rule, priority, extra_groups, more, group_filter)
        requests = state.add(samples.groups.tolist())
        self.counts["requested"] += len(samples)
        self._failures.submitted(len(samples), state.rows)
        return state, requests, Ticket(step, ids, len(samples))

    # --- requests and groups ------------------------------------------------------------------------------------

    def scored(self, request: Request, score: float, extras: dict[str, Any]) -> bool:
        """Ends a request with its score; returns whether that finishes its group."""
        self.counts["scored"] += 1
        self._failures.ended()
        request.score, request.extras = score, extras
        return self._finish(request, "scored")

    def failed(self, request: Request, message: str, error: BaseException) -> bool:
        """Ends a request without a score and applies the rule of its step; returns whether that finishes its group."""
        state = request.step
        message = f"{request}: {message}"
        self.counts["failed"] += 1
        self._failures.ended(message)
        state.last_failure = message
        fatal = getattr(error, "fatal", None) is True
        if fatal or state.rule.kind == "fail":
            state.end(request, "failed")
            if fatal:
                self.halt(message, error)
            else:
                self.fail(state, message, error)
            return False
        if not state.failed:
            # Only the first one of a step; the step's metrics have their number.
            logger.warning("{}", prefixed(f"{message.rstrip('.')} (reward.on_failure={state.rule})", self._agent))
        state.failed += 1
        match state.rule.kind:
            case "score":
                request.score = state.rule.score
            case "drop_sample":
                request.kept = False
            case "drop_group" | "replace_group":
                state.end(request, "failed")
                self._drop_group(request, error)
                return False
        return self._finish(request, "failed")

    def check_failed_share(self, state: StepRequests, error: BaseException | None) -> None:
        """Ends every step if too many requests have failed."""
        if state.rule.kind != "fail" and (passed := self._failures.passed(state.more)):
            self.halt(passed, error)

    def _finish(self, request: Request, how: State) -> bool:
        state, group = request.step, request.group
        state.end(request, how)
        state.unfinished[group] -= 1
        return not state.unfinished[group]

    def _drop_group(self, failed: Request, error: BaseException) -> None:
        """Drops the group of a failed request; under ``replace_group`` an extra one takes its place."""
        state, group, now = failed.step, failed.group, clock.now()
        for request in state.groups[group]:
            if request.open:
                self.counts["cancelled"] += 1
                began = request.job.begin if request.job is not None else 0.0
                request.begin, request.end = began or now, now
                state.end(request, "cancelled")
                self._on_cancel(request)
            request.kept, request.score = False, float("nan")
        if state.rule.kind == "drop_group":
            self.arrive(state, group)
            return
        state.withdraw(group)
        state.lost += 1
        if state.extra_groups < 0:
            self.fail(state, _short_of_groups(state), error)
        else:
            self._serve(state)

    def arrive(self, state: StepRequests, group: int) -> None:
        """Makes a finished group available to collect."""
        state.unfinished.pop(group, None)
        state.arrived.append(group)
        self._serve(state)

    def _serve(self, state: StepRequests) -> None:
        """Wakes the waiters whose groups are there, first come, first served."""
        if not state.unfinished:
            state.settled.set()
        while state.waiters:
            waiter = state.waiters[0]
            if not waiter.future.done():
                try:
                    chosen = state.pick(waiter.take, waiter.order, waiter.groups)
                except ValueError as error:
                    self.fail(state, str(error), None)
                    return
                if chosen is None:
                    return
                waiter.future.set_result(chosen)
            state.waiters.popleft()

    # --- collect ------------------------------------------------------------------------------------------------

    async def collect(
        self, step: Step, k: int | None, order: Order, last: bool, groups: Iterable[int] | None = None
    ) -> Batch:
        """Waits for the next k groups of a step, or the named ones, and returns their rewards.

        See :meth:`RewardAgent.collect <dataflow.reward_agent.RewardAgent.collect>`.
        """
        if order not in ("arrival", "index"):
            raise DataflowError(f"reward agent: order '{order}' is unknown; give 'arrival' or 'index'.")
        state = self.live.get(step)
        if state is None:
            raise self._gone(step)
        named = None if groups is None else frozenset(groups)
        take = len(named) if named is not None else state.left if k is None else k
        if k is None and named is None and not take:
            raise DataflowError(f"reward agent: all groups of step {step} are being collected already.")
        if take < 1 or (named is None and take > state.left and not (state.more and k is not None)):
            raise DataflowError(f"reward agent: step {step} has {state.left} groups left to collect, not {take}.")
        chosen = await self._wait(state, take, order, named)
        final = last if state.more or named is not None else len(state.groups) <= state.extra_groups + len(chosen)
        if final and state.more and not state.over and (passed := self._failures.passed()):
            self.halt(passed, None)  # the share is known only now that the step is complete
            raise self._gone(step)
        batch = rewards_of(state, chosen)
        if final and not state.over:
            batch.meta["step"] = step_summary(state)
            state.ended.clear()  # breaks the circle of requests and their step, for the garbage collector
            self._end(state, DataflowError, f"reward agent: step {step} has been collected in full.", None)
        return batch

    async def _wait(self, state: StepRequests, take: int, order: Order, named: frozenset[int] | None) -> list[int]:
        """Waits until groups have arrived and returns their ids."""
        waiter = Waiter(take, order, asyncio.get_running_loop().create_future(), named)
        state.waiters.append(waiter)
        self._serve(state)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            # A cancelled waiter leaves its groups to the next one.
            if waiter in state.waiters:
                state.waiters.remove(waiter)
            elif not waiter.future.cancelled() and not waiter.future.exception():
                state.arrived = waiter.future.result() + state.arrived
            self._serve(state)
            raise

    async def settled(self, step: Step) -> None:
        """Waits until no group of a step is unfinished: each has arrived or is lost."""
        state = self.live.get(step)
        if state is not None and state.unfinished:
            state.settled.clear()
            await state.settled.wait()

    # --- ends of steps ------------------------------------------------------------------------------------------

    def cancel(self, step: Step) -> int:
        """Cancels the rest of a step; returns the number of requests that had not ended."""
        state = self.live.get(step)
        if state is None:
            return 0
        count = state.open
        self.fail(state, f"step {step}: its reward requests were cancelled.", None)
        return count

    def fail(self, state: StepRequests, message: str, error: BaseException | None) -> None:
        """Ends a step: present and future waiters get RewardFailed, and its open requests are cancelled."""
        if not state.over:
            self._end(state, RewardFailed, message, error)

    def halt(self, message: str, error: BaseException | None) -> None:
        """Ends every step, now and later, for a fault that is not that of one step."""
        if self._halted is None:
            self._halted = message, error
        for state in list(self.live.values()):
            self.fail(state, message, error)

    def on_bug(self, error: BaseException) -> None:
        """Halts after an internal error, since nothing else would wake the waiters that depend on its result."""
        if isinstance(error, DataflowError):
            self.halt(str(error), error.__cause__)
            return
        logger.opt(exception=error).error("reward agent: {}", describe(error))
        self.halt(f"reward agent: an error of its own, {describe(error)}; please report it with the log.", error)

    def close(self) -> bool:
        """Fails all steps; returns whether this was the first call."""
        if self.closed:
            return False
        self.closed = True
        for state in list(self.live.values()):
            self.fail(state, f"step {state.key}: the reward agent was closed.", None)
        return True

    def _end(self, state: StepRequests, kind: type[DataflowError], message: str, cause: BaseException | None) -> None:
        state.over = True
        state.settled.set()
        for task in state.post_processing:
            task.cancel()
        del self.live[state.key]
        self._ended[state.key] = (kind, prefixed(message, self._agent), cause)
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        for waiter in state.waiters:
            if not waiter.future.done():
                waiter.future.set_exception(self._gone(state.key))
        state.waiters.clear()
        self.counts["cancelled"] += state.open
        state.unfinished.clear()
        for requests in state.groups.values():
            for request in requests:
                if request.open:
                    state.end(request, "cancelled")
                    self._on_cancel(request)

    def _gone(self, step: Step) -> DataflowError:
        """Returns why a step is not there; a new exception each time, as one raised twice mixes tracebacks."""
        if step in self._ended:
            kind, message, cause = self._ended[step]
            error = kind(message)
            error.__cause__ = cause
            return error
        live = ", ".join(map(str, self.live)) or "none"
        return DataflowError(f"reward agent: step {step} was never submitted (in flight: {live}).")

    # --- numbers ------------------------------------------------------------------------------------------------

    def waiting(self) -> int:
        """Returns the number of open requests for which no call runs."""
        return sum(state.waiting() for state in self.live.values())


def _short_of_groups(state: StepRequests) -> str:
    lost, can = f"{counted(state.lost, 'group')} failed", "reward.extra_groups can replace; raise it"
    if state.left_out:
        lost += f" and {state.left_out} were left out"
        can = "data.gen_batch_size and reward.extra_groups can replace; raise one"
    return f"step {state.key}: {lost}, one more than {can}. The last failure: {state.last_failure}"


def rewards_of(state: StepRequests, chosen: Sequence[int]) -> Batch:
    """Returns the rewards of finished groups and removes them from the step."""
    import torch

    requests = [request for group in chosen for request in state.groups.pop(group)]
    state.ended += requests
    replaced, state.replaced = state.replaced, []
    names = dict.fromkeys(name for request in requests for name in request.extras)
    columns: dict[str, Any] = {name: [request.extras.get(name) for request in requests] for name in names}
    columns["score"] = torch.tensor([request.score for request in requests], dtype=torch.float32)
    if state.rule.drops:
        columns["kept"] = torch.tensor([request.kept for request in requests])
    return Batch(
        [request.group for request in requests],
        columns,
        {
            "latency_s": [request.end - request.begin for request in requests],
            "records": [record(request) for request in requests],
            "replaced": [record(request) for request in replaced],
        },
    )


def step_summary(state: StepRequests) -> dict[str, float]:
    """Returns the metrics of the collected part of a step, keyed by name without ``reward/``."""
    requests = state.ended
    called = [request for request in requests if request.how not in ("ledger", "shared", "cancelled")]
    hows = [request.how for request in requests]
    latency = latency_summary([request.end - request.begin for request in called])
    return {
        "requested": float(len(requests)),
        "scored": float(len(requests) - hows.count("failed") - hows.count("cancelled")),
        "failed": float(hows.count("failed")),
        "retried": float(sum(max(0, request.tries - 1) for request in called)),
        **{name: float(sum((request.notes or {}).get(name, 0) for request in called)) for name in ENDED},
        "hedged": float(hows.count("hedged")),
        "cached": float(hows.count("ledger") + hows.count("shared")),
        **(
            {"filtered_groups": float(state.left_out), "equal_groups": float(state.equal)} if state.group_filter else {}
        ),
        **{f"latency_{name}": value for name, value in latency.items()},
    }
