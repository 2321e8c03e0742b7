"""RewardAgent: sends every response to the reward function and hands back whole groups as they finish.

One event loop, no polling: a finished request wakes whoever waits for it. Every request ends in exactly one
of scored, failed, cancelled. A failure ends its step, and every collect of that step raises it.

At most ``concurrency`` pieces of user code run at once. A slot that falls free goes to the oldest waiting
request: training steps by number, then validation streams; so a straggler holds one slot and nothing else.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import numbers
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from dataflow.batch import Batch
from dataflow.errors import ConfigError, DataflowError, RewardFailed
from dataflow.rewards.custom import (
    build_reward,
    describe,
    find_reward,
    is_async,
    load_reward,
    name_of,
    outcome,
    raised,
    read_number,
    read_result,
)
from dataflow.rewards.requests import (
    Order,
    Request,
    Step,
    StepRequests,
    Ticket,
    Waiter,
    arguments_of,
    latency_summary,
    rewards_of,
)

__all__ = ["RewardAgent", "Ticket", "build_agent", "latency_summary", "load_reward"]

_REMEMBERED = 4096  # ended steps whose end a later collect is told


class RewardAgent:
    """Scores the responses of several steps at once, never mixing them.

    Args:
        compute_score: a function, sync or async, called with verl's keywords ``data_source``,
            ``solution_str``, ``ground_truth`` and ``extra_info`` (a dict, to which ``raw_prompt``, the chat
            messages, is added where the samples have it); or an object with such a method and optionally
            ``post_process_scores`` and ``close``. It returns a finite number, a tuple (score, query,
            explanation), or a dict with ``score`` and further columns. Sync ones run in threads.
        concurrency: calls at once.
        post_process_scores: sync or async; given the scores of one whole group, in sample order, it returns
            as many, which replace them. Wins over the object's method.

    Raises:
        ConfigError: ``compute_score`` cannot be called, or ``concurrency`` is below 1.
    """

    def __init__(
        self,
        compute_score: Any,
        *,
        concurrency: int = 64,
        post_process_scores: Callable[[list[float]], Any] | None = None,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"reward.concurrency={concurrency}; give 1 or more.")
        self._owner = compute_score
        self._score = getattr(compute_score, "compute_score", compute_score)
        self._post = post_process_scores or getattr(compute_score, "post_process_scores", None)
        if isinstance(compute_score, type) or not callable(self._score):
            raise ConfigError(f"compute_score={compute_score!r}; give a function or an object with compute_score.")
        self.concurrency = concurrency
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="reward")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._steps: dict[Step, StepRequests] = {}
        self._ended: OrderedDict[Step, tuple[type[DataflowError], str, BaseException | None]] = OrderedDict()
        self._heap: list[tuple[int, int, int, Request]] = []
        self._sequence = 0
        self._running = 0
        self._peak = 0
        self._counts: Counter[str] = Counter()
        self._latency_s = array("d")
        self._closed = False

    def submit(self, step: Step, samples: Batch) -> Ticket:
        """Queues a request for each row and returns at once; call it on the agent's event loop.

        Args:
            step: number of a training step, or a name like ``"val:3"`` for requests served after all those.
            samples: columns ``response_text``, ``data_source``, ``ground_truth``; ``extra_info`` and
                ``raw_prompt`` where there are such.

        Raises:
            DataflowError: a step submitted before, no rows, a group twice, a missing column, a closed agent.
        """
        if self._closed:
            raise DataflowError(f"reward agent: step {step} was submitted after close().")
        if step in self._steps or step in self._ended:
            raise DataflowError(f"reward agent: step {step} was submitted before; submit each step once.")
        if not len(samples):
            raise DataflowError(f"reward agent: step {step} has no samples to score.")
        ids = samples.ids
        if len(set(ids)) != len(ids):
            twice = next(group for group, count in Counter(ids).items() if count > 1)
            raise DataflowError(f"reward agent: step {step} holds group {twice} twice; sort rows by group.")
        arguments = arguments_of(samples)
        self._bind()
        state = StepRequests(step, queued=len(samples), open=len(samples))
        training = isinstance(step, numbers.Integral)
        for group, keywords in zip(samples.groups.tolist(), arguments, strict=True):
            requests = state.groups.setdefault(group, [])
            requests.append(Request(state, group, len(requests), keywords))
            self._sequence += 1
            place = (0, int(step)) if training else (1, 0)
            heapq.heappush(self._heap, (*place, self._sequence, requests[-1]))
        state.unfinished = {group: len(requests) for group, requests in state.groups.items()}
        self._steps[step] = state
        self._counts["requested"] += len(samples)
        self._fill()
        return Ticket(step, ids, len(samples))

    async def collect(self, step: Step, k: int | None = None, order: Order = "arrival") -> Batch:
        """Waits for the next k groups of a step and returns their rewards, groups in order of their ids.

        Args:
            step: as submitted.
            k: how many groups; None for all that nobody else collects.
            order: ``arrival`` takes the groups that finish first, ``index`` the next ones by id.

        Returns:
            ``score`` float32 ``[rows]`` and a column of objects for each extra one, None where a sample lacks
            it. ``meta``: ``records``, dicts with group, sample, begin and end (seconds of ``time.time()``) of
            each request; ``latency_s``, their durations; ``step_latency_s``, those of all that was collected
            of the step so far.

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
        if not 1 <= take <= state.left:
            raise DataflowError(f"reward agent: step {step} has {state.left} groups left to collect, not {take}.")
        waiter = Waiter(take, order, self._bind().create_future())
        state.waiters.append(waiter)
        self._serve(state)
        try:
            chosen = await waiter.future
        except asyncio.CancelledError:
            # Whoever gives up leaves its groups to the next.
            if waiter in state.waiters:
                state.waiters.remove(waiter)
            elif not waiter.future.cancelled() and not waiter.future.exception():
                state.arrived = waiter.future.result() + state.arrived
            self._serve(state)
            raise
        batch = rewards_of(state, chosen)
        if not state.groups and not self._over(state):
            self._end(state, DataflowError, f"reward agent: step {step} has been collected in full.", None)
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
        self._fail(state, f"step {step}: its reward requests were cancelled.", None)
        return count

    def stats(self) -> dict[str, Any]:
        """Returns counts of requests so far, what waits and runs now, and the latency of the scored ones.

        ``running`` counts slots in use: also a thread that goes on behind a cancelled request.
        """
        counts = {name: self._counts[name] for name in ("requested", "scored", "failed", "cancelled")}
        waiting = sum(state.queued for state in self._steps.values())
        now = {"waiting": waiting, "running": self._running, "peak": self._peak, "steps": len(self._steps)}
        return {**counts, **now, "latency_s": latency_summary(self._latency_s)}

    async def close(self) -> None:
        """Cancels everything and closes the user's object, if it has ``close``. May be called twice."""
        if self._closed:
            return
        self._closed = True
        tasks = [task for state in self._steps.values() for task in state.tasks]
        for state in list(self._steps.values()):
            self._fail(state, f"step {state.key}: the reward agent was closed.", None)
        if tasks:
            # User code may refuse to be cancelled; it must not keep the process.
            await asyncio.wait(tasks, timeout=2.0)
        self._pool.shutdown(wait=False, cancel_futures=True)
        close = getattr(self._owner, "close", None)
        if callable(close) and inspect.isawaitable(ending := close()):
            await ending

    def _bind(self) -> asyncio.AbstractEventLoop:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise DataflowError("reward agent: submit and collect must be called on a running event loop.") from error
        if self._loop not in (None, loop):
            raise DataflowError("reward agent: it lives on another event loop; use one agent a loop.")
        self._loop = loop
        return loop

    def _fill(self) -> None:
        """Starts the oldest waiting requests while there are free slots."""
        while self._heap and self._running < self.concurrency:
            request = heapq.heappop(self._heap)[-1]
            state = request.step
            if self._over(state):
                continue
            self._running += 1
            self._peak = max(self._peak, self._running)
            state.queued -= 1
            task = self._bind().create_task(self._run(request))
            state.tasks.add(task)
            # Not in a finally: a task that is cancelled before it starts would never get there.
            task.add_done_callback(partial(self._done, request))

    def _done(self, request: Request, task: asyncio.Task[None]) -> None:
        """The task is over; its slot is free as soon as no thread works for it any more."""
        request.step.tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not self._over(request.step):
            self._broken(request, f"{request}: {describe(error)}.", error)
        if request.thread is None or request.thread.done():
            self._release()
        else:
            request.thread.add_done_callback(self._release_from_thread)

    def _release_from_thread(self, _thread: Future[Any]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        self._running -= 1
        if not self._closed:
            self._fill()

    async def _run(self, request: Request) -> None:
        """Scores one request; the last one of a group also finishes the group, in the same slot."""
        state = request.step
        request.begin, start = time.time(), time.perf_counter()
        try:
            result = await self._call(request, partial(self._score, **request.arguments))
        # User code may end with SystemExit, or cancel itself: neither may hang the step.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if not self._over(state):
                self._broken(request, raised(str(request), self._score, error), error)
            return
        spent = time.perf_counter() - start
        request.end = request.begin + spent
        if self._over(state):
            return
        try:
            request.score, request.extras = read_result(result)
        except ValueError as error:
            fix = "return a finite number, (score, query, explanation) or a dict with 'score'"
            self._broken(request, f"{request}: '{name_of(self._score)}' returned {error}; {fix}.", error)
            return
        state.open -= 1
        self._counts["scored"] += 1
        self._latency_s.append(spent)
        state.unfinished[request.group] -= 1
        if not state.unfinished[request.group]:
            await self._finish(request)

    async def _finish(self, last: Request) -> None:
        """All samples of a group have their score: post-process them, then the group arrives."""
        state, group = last.step, last.group
        requests = state.groups[group]
        if self._post is not None:
            where, post = f"group {group} of step {state.key}", self._post
            try:
                scores = await self._call(last, partial(post, [request.score for request in requests]))
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                if not self._over(state):
                    self._fail(state, raised(where, post, error), error)
                return
            if self._over(state):
                return
            try:
                if not isinstance(scores, Sequence | np.ndarray) or isinstance(scores, str):
                    raise ValueError(f"a {type(scores).__name__}")
                if len(scores) != len(requests):
                    raise ValueError(f"{len(scores)} scores for {len(requests)} samples")
                for request, score in zip(requests, scores, strict=True):
                    request.score = read_number(score)
            except ValueError as error:
                fix = f"return a list of {len(requests)} finite numbers"
                self._fail(state, f"{where}: '{name_of(post)}' returned {error}; {fix}.", error)
                return
        del state.unfinished[group]
        state.arrived.append(group)
        self._serve(state)

    async def _call(self, request: Request, function: Callable[[], Any]) -> Any:
        """Runs user code, on the loop if it is async, else in a thread."""
        if is_async(function):
            return await function()
        request.thread = self._pool.submit(outcome, function)
        result, error = await asyncio.wrap_future(request.thread)
        if error is not None:
            raise error
        return await result if inspect.isawaitable(result) else result

    def _over(self, state: StepRequests) -> bool:
        return self._steps.get(state.key) is not state

    def _serve(self, state: StepRequests) -> None:
        """Wakes those who wait for the step and whose groups are there, first come first served."""
        while state.waiters:
            waiter = state.waiters[0]
            if not waiter.future.done():
                chosen = state.pick(waiter.take, waiter.order)
                if chosen is None:
                    return
                waiter.future.set_result(chosen)
            state.waiters.popleft()

    def _broken(self, request: Request, message: str, error: BaseException) -> None:
        request.step.open -= 1
        self._counts["failed"] += 1
        self._fail(request.step, message, error)

    def _fail(self, state: StepRequests, message: str, error: BaseException | None) -> None:
        """Ends a step for all who wait and will wait for it, and cancels the rest of its requests."""
        self._counts["cancelled"] += state.open
        state.open = state.queued = 0
        self._end(state, RewardFailed, message, error)
        for waiter in state.waiters:
            if not waiter.future.done():
                waiter.future.set_exception(self._gone(state.key))
        state.waiters.clear()
        for task in state.tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _end(self, state: StepRequests, kind: type[DataflowError], message: str, cause: BaseException | None) -> None:
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


def build_agent(custom: Mapping[str, Any] | None, default: Mapping[str, Any], concurrency: int = 64) -> RewardAgent:
    """Returns the agent of a run; importable in the process that hosts it.

    Args:
        custom: ``path``, ``name`` and ``reward_kwargs`` of the user's function or class; None, or no path,
            means the default.
        default: ``target``, a function or class as ``"package.module:name"``, and its ``kwargs``.
        concurrency: calls at once.

    Raises:
        ConfigError: the function cannot be loaded or built.
    """
    if custom is not None and custom.get("path"):
        kwargs = custom.get("reward_kwargs") or {}
        found = load_reward(custom["path"], custom.get("name") or "compute_score", kwargs)
    else:
        kwargs = default.get("kwargs") or {}
        found = find_reward(default["target"])
    return RewardAgent(build_reward(found, kwargs), concurrency=concurrency)
