"""Loads a pipeline file and calls its functions; results are checked, and errors name the file and line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dataflow.config.base import BaseConfig, PipelineConfig
from dataflow.errors import ConfigError, PipelineError, UserError
from dataflow.files import nearest_path, no_file
from dataflow.graph import Pipeline
from dataflow.system.loopback import ray_stays_on_loopback
from dataflow.usercode.failures import is_interrupt, message_of


def load_pipeline_file(path: str | Path) -> ModuleType:
    """Runs a pipeline file and returns it as a module with ``pipeline(config)`` and ``Config``.

    A file without a ``Config`` gets :class:`~dataflow.config.base.PipelineConfig`.

    Raises:
        ConfigError: the file is missing, is not a Python file, cannot be imported (its error is chained), lacks
            ``pipeline``, or has another kind of ``Config``.
    """
    import sys
    from importlib.machinery import SourceFileLoader

    file = Path(path)
    if (why := no_file(file)) is not None:
        guess = nearest_path(path, file.parent, "*.py")
        raise ConfigError(f"no pipeline file '{path}': {why}{guess or '; give the path of a .py file.'}")
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
        loader.exec_module(module)
    except PipelineError as error:
        raise _placed(error, file) from error
    except UserError:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        message = message_of(error).rstrip(".")
        raise ConfigError(
            f"pipeline file '{path}' cannot be loaded{_line_in(error, file)}: "
            f"{type(error).__name__}{f': {message}' if message else ''}{_beside(error, file)}."
        ) from error
    finally:
        del sys.modules[loader.name]
    if not callable(getattr(module, "pipeline", None)):
        raise ConfigError(f"pipeline file '{path}' lacks 'pipeline'; define pipeline(config) -> Pipeline.")
    config = module.__dict__.setdefault("Config", PipelineConfig)
    if not (isinstance(config, type) and issubclass(config, BaseConfig)):
        raise ConfigError(
            f"pipeline file '{path}': 'Config' is {_kind(config)}; define 'class Config(PipelineConfig)', or "
            "'class Config(RunConfig)' to train a language model."
        )
    return module


def pipeline_of(module: ModuleType, config: BaseConfig) -> Pipeline:
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


def inputs_of(module: ModuleType, config: BaseConfig) -> Mapping[str, Callable[[int], Any]]:
    """Returns the fields that the file's ``inputs(config)`` adds, each a function of the step; {} without one.

    The function gets a copy of the configuration, so that its changes do not affect the run.

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


def _called(module: ModuleType, name: str, config: BaseConfig) -> Any:
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"pipeline file '{module.__file__}': '{name}' is {_kind(function)}; define {name}(config).")
    try:
        return function(config)
    except PipelineError as error:
        raise _placed(error, module.__file__ or "") from error
    except UserError:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        kind = PipelineError if name == "pipeline" else ConfigError
        message = message_of(error).rstrip(".")
        raise kind(
            f"pipeline file '{module.__file__}': {name}(config) raised {type(error).__name__}"
            f"{f': {message}' if message else ''}{_line_in(error, module.__file__ or '')}."
        ) from error


def _kind(value: object) -> str:
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"


def _beside(error: BaseException, file: Path) -> str:
    """Returns the fix for a module that was not found, but lies beside the file."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not name or not ((file.parent / name).is_dir() or (file.parent / f"{name}.py").is_file()):
        return ""
    return f"; it lies beside the file, so start with PYTHONPATH={file.parent} in the environment"


def _placed(error: PipelineError, file: str | Path) -> PipelineError:
    """Returns the error with file and line, unless it names them."""
    file = Path(file)
    if not (line := _line_in(error, file)) or f"{file.name}:" in str(error):
        return error
    return PipelineError(f"pipeline file '{file}'{line}: {error}")


def _line_in(error: BaseException, file: str | Path) -> str:
    """Returns the last line of the pipeline file in the error's traceback."""
    import traceback

    file = Path(file)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file.resolve())]
    return f" (line {lines[-1]})" if lines else ""
