"""Tools: functions and classes of the user's, and their descriptions for the model."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from dataflow.errors import ConfigError, DataError, nearest

READY = {"calculator": "dataflow.tools.calculator"}
"""The tools that come with dataflow, and their modules."""

_MARK = "_dataflow_tool"
F = TypeVar("F", bound=Callable[..., Any])


def tool(name: str | None = None, *, description: str | None = None) -> Callable[[F], F]:
    """Makes a function or a class a tool.

    The model gives the parameters before ``*``, which are described to it; those after ``*`` come from the sample's
    ``extra_info["tools_kwargs"][name]``. A function is called with both. A class has an instance per conversation: it
    is built at the first call with the sample's arguments, called with the model's, and closed at the end if it has a
    method ``close``. All of these may be async.

    Args:
        name: that the model calls it by; its Python name if None.
        description: the description given to the model; the first paragraph of the docstring if None.

    >>> @tool("add")
    ... def plus(a: int, b: int, *, unit: str = ""):
    ...     "Adds two numbers."
    ...     return f"{a + b}{unit}"
    >>> Tool.of(plus).schema["function"]["parameters"]["required"]
    ['a', 'b']
    """
    if name is not None and not isinstance(name, str):
        raise ConfigError("@tool takes the tool's name: write @tool() or @tool('name').")

    def wrap(found: F) -> F:
        setattr(found, _MARK, (name, description))
        return found

    return wrap


class Refused(ValueError):
    """A call that cannot be made; the message is for the model."""


class _Schema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it says no more than the name


@dataclass(frozen=True)
class Tool:
    """A function or class that the model may call."""

    name: str
    target: Callable[..., Any]
    own: inspect.Signature  # the parameters that come from the sample
    model: type[BaseModel]  # those that come from the model, by alias
    schema: dict[str, Any]  # in the form of a chat template's `tools`

    @staticmethod
    def of(target: Any, where: str = "tool") -> Tool:
        """Returns the tool that a function or class is, with or without ``@tool``, or raises a ConfigError."""
        if not callable(target) or (isinstance(target, type) and "__call__" not in dir(target)):
            raise ConfigError(
                f"{where}: '{getattr(target, '__name__', target)}' is no tool; a tool is a function, or a class with a "
                "method __call__."
            )
        name, description = vars(target).get(_MARK, (None, None))
        name = name or getattr(target, "__name__", type(target).__name__)
        if description is None:
            description = inspect.cleandoc(target.__doc__ or "").partition("\n\n")[0]
        try:
            own, model = _parameters(name, target)
            parameters = {"properties": {}, **model.model_json_schema(by_alias=True, schema_generator=_Schema)}
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        except Exception as error:  # a type hint that cannot be resolved, or has no JSON schema
            raise ConfigError(
                f"{where}: the parameters of tool '{name}' cannot be described ({error}); give types that JSON has."
            ) from error
        for key in ("title", "additionalProperties"):
            parameters.pop(key, None)
        about = {"name": name, "description": " ".join(description.split()), "parameters": parameters}
        return Tool(name, target, own, model, {"type": "function", "function": about})

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model's arguments, converted to the types of the tool's parameters, or raises Refused."""
        try:
            read = self.model.model_validate(dict(given))
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()]
            raise Refused(f"wrong arguments for {self.name}: {'; '.join(faults)}") from error
        # Arguments that were left out get the function's defaults.
        fields = type(read).model_fields
        return {str(fields[field].alias): getattr(read, field) for field in read.model_fields_set}

    def check_own(self, given: Mapping[str, Any], where: str) -> None:
        """Raises a DataError unless the tool accepts a sample's arguments, and needs no further ones."""
        try:
            self.own.bind(**given)
        except TypeError as error:
            raise DataError(f"{where}: tool '{self.name}' cannot be called with its tools_kwargs ({error}).") from error


def _parameters(name: str, target: Any) -> tuple[inspect.Signature, type[BaseModel]]:
    """Returns the parameters that the sample gives, and those that the model gives."""
    own, call = inspect.signature(target), target
    if isinstance(target, type):
        call = target.__call__
        given = [
            each for each in list(inspect.signature(call).parameters.values())[1:] if each.kind != each.VAR_KEYWORD
        ]
    else:
        sample = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        given = [each for each in own.parameters.values() if each.kind not in sample]
        own = own.replace(parameters=[each for each in own.parameters.values() if each.kind in sample])
    hints = typing.get_type_hints(call if inspect.isroutine(call) else type(call).__call__, include_extras=True)
    fields: dict[str, Any] = {}
    for at, each in enumerate(given):
        if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL):
            raise ConfigError(f"tool '{name}': a model gives arguments by name, so '{each.name}' must have one.")
        default = ... if each.default is each.empty else each.default
        # Under names of our own, as pydantic reserves some, such as "copy" or "model_x".
        fields[f"p{at}"] = (hints.get(each.name, Any), Field(default, alias=each.name))
    return own, create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)


def choose_tools(module: ModuleType | None, names: Sequence[str], where: str) -> dict[str, Tool]:
    """Returns tools by name: all that the user's file marks with ``@tool``, unless ``names`` says which.

    Names are of tools or, in the file, of functions and classes without a mark. ``where`` begins an error.
    """
    marked = [value for value in vars(module).values() if _MARK in getattr(value, "__dict__", ())] if module else []
    found = _by_name([Tool.of(value, where) for value in marked], where)
    if not names and not found:
        raise ConfigError(f"{where}: nothing is marked with @tool; mark a function, or name one in tools.names.")
    chosen = []
    for name in names:
        if name in found:
            chosen.append(found[name])
            continue
        owner = module if hasattr(module, name) else importlib.import_module(READY[name]) if name in READY else None
        if owner is None:
            known = [*found, *READY]
            hint = nearest(name, known) or f"; there is {', '.join(known)}."
            raise ConfigError(f"{where}: there is no tool '{name}'{hint}")
        chosen.append(Tool.of(getattr(owner, name), where))
    return _by_name(chosen, where) if names else found


def _by_name(tools: Sequence[Tool], where: str) -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    for one in tools:
        if found.setdefault(one.name, one).target is not one.target:
            raise ConfigError(f"{where}: two tools are called '{one.name}'; give one another name in @tool.")
    return found
