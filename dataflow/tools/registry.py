"""Tools: functions and classes of the user's, their descriptions for the model, and the file they are loaded from."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from dataflow.errors import ConfigError, DataError, nearest
from dataflow.usercode.load import load_file, pick

READY = {"calculator": "dataflow.tools.calculator:calculator"}
"""The tools that come with dataflow."""

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


@dataclass(frozen=True)
class Tool:
    """A function or class that the model may call.

    Attributes:
        name: that the model calls it by.
        target: the function or class.
        description: the description given to the model.
    """

    name: str
    target: Callable[..., Any]
    description: str

    @staticmethod
    def of(target: Any, where: str = "tool") -> Tool:
        """Returns the tool that a function or class is, with or without ``@tool``.

        Raises:
            ConfigError: it cannot be called, or a model cannot give its arguments.
        """
        own_name = getattr(target, "__name__", type(target).__name__)
        if not callable(target) or (isinstance(target, type) and "__call__" not in dir(target)):
            what = (
                f"class '{own_name}' has no method __call__" if callable(target) else f"'{target!r}' is not a function"
            )
            raise ConfigError(f"{where}: {what}; a tool is a function, or a class whose instances can be called.")
        name, description = vars(target).get(_MARK, (None, None)) if hasattr(target, "__dict__") else (None, None)
        if description is None:
            description = inspect.cleandoc(getattr(target, "__doc__", None) or "").partition("\n\n")[0]
        made = Tool(name or own_name, target, " ".join(description.split()))
        try:
            _ = made.schema, made.own
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        except Exception as error:  # a type hint that cannot be resolved, or has no JSON schema
            raise ConfigError(
                f"{where}: the parameters of tool '{made.name}' cannot be described ({error}); give them types that "
                "JSON has."
            ) from error
        return made

    @property
    def is_class(self) -> bool:
        return isinstance(self.target, type)

    @cached_property
    def _from_model(self) -> list[inspect.Parameter]:
        """The parameters that the model gives."""
        call = self.target.__call__ if isinstance(self.target, type) else self.target
        found = list(inspect.signature(call).parameters.values())[int(self.is_class) :]
        for each in found:
            if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL):
                raise ConfigError(
                    f"tool '{self.name}': a model gives arguments by name, so '{each.name}' must have one."
                )
        if self.is_class:
            return [each for each in found if each.kind is not each.VAR_KEYWORD]
        return [each for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]

    @cached_property
    def own(self) -> inspect.Signature:
        """The parameters that come from the sample."""
        found = inspect.signature(self.target)
        if self.is_class:
            return found
        kept = [each for each in found.parameters.values() if each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
        return found.replace(parameters=kept)

    @cached_property
    def _model(self) -> type[BaseModel]:
        call = self.target.__call__ if isinstance(self.target, type) else self.target
        plain = call if inspect.isroutine(call) else type(call).__call__
        hints = typing.get_type_hints(plain, include_extras=True)
        fields: dict[str, Any] = {}
        for at, each in enumerate(self._from_model):
            default = ... if each.default is each.empty else each.default
            # Under names of our own, as pydantic reserves some, such as "copy" or "model_x".
            fields[f"p{at}"] = (hints.get(each.name, Any), Field(default, alias=each.name))
        return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool's JSON schema, in the form of a chat template's ``tools``."""
        parameters = _untitled(self._model.model_json_schema(by_alias=True))
        parameters.pop("additionalProperties", None)
        parameters.setdefault("properties", {})
        about = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": about}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model's arguments, converted to the types of the tool's parameters.

        Raises:
            ValueError: one is missing, unknown or of another type; the message is for the model.
        """
        try:
            read = self._model.model_validate(dict(given))
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()]
            raise ValueError(f"wrong arguments for {self.name}: {'; '.join(faults)}") from error
        # Arguments that were left out get the function's defaults.
        return {each.name: getattr(read, f"p{at}") for at, each in enumerate(self._from_model) if each.name in given}

    def check_own(self, given: Mapping[str, Any], where: str) -> None:
        """Checks that the tool accepts a sample's arguments.

        Raises:
            DataError: it does not, or needs further ones.
        """
        try:
            self.own.bind(**given)
        except TypeError as error:
            raise DataError(f"{where}: tool '{self.name}' cannot be called with its tools_kwargs ({error}).") from error


def _untitled(schema: Any) -> Any:
    """Returns a schema without the titles that pydantic adds, which are useless to a model."""
    if isinstance(schema, list):
        return [_untitled(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # A property may itself be called "title": its value is a schema, that of pydantic's a text.
    return {key: _untitled(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}


def load_tools(path: str | None = None, names: Sequence[str] = (), where: str = "tools.path") -> dict[str, Tool]:
    """Returns tools by name: the user's file's, and those that come with dataflow.

    Args:
        path: of a Python file; all that is marked with ``@tool`` in it, unless ``names`` says which.
        names: of tools or, in the file, of functions and classes without a mark.
        where: the setting that named the file, to begin an error with.

    Raises:
        ConfigError: no such file or name, something that cannot be called, two tools of one name, or no tool at all.
    """
    where = f"{where}={path}" if path else "tools.names"
    return choose_tools(load_file(path, where) if path else None, names, where)


def choose_tools(module: ModuleType | None, names: Sequence[str], where: str) -> dict[str, Tool]:
    """Returns the tools of a loaded file, see :func:`load_tools`."""
    found = marked_tools(module, where)
    if not names:
        if not found:
            what = "it marks nothing with @tool; mark a function, or name one in tools.names"
            raise ConfigError(f"{where}: {what if module else 'no tool is named; give one, or tools.path'}.")
        return found
    chosen: dict[str, Tool] = {}
    for name in names:
        if name in found:
            one = found[name]
        elif module is not None and getattr(module, name, None) is not None:
            one = Tool.of(pick(module, name, where), where)
        elif name in READY:
            place, _, attribute = READY[name].partition(":")
            one = Tool.of(getattr(importlib.import_module(place), attribute), where)
        else:
            known = [*found, *READY]
            raise ConfigError(f"{where}: there is no tool '{name}'{nearest(name, known) or _list(known)}")
        _add(chosen, one, where)
    return chosen


def marked_tools(module: ModuleType | None, where: str) -> dict[str, Tool]:
    """Returns what a loaded file marks with ``@tool``, by name.

    Raises:
        ConfigError: two tools of one name, or one that cannot be called.
    """
    found: dict[str, Tool] = {}
    for value in list(vars(module).values()) if module else []:
        if hasattr(value, "__dict__") and _MARK in vars(value):
            _add(found, Tool.of(value, where), where)
    return found


def _list(names: Sequence[str]) -> str:
    return f"; there is {', '.join(names)}."


def _add(tools: dict[str, Tool], one: Tool, where: str) -> None:
    twin = tools.get(one.name)
    if twin is not None and twin.target is not one.target:
        raise ConfigError(f"{where}: two tools are called '{one.name}'; give one another name in @tool.")
    tools.setdefault(one.name, one)
