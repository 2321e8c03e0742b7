"""Loads files that users write, and describes their functions and exceptions in messages."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import zlib
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from dataflow.errors import ConfigError, nearest
from dataflow.files import no_file
from dataflow.usercode.failures import TimedOut, UserExit, is_interrupt, message_of, parts_of

LABEL = "dataflow_reward_"
"""Prefix of the names of modules loaded from users' files."""

INSTALLED = "pkg://"
"""What a path begins with that names an installed module, as in verl."""

_NAMED = 3  # exceptions of a group that a message names

_CALLERS = ("reward_agent.py", "rewards", "usercode")
# Paths of frames that are not the user's code.
_MACHINERY = (
    "<frozen ",
    os.path.join(os.path.dirname(inspect.__file__), "asyncio"),
    *(os.path.join(os.path.dirname(os.path.dirname(__file__)), name) for name in _CALLERS),
)


def load_file(path: str, where: str) -> ModuleType:
    """Executes a user's Python file (or ``pkg://`` and an installed module's name, as in verl) and returns the module.

    ``where`` is the setting that names it; it begins the ConfigError.
    """
    label, spec = path.removeprefix(INSTALLED).replace("/", "."), None
    if not path.startswith(INSTALLED):
        file = Path(path).expanduser()
        if (why := no_file(file)) is not None:
            raise ConfigError(f"{where}: {why}; give a Python file.")
        file = file.resolve()
        # A name by path: files of the same name must not replace each other in sys.modules.
        label = f"{LABEL}{file.stem}_{zlib.crc32(str(file).encode()):08x}"
        spec = importlib.util.spec_from_file_location(label, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{where}: it is not a Python file; give one that ends in .py.")
    try:
        if spec is None or spec.loader is None:
            return importlib.import_module(label)
        module = sys.modules[label] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look it up
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(label, None)
        if is_interrupt(error):
            raise
        raise ConfigError(f"{where}: importing it raised {describe(error)}.") from error
    return module


def pick(module: ModuleType, name: str, where: str) -> Any:
    """Returns the object of a given name in a loaded file; ConfigError if there is none."""
    found = getattr(module, name, None)
    if found is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = nearest(name, names) or f"; it defines {', '.join(sorted(names)) or 'nothing that can be called'}."
        raise ConfigError(f"{where}: it has no '{name}'{hint}")
    return found


def name_of(function: Any) -> str:
    """Returns the name of a user's function or object, for messages."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def is_async(function: Any) -> bool:
    """Whether calling it returns an awaitable, as far as can be known before the call."""
    while isinstance(function, partial):
        function = function.func
    # An object may have an async __call__.
    call = getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def describe(error: BaseException) -> str:
    """Returns an exception on one line: its type, message, and file and line in the user's code.

    For an exception group also the exceptions in it.
    """
    if isinstance(error, UserExit) and error.__cause__ is not None:
        error = error.__cause__
    text, place = message_of(error), place_of(error)
    text = f"{type(error).__name__}{': ' + text if text else ''}{' (' + place + ')' if place else ''}"
    if not isinstance(error, BaseExceptionGroup):
        return text
    parts = parts_of(error)
    more = [f"{len(parts) - _NAMED} more"] if len(parts) > _NAMED else []
    return f"{text}: {', '.join([*map(describe, parts[:_NAMED]), *more])}"


def place_of(error: BaseException) -> str:
    """Returns the innermost line of the user's file that an exception was raised in; "" if unknown."""
    # Not extract_tb, which looks up the columns of each frame: many errors have a deep traceback.
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = next((file for file, _line in frames if not file.startswith(_MACHINERY)), None)
    if own is None:  # an exception from another process has no frames, but the attribute _place
        return str(getattr(error, "_place", ""))
    return f"{Path(own).name}:{[line for file, line in frames if file == own][-1]}"


def raised(where: str, function: Any, error: BaseException) -> str:
    """Returns the message for an exception from user code: where, what, and the fix."""
    return f"{where}: '{name_of(function)}' {what_happened(error)}; {fix_of(error)}."


def what_happened(error: BaseException) -> str:
    """Returns how a call of user code failed, as a clause after the function's name and before the fix."""
    return f"gave {message_of(error)}" if type(error) is TimedOut else f"raised {describe(error).rstrip('.')}"


def fix_of(error: BaseException) -> str:
    """Returns the fix for an exception: its attribute ``fix`` if it has one."""
    fix = getattr(error, "fix", None)
    return fix if isinstance(fix, str) else "correct it, or catch the error there and return a score"
