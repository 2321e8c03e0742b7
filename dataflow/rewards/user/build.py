"""Builds the reward manager that a configuration names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dataflow.errors import ConfigError, an, nearest
from dataflow.rewards.user import sandbox as _sandbox  # noqa: F401 - registers its manager
from dataflow.rewards.user.managers import MANAGERS, Remote
from dataflow.rewards.user.verl_manager import VerlManager
from dataflow.usercode.copies import own_options
from dataflow.usercode.failures import is_interrupt
from dataflow.usercode.load import describe, load_file, pick


def build_manager(
    name: str, compute_score: Any, path: str | None = None, *, tokenizer: Any = None, **options: Any
) -> Any:
    """Returns a manager around a reward.

    Args:
        name: a registered manager, or a class in the file.
        compute_score: a function, or an object with ``compute_score``.
        path: Python file that defines the class. The class takes the reward and the options, or has ``run_single`` as
            verl's reward loop requires: see :class:`~dataflow.rewards.user.verl_manager.VerlManager`.
        tokenizer: the model's tokenizer or its path; only for classes with ``run_single``.
        options: of the manager.

    Raises:
        ConfigError: the name is unknown, or an option is unknown, missing or invalid.
    """
    what = f"reward manager '{name}'"
    options = own_options(options)
    kind = find_manager(name, path, options)
    if callable(getattr(kind, "run_single", None)):
        return VerlManager(compute_score, kind, tokenizer=tokenizer, **options)
    manager = _built(what, partial(kind, compute_score), options)
    if not callable(getattr(manager, "compute_score", None)):
        raise ConfigError(f"{what}: class '{kind.__name__}' has neither compute_score nor verl's run_single.")
    return manager


def scores_alone(name: str, path: str | None = None) -> bool:
    """Whether a manager scores by itself, so that no function, judge or model of the run is used."""
    return path is None and bool(getattr(MANAGERS.get(name), "alone", False))


def check_manager(name: str, found: Any, path: str | None = None, **options: Any) -> Mapping[str, Any]:
    """Checks, without starting anything, that a manager can be built; a user's own class is not.

    Args:
        name, path, options: see :func:`build_manager`.
        found: the function that it will call, or the class or object of that method.

    Returns:
        The limits that the manager declares; {} of one that declares none, and of a user's own.

    Raises:
        ConfigError: it cannot.
    """
    kind, options = find_manager(name, path, options), own_options(options)
    if path is not None:
        return {}
    what = f"reward manager '{name}'"
    if issubclass(kind, Remote):
        return Remote.limits_of(_built(what, partial(kind.pool_of, found), options))
    return limits_declared(_built(what, partial(kind, _score), options))


def limits_declared(reward: Any) -> dict[str, Any]:
    """Returns the limits that a reward object or a manager declares for its calls; {} if it declares none."""
    return dict(getattr(reward, "limits", None) or {})


def _score(**_fields: Any) -> float:
    """Stands for a reward that is not built yet."""
    return 0.0


def _built(what: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    try:
        return make(**options)
    except ConfigError:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        given = f"; correct reward.manager_kwargs ({', '.join(options)})" if options else ""
        raise ConfigError(f"{what} cannot be built: {describe(error)}{given}.") from error


def find_manager(name: str, path: str | None = None, options: Mapping[str, Any] | None = None) -> Any:
    """Returns a manager's class. Cheap enough to be called before a run starts, as a check.

    Raises:
        ConfigError: the name is unknown, or an option is unknown or missing.
    """
    what = f"reward manager '{name}'"
    kind = _find(name, path)
    if not isinstance(kind, type):
        raise ConfigError(f"{what} is {an(type(kind).__name__)}; give a class.")
    if not callable(getattr(kind, "run_single", None)):
        _check_options(what, kind, options or {})
    return kind


def _find(name: str, path: str | None) -> Any:
    if path is not None:
        where = f"reward manager '{name}': path={path}"
        module = load_file(path, where)
        if getattr(module, name, None) is not None or name not in MANAGERS:
            return pick(module, name, where)
    if name not in MANAGERS:
        hint = nearest(name, MANAGERS) or f"; give {', '.join(MANAGERS)}, or the path of a file that defines it."
        raise ConfigError(f"reward manager '{name}' is unknown{hint}")
    return MANAGERS[name]


def _check_options(what: str, kind: type, options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    takes = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        for option in options:
            if option not in takes:
                hint = nearest(option, takes) or f"; it takes {', '.join(takes) or 'none'}."
                raise ConfigError(f"{what} takes no option '{option}'{hint}")
    for each in parameters:
        if each.name in takes and each.default is each.empty and each.name not in options:
            raise ConfigError(f"{what} needs the option '{each.name}'.")
