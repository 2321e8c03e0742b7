"""The user's reward code: how it is loaded from a file, called, and named when it fails."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from dataflow.errors import ConfigError, nearest
from dataflow.rewards.user.results import (
    read_result as read_result,  # where docs/rewards.md has managers import it from
)
from dataflow.usercode.copies import own_options
from dataflow.usercode.failures import attribute_of, is_interrupt, message_of, parts_of, readable

FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The keywords that verl calls a reward function with, in its order."""

CONTEXT = {"reward_router_address": "reward.router_address", "reward_model_tokenizer": "reward.model_tokenizer"}
"""verl's further keywords, passed to those that take them, and the configuration key of each."""

MADE = "_dataflow_made"
"""The attribute of a built reward that holds what :func:`build_reward` was given."""

_ASKED = ("retry_on", "endpoint", "tokens", "usage")

LABEL = "dataflow_reward_"
"""What the names of modules loaded from users' files begin with."""

_NAMED = 3  # exceptions of a group, and causes, that a message names

_CALLERS = ("reward_agent.py", "rewards", "usercode")
# These frames say nothing about where the user's code failed.
MACHINERY = (
    "<frozen ",
    os.path.join(os.path.dirname(inspect.__file__), "asyncio"),
    *(os.path.join(os.path.dirname(os.path.dirname(__file__)), name) for name in _CALLERS),
)


def load_file(path: str, where: str) -> ModuleType:
    """Runs a Python file of the user's and returns it as a module.

    Args:
        path: of the file.
        where: the setting that named it, to begin an error with.

    Raises:
        ConfigError: no such file, or it does not import.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{where}: there is no such file.")
    # Another file of the same name must not take its place in sys.modules.
    label = f"{LABEL}{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    spec = importlib.util.spec_from_file_location(label, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: it is no Python file; give one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[label]
        if is_interrupt(error):
            raise
        raise ConfigError(f"{where}: importing it raised {describe(error)}.") from error
    return module


def pick(module: ModuleType, name: str, where: str) -> Any:
    """Returns what a loaded file calls by a name.

    Raises:
        ConfigError: it has no such name.
    """
    found = getattr(module, name, None)
    if found is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = nearest(name, names) or f"; it defines {', '.join(sorted(names)) or 'nothing that can be called'}."
        raise ConfigError(f"{where}: it has no '{name}'{hint}")
    return found


def load_reward(
    path: str,
    name: str = "compute_score",
    reward_kwargs: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the function, class or object that a Python file defines, ready for :func:`build_reward`.

    Cheap enough to call before a run starts, only to see it fail there.

    Args:
        path: of the file.
        name: of what to take from it.
        reward_kwargs: further keywords of a function, or of a class's constructor.
        context: the values of :data:`CONTEXT` that are configured; None leaves unchecked whether they suffice.

    Raises:
        ConfigError: no such file or name, a file that does not import, something that cannot score,
            ``reward_kwargs`` that it does not take, or a keyword of :data:`CONTEXT` that it cannot do without.
    """
    where = f"custom_reward_function.path={path}"
    found = pick(load_file(path, where), name, where)
    what, given = f"{where}: '{name}'", reward_kwargs or {}
    if isinstance(found, type):
        if not callable(getattr(found, "compute_score", None)):
            raise ConfigError(f"{where}: class '{name}' has no method compute_score.")
        _check(what, _signature(found), (), given, context)
        _check(f"{where}: '{name}.compute_score'", _method_signature(found), FIELDS, {}, context)
    elif callable(score := scorer_of(found)):
        _check(what, _signature(score), FIELDS, given, context)
    else:
        raise ConfigError(f"{where}: '{name}' is a {type(found).__name__}; give a function or a class.")
    return found


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        # A builtin without one: the first call will tell.
        return inspect.signature(lambda **_keywords: None)


def _method_signature(kind: Any) -> inspect.Signature:
    """Returns the signature of a class's compute_score as its instances have it."""
    signature = _signature(kind.compute_score)
    if inspect.isfunction(inspect.getattr_static(kind, "compute_score")):
        return signature.replace(parameters=list(signature.parameters.values())[1:])
    return signature


def _check(
    what: str,
    signature: inspect.Signature,
    fields: Sequence[str],
    given: Mapping[str, Any],
    context: Mapping[str, Any] | None,
) -> None:
    """Sees that it can be called with these fields, what is given and, unless it is None, what the context holds."""
    error = _misfit(signature, given, **dict.fromkeys(fields))
    if error is not None and not (fields and _by_order(signature, given)):
        called = ", ".join([*fields, *given]) or "nothing"
        raise ConfigError(f"{what} cannot be called with {called} ({error}).") from error
    if context is not None:
        _from_context(what, signature, given, context)


def _misfit(signature: inspect.Signature, given: Mapping[str, Any], /, *order: Any, **fields: Any) -> TypeError | None:
    """Returns why it cannot be called so, whatever the context may hold."""
    asked = {name: None for name in CONTEXT if name in signature.parameters}
    try:
        signature.bind(*order, **fields, **{**asked, **given})
    except TypeError as error:
        return error
    return None


