"""What a worker process of the Pool does: build the reward from its recipe, then answer one call after the other.

It computes on one core, in its main thread, so that user code may set alarms; Ctrl-C is not for it; and it ends
with the process that started it, however that one ends, whatever it is doing at that moment.
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

from dataflow.errors import ConfigError, RewardFailed
from dataflow.rewards.user.adapter import scorer_of
from dataflow.rewards.user.function import MADE, build_reward, find_reward, load_reward
from dataflow.system.children import restore_path
from dataflow.usercode.failures import attribute_of, pickled_error, readable, trace_of
from dataflow.usercode.load import LABEL, describe, name_of, place_of

Outcome: TypeAlias = tuple[Any, BaseException | None]
"""A result and an exception, of which one is None."""


class WorkerError(RewardFailed):
    """What user code raised or returned in a worker cannot be sent; this says what it was."""


class _Trace(Exception):
    """The traceback of an exception in the worker, as text; it stands behind that exception as its cause."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclass(frozen=True)
class Recipe:
    """How to build a reward once more in another process, where neither its code nor what it holds can be sent.

    Attributes:
        module: that defines it; a file's path, or a dotted name.
        name: in that module.
        kwargs: as given to :func:`~dataflow.rewards.user.function.build_reward`, and so is ``context``.
    """

    module: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Returns the reward.

        Raises:
            ConfigError: it cannot be loaded or built here.
        """
        if os.path.isabs(self.module):
            found = load_reward(self.module, self.name, self.kwargs)
        else:
            found = find_reward(f"{self.module}:{self.name}")
        return build_reward(found, self.kwargs, self.context)


def recipe_of(reward: Any) -> Recipe:
    """Returns how to build a reward once more.

    Raises:
        ConfigError: it is neither a function at the top of a module nor built from a function, class or object there.
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
    """Returns the module and the name that something is found by, if it is."""
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
    """Builds the reward, says that it is ready and answers the calls, until there is nobody left to ask."""
    _settle()
    reward, broken = _outcome(recipe.build)
    if broken is not None:
        broken.fatal = True  # type: ignore[attr-defined]
    score = scorer_of(reward)
    with suppress(EOFError, ConnectionError):  # that is how the pool is closed
        pipe.send_bytes(b"")
        while True:
            message = pipe.recv_bytes()
            outcome = (None, broken) if broken is not None else _outcome(partial(_call, score, message))
            pipe.send_bytes(reply_of(*outcome))
    _, error = _outcome(partial(_close, reward))
    if error is not None:
        print(trace_of(error), file=sys.stderr, end="")


def _settle() -> None:
    """Makes this process one that computes on one core and dies with the one that started it."""
    restore_path()
    with suppress(PermissionError):  # it leads a group already
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:  # the main module's; it has read the variable
        sys.modules["torch"].set_num_threads(1)
    _end_with_parent()


def _end_with_parent() -> None:
    """Has this process, and what it starts, killed as soon as the one that started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        # By the kernel: code that holds the interpreter's lock, as a regular expression does, stops every thread.
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    # For a parent that was gone before that, and for other systems.
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
    """Returns the outcome in bytes; what cannot be sent becomes a WorkerError that says what it was."""
    if error is None:
        try:
            return pickle.dumps((result, b"", "", ""))
        except BaseException as broken:  # pickling runs code of the user's
            error = WorkerError(f"it returned a {type(result).__name__}, which cannot be sent ({describe(broken)})")
    error = readable(error)
    return pickle.dumps((None, _sendable(error), place_of(error), trace_of(error)))


def _sendable(error: BaseException) -> bytes:
    """Returns an exception in bytes that the other side can read."""
    sent = pickled_error(error)
    if sent is not None:
        return sent
    other = WorkerError(describe(error))
    facts = {name: attribute_of(error, name) for name in ("retry", "retry_after", "fatal", "fix", "status")}
    vars(other).update((name, value) for name, value in facts.items() if isinstance(value, bool | int | float | str))
    return pickle.dumps(other)


def read_reply(message: bytes) -> Outcome:
    """Returns the outcome that the worker sent; an exception has its place and the worker's traceback."""
    try:
        result, sent, place, trace = pickle.loads(message)
        error: Any = pickle.loads(sent) if sent else None
    except Exception as broken:
        return None, WorkerError(f"what came of the call cannot be read from the worker: {describe(broken)}.")
    if error is not None:
        error._place = place
        error.__cause__ = _Trace(trace)
    return result, error
