"""The checkpoints of a run on disk: written beside their place, checked by hashes, kept and removed by rules.

    runs/NAME/checkpoints/
      step_000012/            whole: it was renamed to this name after all its files were on the disk
        manifest.json         step, and size and SHA-256 of each other file
        trainer/              files of torch.distributed.checkpoint
        states.pkl            states of the graph
        samples_000013.pkl    samples that were drawn before the checkpoint, and are trained on after it
      .step_000024.PID/       being written; the next process that writes a checkpoint removes what a killed one left
      drawn/                  samples for checkpoints to come

The disk alone decides which checkpoints are kept, so a resumed run keeps the same ones as one that never stopped.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from dataflow.errors import ConfigError, DataError
from dataflow.files import replaced, sha256_of
from dataflow.running.reporting.tracking import METRICS, read_metrics
from dataflow.running.summary import evaluation_in
from dataflow.usercode.pickling import dump

if TYPE_CHECKING:
    from dataflow.config.base import BaseConfig

_MANIFEST = "manifest.json"
_STEP = re.compile(r"step_(\d{6,})")
_DRAWN = re.compile(r"\.?step_(\d{6,})\.pkl(\.\d+)?")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, with the weights of a step."""

    path: Path
    step: int

    def service(self, name: str) -> Path:
        """Returns the directory that a service wrote."""
        return self.path / name

    def states(self) -> dict[str, Any]:
        """Returns the states of the graph by field."""
        return dict(_load(self.path / "states.pkl"))

    def samples(self) -> dict[int, Any]:
        """Returns what was kept of later steps, by step."""
        return {int(file.stem.rpartition("_")[2]): _load(file) for file in sorted(self.path.glob("samples_*.pkl"))}


