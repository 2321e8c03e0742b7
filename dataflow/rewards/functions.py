"""Reward functions and classes: loaded from a file or by name, checked, and built into what the agent calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dataflow.errors import ConfigError, an
from dataflow.usercode.copies import own_options
from dataflow.usercode.failures import is_interrupt
from dataflow.usercode.load import INSTALLED, describe, is_async, load_file, name_of, pick

FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The keywords that verl calls a reward function with."""

ROUTER = "reward_router_address"
CONTEXT = {ROUTER: "reward.router_address", "reward_model_tokenizer": "reward.model_tokenizer"}
"""verl's further keywords, passed to functions that accept them, and the configuration key of each."""

MADE = "_dataflow_made"
"""Attribute of a built reward that holds the arguments of :func:`build_reward`."""


def load_reward(
    path: str,
    name: str = "compute_score",
    reward_kwargs: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the function, class or object that a Python file defines, ready for :func:`build_reward`.

    Cheap enough to be called before a run starts, as a check. ``reward_kwargs`` are those of :func:`build_reward`; a
    ``context`` of None skips the check that the configured values of :data:`CONTEXT` suffice.
    """
    where = f"custom_reward_function.path={path}"
    found = pick(load_file(path, where), name, where)
    what, given = f"{where}: '{name}'", reward_kwargs or {}
    if isinstance(found, type):
        if not callable(getattr(found, "compute_score", None)):
            raise ConfigError(f"{where}: class '{name}' has no method compute_score.")
        _check(what, found, (), given, context)
        _check(f"{where}: '{name}.compute_score'", scorer_of(found), FIELDS, {}, context)
    elif callable(score := scorer_of(found)):
        _check(what, score, FIELDS, given, context)
    else:
        raise ConfigError(f"{where}: '{name}' is {an(type(found).__name__)}; give a function or a class.")
    return found


def find_reward(target: str) -> Any:
    """Returns the object that ``"package.module:name"`` names; ConfigError if there is none."""
    module, _, name = target.partition(":")
    return pick(load_file(INSTALLED + module, f"reward '{target}'"), name, f"reward '{target}'")


def build_reward(
    found: Any, reward_kwargs: Mapping[str, Any] | None = None, context: Mapping[str, Any] | None = None
) -> Any:
    """Returns the reward that the agent calls with verl's four keywords: a function, or an object with compute_score.

    Args:
        found: a function, a class, or an object that is callable or has a method ``compute_score``.
        reward_kwargs: keywords of the class's constructor, else of each call; their dicts and lists are copied for it.
        context: values for :data:`CONTEXT`, passed to a constructor that names them, and to a function or
            ``compute_score`` that names them or accepts ``**kwargs``.
    """
    given, known, what = dict(reward_kwargs or {}), dict(context or {}), f"reward '{name_of(found)}'"
    reward, options = found, given
    if isinstance(found, type):
        options = {}
        try:
            reward = found(**_from_context(what, found, given, known, named=True), **own_options(given))
        except BaseException as error:
            if isinstance(error, ConfigError) or is_interrupt(error):
                raise
            raise ConfigError(f"reward class '{found.__name__}' cannot be built: {describe(error)}.") from error
    score = scorer_of(reward)
    options = {**_from_context(what, score, options, known), **options}
    if options:
        call = wrapped(score, lambda fields: {**own_options(options), **fields})
        reward = call if score is reward else RewardAdapter(reward, call)
    with suppress(AttributeError, TypeError):  # an object without a __dict__
        setattr(reward, MADE, (found, given, known))
    return reward


def takes(found: Any, keyword: str) -> bool:
    """Whether :func:`build_reward` passes a keyword of :data:`CONTEXT` to what :func:`load_reward` has returned."""
    score = _signature(scorer_of(found))
    named = keyword in score.parameters or (isinstance(found, type) and keyword in _signature(found).parameters)
    return named or _takes_all(score)


def scorer_of(reward: Any) -> Any:
    """Returns the callable of a reward, or of a class of rewards: its compute_score if it has one, else the reward."""
    score = getattr(reward, "compute_score", reward)
    if isinstance(reward, type) and inspect.isfunction(inspect.getattr_static(reward, "compute_score", None)):
        return score.__get__(object())  # a signature without self
    return score


def check_methods(reward: Any) -> None:
    """Raises ConfigError for an async method that the agent calls without awaiting: a coroutine would be its answer."""
    for name in ("retry_on", "tokens", "usage"):
        if is_async(getattr(reward, name, None)):
            raise ConfigError(
                f"reward '{name_of(reward)}': its '{name}' is async, but the agent calls it without awaiting; write it "
                "as a plain def."
            )


class RewardAdapter:
    """A reward object that scores with another callable and forwards all other public attributes."""

    compute_score: Callable[..., Any]

    def __init__(self, reward: Any, score: Callable[..., Any]) -> None:
        self._reward = reward
        self.compute_score = score

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self._reward, name)


def wrapped(
    score: Callable[..., Any],
    before: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    after: Callable[[Any, Mapping[str, Any]], Any] | None = None,
) -> Callable[..., Any]:
    """Returns a function around ``score`` that is async if ``score`` is.

    ``before`` makes its keywords of the agent's, ``after`` the final result of its result and the agent's keywords.
    """

    def finished(result: Any, fields: Mapping[str, Any]) -> Any:
        return result if after is None else after(result, fields)

    async def awaited(awaitable: Any, fields: Mapping[str, Any]) -> Any:
        return finished(await awaitable, fields)

    async def call_async(**fields: Any) -> Any:
        return finished(await score(**before(fields)), fields)

    def call(**fields: Any) -> Any:
        result = score(**before(fields))
        return awaited(result, fields) if inspect.isawaitable(result) else finished(result, fields)

    call_async.__name__ = call.__name__ = name_of(score)
    return call_async if is_async(score) else call


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        # A builtin may have no signature; a mismatch then shows in the first call.
        return inspect.signature(lambda **_keywords: None)


def _takes_all(signature: inspect.Signature) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())


def _check(
    what: str, function: Any, fields: Sequence[str], given: Mapping[str, Any], context: Mapping[str, Any] | None
) -> None:
    """Raises ConfigError unless a callable accepts ``fields``, ``given`` and the values of ``context``."""
    signature = _signature(function)
    assumed = [name for name in CONTEXT if name in signature.parameters]
    try:
        signature.bind(**{**dict.fromkeys([*fields, *assumed]), **given})
    except TypeError as error:
        called = ", ".join([*fields, *given]) or "nothing"
        raise ConfigError(f"{what} cannot be called with {called} ({error}).") from error
    if context is not None:
        _from_context(what, function, given, context)


def _from_context(
    what: str, function: Any, given: Mapping[str, Any], context: Mapping[str, Any], named: bool = False
) -> dict[str, Any]:
    """Returns the context's values that a callable names or, unless ``named``, accepts in ``**kwargs``."""
    signature, taken = _signature(function), {}
    for name, key in CONTEXT.items():
        parameter, value = signature.parameters.get(name), context.get(name)
        if name in given:
            continue
        if value is not None and (parameter is not None or (_takes_all(signature) and not named)):
            taken[name] = value
        elif parameter is not None and parameter.default is parameter.empty:
            or_served = " or serve a model (reward.models.NAME.path)" if name == ROUTER else ""
            raise ConfigError(f"{what} needs {name}, which is not configured; set {key}{or_served}.")
    return taken
