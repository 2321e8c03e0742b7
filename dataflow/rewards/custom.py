"""The user's reward code: how it is loaded from a file, called, and what it may return."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dataflow.errors import ConfigError, nearest

FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The keywords that verl calls a reward function with."""


def load_reward(path: str, name: str = "compute_score", reward_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Returns the function or class that a Python file defines, ready for :func:`build_reward`.

    Cheap enough to call before a run starts, only to see it fail there.

    Raises:
        ConfigError: no such file or name, a file that does not import, something that cannot score, or
            ``reward_kwargs`` that it does not take.
    """
    where = f"custom_reward_function.path={path}"
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{where}: there is no such file.")
    label = f"dataflow_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(label, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: it is no Python file; give one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[label]
        raise ConfigError(f"{where}: importing it raised {describe(error)}.") from error
    found = getattr(module, name, None)
    if found is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = nearest(name, names) or f"; it defines {', '.join(sorted(names)) or 'nothing that can be called'}."
        raise ConfigError(f"{where}: it has no '{name}'{hint}")
    if isinstance(found, type):
        if not callable(getattr(found, "compute_score", None)):
            raise ConfigError(f"{where}: class '{name}' has no method compute_score.")
        _fits(found, f"{where}: '{name}'", {}, reward_kwargs)
    elif callable(found):
        _fits(found, f"{where}: '{name}'", dict.fromkeys(FIELDS), reward_kwargs)
    else:
        raise ConfigError(f"{where}: '{name}' is a {type(found).__name__}; give a function or a class.")
    return found


def _fits(found: Callable[..., Any], what: str, fields: Mapping[str, Any], extra: Mapping[str, Any] | None) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # a builtin without a signature: the first call will tell
    try:
        signature.bind(**fields, **(extra or {}))
    except TypeError as error:
        called = ", ".join([*fields, *(extra or {})]) or "nothing"
        raise ConfigError(f"{what} cannot be called with {called} ({error}).") from error


def build_reward(found: Any, reward_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Returns an instance of a class, or the function with the arguments filled in.

    Raises:
        ConfigError: the class cannot be built.
    """
    if isinstance(found, type):
        try:
            return found(**(reward_kwargs or {}))
        except Exception as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"reward class '{found.__name__}' cannot be built: {describe(error)}.") from error
    return partial(found, **reward_kwargs) if reward_kwargs else found


def find_reward(target: str) -> Any:
    """Returns what ``"package.module:name"`` names.

    Raises:
        ConfigError: no such module or name.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"reward '{target}' cannot be found: {describe(error)}.") from error


def name_of(function: Any) -> str:
    """Returns the name to call user code by in a message."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def is_async(function: Any) -> bool:
    """Whether calling it gives something to await, as far as can be told before."""
    while isinstance(function, partial):
        function = function.func
    # An object may be called through an async method of its class.
    call = getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def describe(error: BaseException) -> str:
    """Returns an exception in one line: its type, message and the line of user code it came through."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    # The machinery's own frames say nothing about where the user's code failed.
    hidden = (str(Path(__file__).parent.parent / "reward_agent.py"), __file__, "<frozen ")
    user = next((frame for frame in frames if not frame.filename.startswith(hidden)), None)
    place = f" ({Path(user.filename).name}:{user.lineno})" if user else ""
    return f"{type(error).__name__}{': ' + text if text else ''}{place}"


def outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Returns result and exception: a future cannot carry StopIteration, its waiter would never wake."""
    try:
        return function(), None
    except (Exception, SystemExit) as error:
        return None, error


def raised(where: str, function: Any, error: BaseException) -> str:
    """Returns the message for user code that raised: where, what, and the fix."""
    # An exception of our own knows better what to do about it.
    fix = getattr(error, "fix", "correct it, or catch the error there and return a score")
    return f"{where}: '{name_of(function)}' raised {describe(error)}; {fix}."


def read_number(value: Any) -> float:
    """Returns a finite number as float.

    Raises:
        ValueError: it is none; the message names what it is.
    """
    if not isinstance(value, numbers.Real) and type(value).__name__ not in ("bool", "bool_"):
        raise ValueError("None" if value is None else f"a {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError("a number too large for a float") from error
    if not math.isfinite(number):
        raise ValueError(str(number))
    return number


def read_result(result: Any) -> tuple[float, dict[str, Any]]:
    """Returns the score and the extra columns of what a reward function returned.

    Raises:
        ValueError: neither a number, (score, query, explanation) nor a dict with ``score``.

    >>> read_result((1, "2 + 2?", "right"))
    (1.0, {'query': '2 + 2?', 'explanation': 'right'})
    """
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"a dict without 'score' (keys: {', '.join(map(repr, result)) or 'none'})")
        odd = next((key for key in result if not isinstance(key, str)), None)
        if odd is not None:
            raise ValueError(f"a dict with the key {odd!r}, which is no column name")
        extras = {key: value for key, value in result.items() if key != "score"}
        return _part(result["score"], "a dict whose 'score' is"), extras
    if isinstance(result, tuple):
        if len(result) != 3:
            raise ValueError(f"a tuple of {len(result)}")
        return _part(result[0], "a tuple whose score is"), {"query": result[1], "explanation": result[2]}
    return read_number(result), {}


def _part(value: Any, where: str) -> float:
    try:
        return read_number(value)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error
