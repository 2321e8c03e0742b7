"""Pool: worker processes for reward functions that compute; each runs one call at a time, on one core.

pebble starts and replaces them, and ends the one whose call is given up. Each builds the reward again by its recipe.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from pebble import ProcessExpired, ProcessPool

from dataflow.errors import ConfigError, RewardFailed
from dataflow.rewards.functions import MADE, build_reward, find_reward, load_reward, scorer_of
from dataflow.usercode.failures import is_cancelled, pickled_error, trace_of
from dataflow.usercode.load import LABEL, describe, name_of, place_of
from dataflow.usercode.numeric import kind_of


class WorkerError(RewardFailed):
    """Replaces a result or exception from a worker that cannot be pickled, and describes it."""


class WorkerDied(RewardFailed):
    """The worker process ended during the call; another worker may complete it."""

    retry = True
    fix = (
        "check whether memory ran out, what in the function ends the process, and that a script of yours starts its "
        "run under if __name__ == '__main__'"
    )


@dataclass(frozen=True)
class Recipe:
    """How to build a reward in another process; ``module`` is the path of a file, or a dotted name."""

    module: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, reward: Any) -> Recipe:
        """Returns the recipe of a reward, or of the class that it will be built from.

        Raises a ConfigError unless it is defined at the top of a module and its arguments can be pickled.
        """
        found, kwargs, context = getattr(reward, MADE, (reward, {}, {}))
        labels = [getattr(found, "__module__", ""), *(label for label in [*sys.modules] if label.startswith(LABEL))]
        modules = [sys.modules[label] for label in labels if label in sys.modules]
        places = ((module, name) for module in modules for name, value in vars(module).items() if value is found)
        module, name = next(places, (None, ""))
        if module is None:
            raise ConfigError(
                f"reward '{name_of(found)}' cannot be built in another process; define it at the top of a file, as a "
                "function or class."
            )
        label = module.__name__
        recipe = cls(str(module.__file__) if label.startswith(LABEL) else label, name, kwargs, context)
        try:
            pickle.dumps(recipe)
        except Exception as error:
            raise ConfigError(
                f"reward '{name}': its arguments cannot be sent to another process ({describe(error)})."
            ) from error
        return recipe

    def build(self) -> Any:
        """Returns the reward; ConfigError if it cannot be loaded or built in this process."""
        if os.path.isabs(self.module):
            found = load_reward(self.module, self.name, self.kwargs)
        else:
            found = find_reward(f"{self.module}:{self.name}")
        return build_reward(found, self.kwargs, self.context)


class Pool:
    """Worker processes that call one function.

    A running call is cancelled by killing its worker and what that has started: nothing else stops code that computes.
    A worker that dies or is killed affects no other call and is replaced. None outlives the process that started it.

    Attributes:
        counts: ``died``, workers that ended by themselves; ``killed``, workers whose call was cancelled.
    """

    def __init__(self, recipe: Recipe, workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"reward manager 'remote': workers={workers}; give 1 or more.")
        self.workers = workers
        self.counts: Counter[str] = Counter()
        self._recipe = recipe
        self._processes: ProcessPool | None = None
        self._waiting: set[Future[Any]] = set()
        self._slots = asyncio.Semaphore(workers)
        self._is_ready = self._closed = False

    def start(self) -> ProcessPool:
        """Starts the workers unless they are started; does not wait for them."""
        if self._processes is None:
            started = ProcessPool(self.workers, initializer=_begin, initargs=(self._recipe,), context=_Context())
            self._processes, self._is_ready = started, False
            started.schedule(_ready)  # which starts them
        return self._processes

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Calls the function in a worker; cancelling this coroutine kills the worker.

        Raises:
            WorkerDied: the worker ended during the call.
            WorkerError: the arguments or the result cannot be pickled, or the pool is closed.
            Exception: what the function raised, with the worker's traceback as a note.
        """
        try:
            message = pickle.dumps(dict(arguments))
        except Exception as error:
            raise WorkerError(f"the arguments of the call cannot be sent to a worker: {describe(error)}") from error
        async with self._slots:
            while not self._is_ready:  # a call given up while the workers load the reward must not kill one
                await self._answer(_ready)
                self._is_ready = True
            reply = await self._answer(_call, message)
        try:
            result, failed, place = pickle.loads(reply)
        except Exception as error:
            raise WorkerError(f"the worker's reply cannot be read: {describe(error)}") from error
        if failed is not None:
            failed._place = place
            raise failed
        return result

    async def _answer(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._closed:
            raise WorkerError("the pool of reward workers was closed before this call")
        processes, when = self.start(), "during a call" if function is _call else "before it was ready"
        try:
            answer = processes.schedule(function, arguments)
            self._waiting.add(answer)
            answer.add_done_callback(self._waiting.discard)
            return await asyncio.shield(asyncio.wrap_future(answer))
        except asyncio.CancelledError as error:
            if not is_cancelled(error):  # the processes were ended
                kind = WorkerError if self._closed else WorkerDied
                raise kind("the pool of reward workers was closed during the call") from None
            if function is _call and answer.cancel():  # type: ignore[no-untyped-call]
                self.counts["killed"] += 1
                self._is_ready = False
            raise
        except ProcessExpired as error:
            self.counts["died"] += 1
            self._is_ready = False
            _kill_group(error.pid)
            code: int = error.exitcode
            how = f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
            raise WorkerDied(f"the worker process {how} {when}") from None
        except RuntimeError:  # pebble accepts no calls any more once a worker has died that had none
            if processes is self._processes:
                self.counts["died"] += 1
                await asyncio.to_thread(self._ending())
            raise WorkerDied(f"a worker process ended {when}") from None

    def _ending(self) -> Callable[[], None]:
        """Leaves the processes, and returns what ends them."""
        processes, self._processes = self._processes, None
        waiting, self._waiting = self._waiting, set()

        def end() -> None:
            for answer in [*waiting]:  # pebble would leave them waiting
                answer.cancel()
            if processes is not None:
                processes.stop()  # type: ignore[no-untyped-call]
                processes.join()

        return end

    def close(self) -> None:
        """Kills the workers and waits until they have ended."""
        self._closed = True
        self._ending()()


class _Worker(SpawnProcess):
    """A worker that leads a process group, which ends with it."""

    def terminate(self) -> None:
        """Kills it with what it has started: nothing else stops a function that holds Python's lock."""
        _kill_group(self.pid)
        self.kill()  # if it leads no group yet


def _kill_group(pid: int | None) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # type: ignore[arg-type]


class _Context(SpawnContext):
    """Makes the workers. Not by fork, which copies the locks that other threads hold at that moment."""

    Process = _Worker


# What follows runs in a worker, in its main thread, so that user code may set alarms.

_reward: Any = None
_broken: BaseException | None = None


def _begin(recipe: Recipe) -> None:
    """Limits this process to one core, ties it to the process that started it, and builds the reward."""
    global _reward, _broken
    os.setsid()
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:  # the main module's; it has read the variable
        sys.modules["torch"].set_num_threads(1)
    _end_with_parent()
    try:
        _reward = recipe.build()
    except Exception as error:
        _broken = error
        _broken.fatal = True  # type: ignore[attr-defined]


def _end_with_parent() -> None:
    """Makes this process and its descendants die with the process that started it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        # By the kernel: code that keeps Python's lock, such as a regular expression, stops every thread.
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    # In case the parent ended before, and for other systems.
    threading.Thread(target=watch, daemon=True).start()


def _ready() -> None:
    """Its answer says that a worker has built the reward."""


def _call(message: bytes) -> bytes:
    """Returns the pickled result, error and place of the error in the user's code."""
    try:
        if _broken is not None:
            raise _broken
        result = scorer_of(_reward)(**pickle.loads(message))
        if inspect.isawaitable(result):
            name = name_of(scorer_of(_reward))
            wrong = ConfigError(f"reward manager 'remote': '{name}' is async; take the manager 'naive' for it.")
            wrong.fatal = True  # type: ignore[attr-defined]
            raise wrong
        try:
            return pickle.dumps((result, None, ""))
        except Exception as error:
            what = f"it returned {kind_of(result)}, which cannot be sent ({describe(error)})"
            raise WorkerError(what) from error
    except BaseException as error:
        return pickle.dumps((None, _sendable(error), place_of(error)))


def _sendable(error: BaseException) -> BaseException:
    """Returns an exception that another process can read, with what the agent obeys and the traceback as a note."""
    sent: BaseException = error
    if pickled_error(error) is None:
        sent = WorkerError(describe(error))
        facts = {name: getattr(error, name, None) for name in ("retry", "retry_after", "fatal", "fix", "status")}
        vars(sent).update((name, value) for name, value in facts.items() if isinstance(value, bool | int | float | str))
    sent.add_note(trace_of(error))
    return sent
