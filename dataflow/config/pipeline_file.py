"""Calls of a pipeline file's functions, whose results are checked and whose errors name the file and line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from dataflow.config.run import RunConfig, line_in
from dataflow.errors import ConfigError, DataflowError, PipelineError
from dataflow.graph import Pipeline


def pipeline_of(module: ModuleType, config: RunConfig) -> Pipeline:
    """Returns the pipeline that the file's ``pipeline(config)`` builds.

    Raises:
        PipelineError: it raises, or returns something else.
        UserError: what the function itself raises as one.
    """
    made = _called(module, "pipeline", config)
    if not isinstance(made, Pipeline):
        raise PipelineError(
            f"pipeline file '{module.__file__}': pipeline(config) returned {_kind(made)}; return a Pipeline(...)."
        )
    return made


def inputs_of(module: ModuleType, config: RunConfig) -> Mapping[str, Callable[[int], Any]]:
    """Returns the fields that the file's ``inputs(config)`` adds, each a function of the step; none without one.

    The function gets a copy of the configuration: what it changes there does not reach the run.

    Raises:
        ConfigError: it raises, or returns something else.
        UserError: what the function itself raises as one.
    """
    if not hasattr(module, "inputs"):
        return {}
    made = _called(module, "inputs", config.model_copy(deep=True))
    if not isinstance(made, Mapping):
        raise ConfigError(
            f"pipeline file '{module.__file__}': inputs(config) returned {_kind(made)}; return a dict of functions of "
            "the step, by field name."
        )
    for name, of in made.items():
        if not isinstance(name, str) or not callable(of):
            raise ConfigError(
                f"pipeline file '{module.__file__}': inputs(config) gave {_kind(of)} for {name!r}; give a function of "
                "the step, such as lambda step: value."
            )
    return made


def _called(module: ModuleType, name: str, config: RunConfig) -> Any:
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"pipeline file '{module.__file__}': '{name}' is {_kind(function)}; define {name}(config).")
    try:
        return function(config)
    except (DataflowError, KeyboardInterrupt):
        raise
    except BaseException as error:
        kind = PipelineError if name == "pipeline" else ConfigError
        said = " ".join(str(error).split()).rstrip(".")
        raise kind(
            f"pipeline file '{module.__file__}': {name}(config) raised {type(error).__name__}"
            f"{f': {said}' if said else ''}{line_in(error, module.__file__ or '')}."
        ) from error


def _kind(value: object) -> str:
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
