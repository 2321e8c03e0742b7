"""Fields: what the parameters of a stage's function say about them, by annotation and default.

Pure: no torch, no ray, no clock.
"""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeAlias

from dataflow.errors import PipelineError

Lag: TypeAlias = Literal["none", "latest", "carried"]
_CONTAINERS = (list, tuple, set, frozenset)


class Carried:
    """Marks a field of an earlier step, 1 + max_staleness steps back (the weights that a rollout samples with).

    Samples are then at most max_staleness steps old: step 5 of a run with max_staleness=1 samples with the weights of
    step 3, where an on-policy step samples with those of step 4.
    """


class Latest:
    """Marks a field of the previous step, whatever the staleness (the weights that a trainer continues from)."""


class Read(NamedTuple):
    """One field that a stage reads, the step it is read from, and whether it may be absent (then it is None)."""

    field: str
    lag: Lag = "none"
    optional: bool = False


def read_of(fn: Callable[..., Any], parameter: inspect.Parameter, around: Mapping[str, Any]) -> Read:
    """Returns the field that a parameter stands for.

    Args:
        fn: the stage's function.
        parameter: one of those before ``*``.
        around: local names of the function or class in which ``fn`` was defined.

    Raises:
        PipelineError: a default other than None, or an annotation that cannot be resolved.
    """
    return Read(parameter.name, _lag(fn, parameter, around), _is_optional(fn, parameter))


def _is_optional(fn: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    """Returns whether the field may be absent: its parameter has a default, which must be None."""
    if parameter.default is inspect.Parameter.empty:
        return False
    if parameter.default is not None:
        name, value = parameter.name, parameter.default
        raise PipelineError(
            f"stage '{fn.__name__}': field '{name}' has the default {value!r}; give None, which makes the field "
            f"optional, or move '{name}' behind the *, which makes it an option."
        )
    return True


def _lag(fn: Callable[..., Any], parameter: inspect.Parameter, around: Mapping[str, Any]) -> Lag:
    """Returns the lag of a field, from the type that its parameter is annotated with."""
    if parameter.annotation is inspect.Parameter.empty:
        return "none"
    where = f"stage '{fn.__name__}': the annotation '{_text(parameter.annotation)}' of field '{parameter.name}'"
    alone = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    plain = inspect.unwrap(fn)
    try:
        kind = typing.get_type_hints(alone, getattr(plain, "__globals__", {}), dict(around), include_extras=True)
    except Exception as error:
        raise PipelineError(
            f"{where} cannot be resolved ({error}), and might say that the field comes from an earlier step; import "
            "its names where the stage is made, not under TYPE_CHECKING."
        ) from error
    found = list(dict.fromkeys(_lags(kind[parameter.name])))
    if len(found) > 1:
        raise PipelineError(f"{where} says both Carried and Latest; give one of them.")
    if not found and any(_mentions(kind[parameter.name])):
        raise PipelineError(
            f"{where} has Carried or Latest inside another type or a text; write Annotated[TYPE, Carried], or Carried "
            "alone."
        )
    return found[0] if found else "none"


def _lags(kind: Any) -> Iterator[Lag]:
    """Yields the lags that a type declares: itself, as metadata of Annotated, in a union, or behind an alias."""
    if (own := _marked(kind)) is not None:
        yield own
    elif metadata := getattr(kind, "__metadata__", ()):
        yield from _lags(kind.__origin__)
        yield from (lag for item in metadata if (lag := _marked(item)) is not None)
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for item in typing.get_args(kind):
            yield from _lags(item)
    else:
        for alias in ("__value__", "__supertype__"):  # of a type statement, of a NewType
            if (behind := getattr(kind, alias, None)) is not None:
                yield from _lags(behind)


def _marked(item: Any) -> Lag | None:
    """Returns the lag of a marker: a class, a generic one with its types, or an object; None for anything else."""
    kind = origin if isinstance(origin := typing.get_origin(item) or item, type) else type(item)
    return "carried" if issubclass(kind, Carried) else "latest" if issubclass(kind, Latest) else None


def _mentions(kind: Any) -> Iterator[bool]:
    """Yields True for each marker inside a type, where it says nothing: an argument, a bound, a text, a container."""
    bounds = (kind.__bound__, *kind.__constraints__) if isinstance(kind, typing.TypeVar) else ()
    held = (*kind, *kind.values()) if isinstance(kind, dict) else kind if isinstance(kind, _CONTAINERS) else ()
    for item in (*held, *typing.get_args(kind), *bounds):
        yield from (True for _ in _lags(item))
        if getattr(item, "__forward_arg__", item) in (Carried.__name__, Latest.__name__):
            yield True
        yield from _mentions(item)


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def names_around(fn: Callable[..., Any], frame: FrameType) -> Mapping[str, Any]:
    """Returns the local names of the function or class that defines ``fn``, if that still runs.

    A function's closure lacks names of the enclosing function that only its annotations use. Names of another function
    that makes a stage of it mean something else.

    Args:
        fn: the stage's function.
        frame: that makes the stage; the enclosing function is it or below it on the stack.
    """
    plain = inspect.unwrap(fn)
    home = getattr(plain, "__qualname__", "").rpartition(".")[0].removesuffix(".<locals>")
    around: FrameType | None = frame if home else None
    while around is not None:
        if around.f_code.co_qualname == home and around.f_globals is getattr(plain, "__globals__", None):
            return around.f_locals
        around = around.f_back
    return {}


def placed(fn: Any) -> str:
    """Returns the name of a function with its file and line."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    name = f"'{getattr(fn, '__name__', fn)}'"
    return name if code is None else f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
