"""Reward functions and classes: loaded from a file or by name, checked, and built into what the agent calls."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dataflow.errors import ConfigError, an
from dataflow.rewards.user.adapter import RewardAdapter, adapted_call, scorer_of
from dataflow.usercode.copies import own_options
from dataflow.usercode.failures import is_interrupt
from dataflow.usercode.load import describe, is_async, load_file, name_of, pick

FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The keywords that verl calls a reward function with, in its order."""

ROUTER = "reward_router_address"
CONTEXT = {ROUTER: "reward.router_address", "reward_model_tokenizer": "reward.model_tokenizer"}
"""verl's further keywords, passed to functions that accept them, and the configuration key of each."""

MADE = "_dataflow_made"
"""Attribute of a built reward that holds the arguments of :func:`build_reward`."""

_SYNC_METHODS = ("retry_on", "endpoint", "tokens", "usage")
"""Methods that the agent calls on its event loop, so they may not be async."""


def load_reward(
    path: str,
    name: str = "compute_score",
    reward_kwargs: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the function, class or object that a Python file defines, ready for :func:`build_reward`.

    Cheap enough to be called before a run starts, as a check.

    Args:
        path: of the Python file.
        name: the name in that file.
        reward_kwargs: further keywords of the function, or of the class's constructor.
        context: the configured values of :data:`CONTEXT`; None skips the check that they suffice.

    Raises:
        ConfigError: the file or name does not exist, the file cannot be imported, the object cannot score, does not
            accept ``reward_kwargs``, or requires a keyword of :data:`CONTEXT` that is not configured.
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
        raise ConfigError(f"{where}: '{name}' is {an(type(found).__name__)}; give a function or a class.")
    return found


def takes(found: Any, keyword: str) -> bool:
    """Whether :func:`build_reward` passes a keyword of :data:`CONTEXT` to what :func:`load_reward` has returned."""
    score = _method_signature(found) if isinstance(found, type) else _signature(scorer_of(found))
    named = keyword in score.parameters or (isinstance(found, type) and keyword in _signature(found).parameters)
    return named or any(each.kind is each.VAR_KEYWORD for each in score.parameters.values())


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        # A builtin may have no signature; a mismatch then shows in the first call.
        return inspect.signature(lambda **_keywords: None)


def _method_signature(kind: Any) -> inspect.Signature:
    """Returns the signature of a class's compute_score without ``self``."""
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
    """Checks that a callable accepts ``fields``, ``given`` and, unless it is None, the values of ``context``.

    Raises:
        ConfigError: it does not.
    """
    error = _misfit(signature, given, **dict.fromkeys(fields))
    if error is not None and not (fields and _by_position(signature, given)):
        called = ", ".join([*fields, *given]) or "nothing"
        raise ConfigError(f"{what} cannot be called with {called} ({error}).") from error
    if context is not None:
        _from_context(what, signature, given, context)


def _misfit(signature: inspect.Signature, given: Mapping[str, Any], /, *order: Any, **fields: Any) -> TypeError | None:
    """Returns the error of a call with these arguments, assuming that the context has every value; None if it fits."""
    from_context = {name: None for name in CONTEXT if name in signature.parameters}
    try:
        signature.bind(*order, **fields, **{**from_context, **given})
    except TypeError as error:
        return error
    return None


def _by_position(signature: inspect.Signature, given: Mapping[str, Any]) -> bool:
    """Whether verl's four fields fit by position only, and no parameter's name contradicts that order."""
    if _misfit(signature, given, **dict.fromkeys(FIELDS)) is None or _misfit(signature, given, *FIELDS) is not None:
        return False
    places = [each for each in signature.parameters.values() if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    places += places[-1:] * len(FIELDS)  # a final *args takes the rest
    nameless = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return all(each.kind in nameless or each.name == name for each, name in zip(places, FIELDS, strict=False))


def _from_context(
    what: str, signature: inspect.Signature, given: Mapping[str, Any], context: Mapping[str, Any], named: bool = False
) -> dict[str, Any]:
    """Returns the context's values that a callable names or, unless ``named``, accepts in ``**kwargs``.

    Raises:
        ConfigError: it requires a value that is not configured.
    """
    takes_all = not named and any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    taken = {}
    for name, key in CONTEXT.items():
        parameter, value = signature.parameters.get(name), context.get(name)
        if name in given:
            continue
        if value is not None and (parameter is not None or takes_all):
            taken[name] = value
        elif parameter is not None and parameter.default is parameter.empty:
            or_served = " or serve a model (reward.models.NAME.path)" if name == ROUTER else ""
            raise ConfigError(f"{what} needs {name}, which is not configured; set {key}{or_served}.")
    return taken


def build_reward(
    found: Any, reward_kwargs: Mapping[str, Any] | None = None, context: Mapping[str, Any] | None = None
) -> Any:
    """Returns a reward that is called with verl's four keywords.

    The dicts and lists in ``reward_kwargs`` are copied for the constructor, or for each call of a function.

    Args:
        found: a function, a class, or an object that is callable or has a method ``compute_score``.
        reward_kwargs: keywords of the class's constructor, else of each call.
        context: values for :data:`CONTEXT`, passed to a constructor that names them, and to a function or
            ``compute_score`` that names them or accepts ``**kwargs``.

    Returns:
        ``found`` or an instance of it, wrapped if its calls need further keywords.

    Raises:
        ConfigError: the class cannot be built, or requires a value that the context lacks.
    """
    given, known, what = dict(reward_kwargs or {}), dict(context or {}), f"reward '{name_of(found)}'"
    scorer = found
    if isinstance(found, type):
        scorer = _instance(found, {**_from_context(what, _signature(found), given, known, named=True), **given})
    score = scorer_of(scorer)
    options = given if scorer is found else {}
    filled = _with_options(score, {**_from_context(what, _signature(score), options, known), **options})
    reward = scorer if filled is score else filled if scorer is score else RewardAdapter(scorer, filled)
    with suppress(AttributeError, TypeError):  # an object without a __dict__
        setattr(reward, MADE, (found, given, known))
    return reward


def _instance(kind: type, given: dict[str, Any]) -> Any:
    try:
        return kind(**own_options(given))
    except BaseException as error:
        if isinstance(error, ConfigError) or is_interrupt(error):
            raise
        raise ConfigError(f"reward class '{kind.__name__}' cannot be built: {describe(error)}.") from error


def _with_options(score: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    """Returns ``score`` with ``given`` filled in, to be called with verl's four keywords.

    Each call gets its own copy of the dicts and lists in ``given``, so that no call sees another's changes.
    """
    if _by_position(_signature(score), given):
        return adapted_call(score, lambda fields: (tuple(fields[name] for name in FIELDS), own_options(given)))
    if not given:
        return score
    return adapted_call(score, lambda fields: ((), {**own_options(given), **fields}))


def find_reward(target: str) -> Any:
    """Returns the object that ``"package.module:name"`` names.

    Raises:
        ConfigError: the module or the name does not exist.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"reward '{target}' cannot be found: {describe(error)}.") from error


def check_methods(reward: Any) -> None:
    """Checks the optional methods of a reward object.

    Raises:
        ConfigError: an attribute with the name of such a method is not callable, or is async where it must not be.
    """
    what = f"reward '{name_of(reward)}'"
    if all(callable(getattr(reward, name, None)) for name in ("compute_group", "post_process_scores")):
        raise ConfigError(f"{what} has both compute_group and post_process_scores; give one, which may do both.")
    for name in ("compute_group", "post_process_scores", "log", *_SYNC_METHODS):
        found = getattr(reward, name, None)
        if found is not None and not callable(found):
            kind = type(found).__name__
            raise ConfigError(f"{what}: its '{name}' is {an(kind)}, where the agent expects a method; rename it.")
        if name in _SYNC_METHODS and found is not None and is_async(found):
            raise ConfigError(
                f"{what}: its '{name}' is async, but the agent calls it without awaiting; write it as a plain def."
            )