def _by_order(signature: inspect.Signature, given: Mapping[str, Any]) -> bool:
    """Whether it takes verl's four by position alone, so that no parameter's name speaks against it."""
    if _misfit(signature, given, **dict.fromkeys(FIELDS)) is None or _misfit(signature, given, *FIELDS) is not None:
        return False
    places = [each for each in signature.parameters.values() if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    places += places[-1:] * len(FIELDS)  # a last *args takes all that are left
    nameless = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return all(each.kind in nameless or each.name == name for each, name in zip(places, FIELDS, strict=False))


def _from_context(
    what: str, signature: inspect.Signature, given: Mapping[str, Any], context: Mapping[str, Any], named: bool = False
) -> dict[str, Any]:
    """Returns the values of the context that a callable names or, unless it has to, takes as part of ``**kwargs``."""
    takes_all = not named and any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    taken = {}
    for name, key in CONTEXT.items():
        parameter, value = signature.parameters.get(name), context.get(name)
        if name in given:
            continue
        if value is not None and (parameter is not None or takes_all):
            taken[name] = value
        elif parameter is not None and parameter.default is parameter.empty:
            raise ConfigError(f"{what} needs {name}, which is not configured; set {key}.")
    return taken


def build_reward(
    found: Any, reward_kwargs: Mapping[str, Any] | None = None, context: Mapping[str, Any] | None = None
) -> Any:
    """Returns the reward, called with verl's four keywords: an instance of a class, or the rest filled in.

    The dicts and lists in ``reward_kwargs`` are copied for a constructor, and for each call of a function.

    Args:
        found: a function, a class, or an object that is called or has a method ``compute_score``.
        reward_kwargs: keywords of the class's constructor, else of each call.
        context: values for :data:`CONTEXT`, passed to a constructor that names them, and to a function or
            ``compute_score`` that names them or takes ``**kwargs``.

    Raises:
        ConfigError: the class cannot be built, or it needs what the context lacks.
    """
    given, known, what = dict(reward_kwargs or {}), dict(context or {}), f"reward '{name_of(found)}'"
    owner = found
    if isinstance(found, type):
        owner = _instance(found, {**_from_context(what, _signature(found), given, known, named=True), **given})
    score = scorer_of(owner)
    asked = given if owner is found else {}
    filled = _filled(score, {**_from_context(what, _signature(score), asked, known), **asked})
    reward = owner if filled is score else filled if owner is score else Filled(owner, filled)
    with suppress(AttributeError, TypeError):  # one that takes no attributes
        setattr(reward, MADE, (found, given, known))
    return reward


def _instance(kind: type, given: dict[str, Any]) -> Any:
    try:
        return kind(**own_options(given))
    except BaseException as error:
        if isinstance(error, ConfigError) or is_interrupt(error):
            raise
        raise ConfigError(f"reward class '{kind.__name__}' cannot be built: {describe(error)}.") from error


def scorer_of(reward: Any) -> Any:
    """Returns what is called: the object's method ``compute_score``, or itself."""
    return getattr(reward, "compute_score", reward)


def _filled(score: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    if not _by_order(_signature(score), given):
        return OwnKeywords(score, **given) if given else score

    async def later(**keywords: Any) -> Any:
        return await score(*(keywords[name] for name in FIELDS), **own_options(given))

    def now(**keywords: Any) -> Any:
        return score(*(keywords[name] for name in FIELDS), **own_options(given))

    later.__name__ = now.__name__ = name_of(score)
    return later if is_async(score) else now


class OwnKeywords(partial):  # type: ignore[type-arg]
    """A partial whose dicts and lists are copied for each call, so that no call sees what another one changed."""

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        return self.func(*self.args, *args, **{**own_options(self.keywords), **keywords})


class Filled:
    """A reward object whose ``compute_score`` is called with more than verl's four keywords."""

    def __init__(self, owner: Any, score: Callable[..., Any]) -> None:
        self._owner = owner
        self.compute_score = score

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._owner, name)


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


def check_methods(reward: Any) -> None:
    """Sees to it that what a reward object offers beside ``compute_score`` can be called as the agent will.

    Raises:
        ConfigError: something of that name is no method, or one that is asked in passing is async.
    """
    what = f"reward '{name_of(reward)}'"
    for name in ("post_process_scores", "log", *_ASKED):
        found = getattr(reward, name, None)
        if found is not None and not callable(found):
            kind = type(found).__name__
            raise ConfigError(f"{what}: its '{name}' is a {kind}, where the agent expects a method; call it otherwise.")
        if name in _ASKED and found is not None and is_async(found):
            raise ConfigError(
                f"{what}: its '{name}' is async, but the agent asks it in passing; write it as plain def."
            )


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
    """Returns an exception in one line: its type, message and the line of user code it came through.

    Of a group also the exceptions that it holds.
    """
    error = readable(error, chained=False)
    text = message_of(error)
    place = place_of(error)
    said = f"{type(error).__name__}{': ' + text if text else ''}{' (' + place + ')' if place else ''}"
    if not isinstance(error, BaseExceptionGroup):
        return said
    parts = parts_of(error)
    named = [describe(part) for part in parts[:_NAMED]]
    more = [f"{len(parts) - _NAMED} more"] if len(parts) > _NAMED else []
    return f"{said}: {', '.join([*named, *more])}"


def place_of(error: BaseException) -> str:
    """Returns file and line of the user's code that an exception came through, as far as is known."""
    frames = traceback.extract_tb(error.__traceback__)
    user = next((frame for frame in frames if not frame.filename.startswith(MACHINERY)), None)
    # One that comes from another process has lost its frames, and carries the place with it.
    return f"{Path(user.filename).name}:{user.lineno}" if user else str(attribute_of(error, "_place", ""))


def user_frame(frames: Iterable[FrameType]) -> FrameType | None:
    """Returns the first frame that is of the user's code."""
    return next((frame for frame in frames if not frame.f_code.co_filename.startswith(MACHINERY)), None)


def raised(where: str, function: Any, error: BaseException) -> str:
    """Returns the message for user code that raised: where, what, and the fix."""
    return f"{where}: '{name_of(function)}' raised {describe(error)}; {fix_of(error)}."


def fix_of(error: BaseException) -> str:
    """Returns what to do about an exception: an error of our own knows better than we do here."""
    fix = attribute_of(error, "fix")
    return fix if isinstance(fix, str) else "correct it, or catch the error there and return a score"
