"""The directory of a run: checks it, makes it and locks it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dataflow.config.base import BaseConfig
from dataflow.config.loading.saved import CONFIG
from dataflow.errors import ConfigError
from dataflow.files import unmakable, written

LOCK = ".lock"
"""File of a run's directory that its process locks, with the id of that process."""

_TEMPORARY = re.compile(r"\..+\.\d+")


def check_directory(config: BaseConfig) -> None:
    """Checks that the run's directory can be made, without making it."""
    runs = Path(config.runs)
    if (why := unmakable(runs)) is not None:
        raise ConfigError(f"runs={config.runs}: {why}")
    if config.name and _taken(runs / config.name, config):
        raise ConfigError(f"name={config.name}: {runs / config.name!s} exists; choose another name or remove it.")


def check_run(directory: Path) -> None:
    """Checks that there is a run in a directory."""
    if (directory / CONFIG).is_file():
        return
    raise ConfigError(f"no run at '{directory}'; give a run directory (runs/NAME).")


def make_directory(config: BaseConfig, stem: str) -> Path:
    """Makes the run's directory: under the given name, or a free one of pipeline, policy and a number."""
    runs = Path(config.runs)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        if config.name:
            check_directory(config)  # once more, as another run may have begun
            (runs / config.name).mkdir(exist_ok=True)
            return runs / config.name
        for number in itertools.count(1):
            path = runs / f"{stem}-{config.policy.preset}-{number}"
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise ConfigError(f"runs={config.runs}: cannot write there: {error.strerror}.") from error
    raise AssertionError  # the numbers have no end


def _taken(path: Path, config: BaseConfig) -> bool:
    """Whether there is a run or anything else at a path.

    With ``resume=auto`` a directory without a configuration is free: its process was killed before it wrote one.
    """
    if config.resume.mode != "auto" or not path.is_dir():
        return os.path.lexists(path)
    return any(not name.startswith(".") for name in os.listdir(path))


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a run's directory; the system releases it when the process ends, however that happens.

    A ConfigError says that another process holds it, as the run has not ended. The temporary files that killed
    processes left (:func:`dataflow.files.replaced`) are removed.
    """
    try:
        file = (directory / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"run '{directory}' cannot be written ({error.strerror}); make it writable.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            who = file.read().strip()
            raise ConfigError(
                f"run '{directory}' is still running{f' (process {who})' if who else ''}; wait for its end, or stop it."
            ) from error
        with written("lock", directory / LOCK):
            file.truncate(0)
            # Unbuffered: what could not be written would be written again when the file is closed.
            os.write(file.fileno(), str(os.getpid()).encode())
        for left in directory.glob(".*"):
            if _TEMPORARY.fullmatch(left.name) and left.is_file():
                left.unlink(missing_ok=True)
        yield


def check_unlocked(directory: Path) -> None:
    """Checks that no process runs in a run's directory; see :func:`locked`."""
    if (directory / LOCK).exists():
        with locked(directory):
            return
