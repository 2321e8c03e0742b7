"""The worker process of a Pool: builds the reward from its recipe, then answers calls one by one.

It uses one core and its main thread, so that user code may set alarms. It ignores Ctrl-C, and ends with the process
that started it, however that ends and whatever the worker is doing.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from dataflow.errors import ConfigError, RewardFailed, an
from dataflow.rewards.user.adapter import scorer_of
from dataflow.rewards.user.function import MADE, build_reward, find_reward, load_reward
from dataflow.system.children import restore_path
from dataflow.usercode.failures import attribute_of, pickled_error, readable, trace_of
from dataflow.usercode.load import LABEL, describe, name_of, place_of

Outcome: TypeAlias = tuple[Any, BaseException | None]
"""A result and an exception, of which one is None."""


class WorkerError(RewardFailed):
    """Replaces a result or exception from a worker that cannot be pickled, and describes it."""


class _Trace(Exception):
    """The traceback of an exception in the worker, as text; becomes the cause of that exception."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclass(frozen=True)
class Recipe:
    """How to build a reward in another process: neither its code nor its state can be pickled.

    Attributes:
        module: that defines it; the path of a file, or a dotted name.
        name: in that module.
        kwargs: as passed to :func:`~dataflow.rewards.user.function.build_reward`, and so is ``context``.
    """

    module: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Returns the reward.

        Raises:
            ConfigError: the reward cannot be loaded or built in this process.
        """
        if os.path.isabs(self.module):
            found = load_reward(self.module, self.name, self.kwargs)
        else:
            found = find_reward(f"{self.module}:{self.name}")
        return build_reward(found, self.kwargs, self.context)


def recipe_of(reward: Any) -> Recipe:
    """Returns the recipe of a reward.

    Raises:
        ConfigError: the reward is not a function at the top of a module, nor built from one, or from a class or object
            there.
    """
    found, kwargs, context = getattr(reward, MADE, (reward, {}, {}))
    place = _place(found)
    if place is None:
        raise ConfigError(
            f"reward '{name_of(found)}' cannot be built in another process; define it at the top of a file, as a "
            "function or class."
        )
    return Recipe(*place, kwargs, context)


def _place(found: Any) -> tuple[str, str] | None:
    """Returns the module and the name of an object; None if no module defines it."""
    module = sys.modules.get(getattr(found, "__module__", None) or "")
    name = getattr(found, "__qualname__", "")
    if getattr(module, name, None) is not found:
        loaded = [each for label, each in sys.modules.copy().items() if label.startswith(LABEL)]
        places = ((each, name) for each in loaded for name, value in vars(each).items() if value is found)
        module, name = next(places, (None, ""))
    if module is None:
        return None
    return str(module.__file__) if module.__name__.startswith(LABEL) else module.__name__, name


def work(pipe: Any, recipe: Recipe) -> None:
    """Builds the reward, reports that it is ready, and answers calls until the pipe is closed."""
    _settle()
    reward, broken = _outcome(recipe.build)
    if broken is not None:
        broken.fatal = True  # type: ignore[attr-defined]
    score = scorer_of(reward)
    with suppress(EOFError, ConnectionError):  # the pool was closed
        pipe.send_bytes(b"")
        while True:
            message = pipe.recv_bytes()
            outcome = (None, broken) if broken is not None else _outcome(partial(_call, score, message))
            pipe.send_bytes(reply_of(*outcome))
    _, error = _outcome(partial(_close, reward))
    if error is not None:
        print(trace_of(error), file=sys.stderr, end="")


def _settle() -> None:
    """Limits this process to one core and ties it to the process that started it."""
    restore_path()
    with suppress(PermissionError):  # it leads a group already
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:  # the main module's; it has read the variable
        sys.modules["torch"].set_num_threads(1)
    _end_with_parent()


def _end_with_parent() -> None:
    """Makes this process and its descendants die with the process that started it."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
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


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return function(), None
    except BaseException as error:
        return None, error


def _call(score: Callable[..., Any], message: bytes) -> Any:
    result = score(**pickle.loads(message))
    if inspect.isawaitable(result):
        error = ConfigError(f"reward manager 'remote': '{name_of(score)}' is async; take the manager 'naive' for it.")
        error.fatal = True  # type: ignore[attr-defined]
        raise error
    return result


def _close(reward: Any) -> None:
    close = getattr(reward, "close", None)
    if callable(close) and inspect.isawaitable(ending := close()):
        asyncio.run(_awaited(ending))


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def reply_of(result: Any, error: BaseException | None) -> bytes:
    """Returns the pickled outcome; what cannot be pickled is replaced by a WorkerError."""
    if error is None:
        try:
            return pickle.dumps((result, b"", "", ""))
        except BaseException as broken:  # pickling runs user code
            error = WorkerError(f"it returned {an(type(result).__name__)}, which cannot be sent ({describe(broken)})")
    error = readable(error)
    return pickle.dumps((None, _sendable(error), place_of(error), trace_of(error)))


def _sendable(error: BaseException) -> bytes:
    """Returns a pickled exception that the parent can unpickle."""
    sent = pickled_error(error)
    if sent is not None:
        return sent
    other = WorkerError(describe(error))
    facts = {name: attribute_of(error, name) for name in ("retry", "retry_after", "fatal", "fix", "status")}
    vars(other).update((name, value) for name, value in facts.items() if isinstance(value, bool | int | float | str))
    return pickle.dumps(other)


def read_reply(message: bytes) -> Outcome:
    """Returns the outcome from a worker; an exception has its place and the worker's traceback."""
    try:
        result, sent, place, trace = pickle.loads(message)
        error: Any = pickle.loads(sent) if sent else None
    except Exception as broken:
        return None, WorkerError(f"the worker's reply cannot be read: {describe(broken)}.")
    if error is not None:
        error._place = place
        error.__cause__ = _Trace(trace)
    return result, error
