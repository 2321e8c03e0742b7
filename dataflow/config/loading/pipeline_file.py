"""Loads a pipeline file and calls its functions; an error in it names the file and the line."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from dataflow.config.base import BaseConfig, PipelineConfig
from dataflow.errors import ConfigError, PipelineError, UserError
from dataflow.files import no_file
from dataflow.graph import Pipeline
from dataflow.system.loopback import ray_stays_on_loopback
from dataflow.usercode.failures import named


def load_pipeline_file(path: str | Path) -> ModuleType:
    """Runs a pipeline file and returns it as a module with ``pipeline(config)`` and ``Config``.

    A file without a ``Config`` gets :class:`~dataflow.config.base.PipelineConfig`.

    Raises:
        ConfigError: the file is missing, is not a Python file, cannot be imported (its error is chained), lacks
            ``pipeline``, or has another kind of ``Config``.
    """
    file = Path(path)
    if (why := no_file(file)) is not None:
        raise ConfigError(f"no pipeline file '{path}': {why}; give the path of a .py file.")
    if file.suffix != ".py":
        raise ConfigError(f"pipeline file '{path}' is not a .py file.")
    loader = SourceFileLoader(f"dataflow_pipeline_{file.stem}", str(file.resolve()))
    module = ModuleType(loader.name)
    module.__file__ = loader.path
    # Classes look up their module while they are defined. It is removed afterwards, so that cloudpickle sends the
    # file's functions to Ray workers by value, as these cannot import the file.
    sys.modules[loader.name] = module
    ray_stays_on_loopback()  # the file may import Ray
    try:
        with _errors_of(file, "cannot be loaded"):
            loader.exec_module(module)
    finally:
        del sys.modules[loader.name]
    if not callable(getattr(module, "pipeline", None)):
        raise ConfigError(f"pipeline file '{path}' lacks 'pipeline'; define pipeline(config) -> Pipeline.")
    config = module.__dict__.setdefault("Config", PipelineConfig)
    if not (isinstance(config, type) and issubclass(config, BaseConfig)):
        raise ConfigError(
            f"pipeline file '{path}': 'Config' is {config!r}; define 'class Config(PipelineConfig)', or "
            "'class Config(RunConfig)' to train a language model."
        )
    return module


def pipeline_of(module: ModuleType, config: BaseConfig) -> Pipeline:
    """Returns the pipeline that the file's ``pipeline(config)`` builds.

    Raises:
        PipelineError: the stages do not fit, or it returns something else.
        ConfigError: it raises.
    """
    with _errors_of(module.__file__, "pipeline(config) failed"):
        made = module.pipeline(config)
    if not isinstance(made, Pipeline):
        raise PipelineError(
            f"pipeline file '{module.__file__}': pipeline(config) returned {made!r}; return a Pipeline(...)."
        )
    return made


def inputs_of(module: ModuleType, config: BaseConfig) -> Mapping[str, Callable[[int], Any]]:
    """Returns the fields that the file's ``inputs(config)`` adds, each a function of the step; {} without one."""
    if not hasattr(module, "inputs"):
        return {}
    with _errors_of(module.__file__, "inputs(config) failed"):
        made: Mapping[str, Callable[[int], Any]] = module.inputs(config)
    if not isinstance(made, Mapping) or not all(map(callable, made.values())):
        raise ConfigError(
            f"pipeline file '{module.__file__}': inputs(config) returned {made!r}; return functions of the step by "
            "field name, such as {'level': lambda step: step}."
        )
    return made


@contextlib.contextmanager
def _errors_of(path: str | Path | None, what: str) -> Iterator[None]:
    """Raises errors of the file's code as a :class:`~dataflow.errors.UserError` with file and line."""
    file = Path(path or "")
    try:
        yield
    except UserError as error:
        line = _line_in(error, file)
        if not isinstance(error, PipelineError) or not line or f"{file.name}:" in str(error):
            raise
        raise PipelineError(f"pipeline file '{path}'{line}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"pipeline file '{path}' {what}{_line_in(error, file)}: {named(error).rstrip('.')}{_beside(error, file)}."
        ) from error


def _line_in(error: BaseException, file: Path) -> str:
    """Returns the last line of the file in the error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file.resolve())]
    return f" (line {lines[-1]})" if lines else ""


def _beside(error: BaseException, file: Path) -> str:
    """Returns the fix for a module that was not found, but lies beside the file."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not name or not ((file.parent / name).is_dir() or (file.parent / f"{name}.py").is_file()):
        return ""
    return f"; it lies beside the file, so start with PYTHONPATH={file.parent} in the environment"