class CheckpointStore:
    """Writes, finds and removes a run's checkpoints. One process writes them, another one the samples that are kept for
    them; copies in further processes may read.

    A checkpoint is written by :meth:`begin`, which returns a directory to write to, and :meth:`commit`, or dropped by
    :meth:`discard`. Call these in one process, and in a thread if an event loop must not be blocked. All methods that
    write raise OSError if the disk fails, and leave what was whole before.

    Args:
        directory: of the checkpoints, in the run's; made with the first one.
        keep_last: newest checkpoints to keep, at least 1.
        keep_best: checkpoints to keep whose steps have the highest mean score in evaluations.
        keep_every: also keep those of each step that it divides; 0 for none.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep_last: int = 2, keep_best: int = 1, keep_every: int = 0
    ) -> None:
        self.directory = Path(directory).absolute()
        self.keep_last, self.keep_best, self.keep_every = keep_last, keep_best, keep_every

    # --- writing --------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """Makes a directory to write a checkpoint to, and removes those that killed processes left."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in self.directory.glob(".step_*"):
            # This process may still hash another one, whose copy has been written.
            if left == self._aside(step) or not left.name.endswith(f".{os.getpid()}"):
                _remove(left)
        self._aside(step).mkdir()
        return self._aside(step)

    def save_states(self, directory: Path, states: Mapping[str, Any]) -> None:
        """Writes the states of the graph, by field, into a checkpoint's directory."""
        _dump(directory / "states.pkl", dict(states))

    def keep(self, step: int, value: Any) -> None:
        """Keeps what was drawn for a step, pickled, until a checkpoint of that step or a later one is whole.

        The step is the one that trains on it. Another value of the same step is replaced.
        """
        path = self._drawn(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary:
            _dump(temporary, value)
            _sync(temporary)

    def link(self, step: int, directory: Path) -> None:
        """Puts what was kept of a step into a checkpoint's directory; FileNotFoundError if nothing was kept."""
        source, target = self._drawn(step), directory / f"samples_{step:06}.pkl"
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:  # the file system has no hard links
            shutil.copyfile(source, target)

    def commit(self, step: int) -> int:
        """Makes a checkpoint of the written files, and returns its bytes; then removes those that no rule keeps.

        It is whole, and on the disk, when this returns: no later failure of the process or the machine loses it.
        Checkpoints of later steps are removed: the run has resumed from an earlier one since.
        """
        aside = self._aside(step)
        try:
            size = _write_manifest(aside, step)
            if self._path(step).exists():  # it is torn, else the run would have resumed from it
                _remove(self._rename_aside(step))
            aside.rename(self._path(step))
        except Exception:
            self.discard(step)
            raise
        _sync(self.directory)
        try:
            self._retain(step)
        except (OSError, ConfigError) as error:
            logger.warning(f"older checkpoints in {self.directory} cannot be removed: {error}")
        return size

    def discard(self, step: int) -> None:
        """Removes what this process wrote of a checkpoint since :meth:`begin`; does nothing if there is nothing."""
        _remove(self._aside(step))

    def _retain(self, committed: int) -> None:
        """Removes the checkpoints that no rule keeps, and those of steps after the committed one."""
        kept = self._kept([step for step in self.whole() if step <= committed])
        aside = [self._rename_aside(step) for step in self._steps() if step not in kept]
        if aside:
            _sync(self.directory)
        for path in aside:
            _remove(path)
        for found in sorted((self.directory / "drawn").glob("*")):
            if (match := _DRAWN.fullmatch(found.name)) and int(match[1]) <= committed:
                found.unlink(missing_ok=True)

    def _kept(self, steps: list[int]) -> set[int]:
        """Returns which of the steps, in ascending order, the rules keep."""
        rows: dict[int, dict[str, float]] = {}
        for row in read_metrics(self.directory.parent / METRICS):
            rows.setdefault(row["step"], {}).update((name, value) for name, value in row.items() if value is not None)
        scores = {step: found[0] for step, row in rows.items() if (found := evaluation_in(row)) is not None}
        rated = sorted((step for step in steps if step in scores), key=lambda step: (scores[step], step))
        kept = {*steps[-self.keep_last :], *rated[len(rated) - min(self.keep_best, len(rated)) :]}
        return kept | {step for step in steps if self.keep_every and step % self.keep_every == 0}

    def _rename_aside(self, step: int) -> Path:
        """Renames a checkpoint, so that it is not taken for one while it is removed."""
        old = self.directory / f".step_{step:06}.old"
        _remove(old)
        return self._path(step).rename(old)

    # --- finding --------------------------------------------------------------------------------------------

    def whole(self) -> list[int]:
        """Returns the steps of the checkpoints that look whole: their files have the sizes that they should have."""
        return [step for step in self._steps() if self._torn(step, contents=False) is None]

    def newest(self) -> Checkpoint | None:
        """Returns the newest whole checkpoint, or None; warns of each newer one that is not whole."""
        for step in reversed(self._steps()):
            if (why := self._torn(step)) is None:
                return Checkpoint(self._path(step), step)
            logger.warning(f"checkpoint {self._path(step)} is not whole and is passed over: {why}.")
        return None

    def at(self, step: int) -> Checkpoint | None:
        """Returns the checkpoint of a step; None if there is none that is whole."""
        return Checkpoint(self._path(step), step) if self._torn(step) is None else None

    def _steps(self) -> list[int]:
        """Returns the steps that have a directory, in ascending order."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(
                f"checkpoints in {self.directory} cannot be read ({error.strerror}); let the run read them."
            ) from error
        return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))

    def _torn(self, step: int, *, contents: bool = True) -> str | None:
        """Returns why a checkpoint is not whole, None if it is; without ``contents``, sizes of files alone count."""
        path = self._path(step)
        try:
            listed = dict(json.loads((path / _MANIFEST).read_bytes())["files"])
            found = _files(path)
            wrong = sorted(found.keys() ^ listed.keys()) or [
                name
                for name, file in found.items()
                if file.stat().st_size != listed[name]["bytes"]
                or (contents and sha256_of(file) != listed[name]["sha256"])
            ]
        except OSError as error:
            return f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"
        except (ValueError, TypeError, KeyError):
            return f"{_MANIFEST} is cut off or changed"
        return f"{wrong[0]} is missing or changed, or was added" if wrong else None

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:06}"

    def _aside(self, step: int) -> Path:
        return self.directory / f".step_{step:06}.{os.getpid()}"

    def _drawn(self, step: int) -> Path:
        return self.directory / "drawn" / f"step_{step:06}.pkl"


def checkpoint_store(config: BaseConfig) -> CheckpointStore:
    """Returns the store of a run's checkpoints, from its configuration."""
    options = config.checkpoint
    path = config.run_file("checkpoints") or "checkpoints"
    return CheckpointStore(path, options.keep_last, options.keep_best, options.keep_every)


def _files(directory: Path) -> dict[str, Path]:
    """Returns the files of a checkpoint, but for its manifest, by their path in it."""
    found = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if not path.is_dir()}
    found.pop(_MANIFEST, None)
    return found


def _write_manifest(directory: Path, step: int) -> int:
    """Writes the manifest of all files in a directory; all is on the disk when it returns. Returns their bytes."""
    files = {}
    for name, path in _files(directory).items():
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        _sync(path)
    manifest = directory / _MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": files}, indent=1))
    _sync(manifest)
    for parent, _directories, _names in os.walk(directory):
        _sync(parent)
    return manifest.stat().st_size + sum(int(str(file["bytes"])) for file in files.values())


def _sync(path: str | os.PathLike[str]) -> None:
    """Waits until a file's contents, or a directory's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass  # another process removed it
    except OSError as error:
        logger.warning(f"{path} cannot be removed ({error.strerror or error}); remove it to make room.")


def _dump(path: Path, value: Any) -> None:
    with path.open("wb") as file:
        dump(value, file)


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return pickle.load(file)
    except Exception as error:  # unpickling runs code of the classes that it finds
        raise DataError(
            f"checkpoint file {path} cannot be read ({type(error).__name__}: {error}); use the versions of dataflow "
            "and of your own modules that wrote it."
        ) from error
