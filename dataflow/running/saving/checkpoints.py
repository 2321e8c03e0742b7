"""The checkpoints of a run on disk: written beside their place, checked by hashes, kept and removed by rules.

    runs/NAME/checkpoints/
      step_000012/            whole: it was renamed to this name after all its files were on the disk
        manifest.json         see `dataflow.running.saving.manifest`
        trainer/              files of torch.distributed.checkpoint
        states.pkl            states of the graph
        samples_000013.pkl    samples that were drawn before the checkpoint, and are trained on after it
      .step_000024.PID/       being written, or being removed; its writer holds a lock on it
      drawn/                  samples for checkpoints to come

A killed process leaves an unfinished directory, which the next process that writes a checkpoint removes. The disk alone
decides which checkpoints are kept, so a resumed run keeps the same ones as one that never stopped.
"""

from __future__ import annotations

import fcntl
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
from dataflow.files import replaced
from dataflow.running.reporting.tracking import METRICS, evaluation_in, read_metrics
from dataflow.running.saving.manifest import Manifest, Torn, read_manifest, sync, write_manifest
from dataflow.usercode.pickling import dump

if TYPE_CHECKING:
    from dataflow.config.base import BaseConfig

_STEP = re.compile(r"step_(\d{6,})")
_ASIDE = re.compile(r"\.step_\d{6,}\..+")
_DRAWN = re.compile(r"\.?step_(\d{6,})\.pkl(\.\d+)?")
_HELD: dict[Path, int] = {}
"""Descriptors that lock the directories which this process writes to. A store may have copies in its process."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        path: its directory.
        step: whose weights it holds.
        facts: that it was committed with.
    """

    path: Path
    step: int
    facts: Mapping[str, Any]

    def service(self, name: str) -> Path:
        """Returns the directory that a service wrote."""
        return self.path / name

    @property
    def trainer(self) -> Path:
        """Directory that the service of the actor wrote."""
        return self.service("trainer")

    def states(self) -> dict[str, Any]:
        """Returns the states of the graph by field.

        Raises:
            DataError: they cannot be read.
        """
        return dict(_load(self.path / "states.pkl"))

    def samples(self) -> dict[int, Any]:
        """Returns what was kept of later steps, by step.

        Raises:
            DataError: it cannot be read.
        """
        return {int(file.stem.rpartition("_")[2]): _load(file) for file in sorted(self.path.glob("samples_*.pkl"))}


class CheckpointStore:
    """Writes, finds and removes a run's checkpoints. One process writes them, another one the samples that are kept for
    them; copies in further processes may read.

    A checkpoint is written by :meth:`begin`, which returns a directory to write to, and :meth:`commit`, or dropped by
    :meth:`discard`. Call these in one process, and in a thread if an event loop must not be blocked.

    Args:
        directory: of the checkpoints, in the run's; made with the first one.
        keep_last: newest checkpoints to keep, at least 1.
        keep_best: checkpoints to keep whose steps have the highest mean score in evaluations.
        keep_every: also keep those of each step that it divides; 0 for none.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep_last: int = 2, keep_best: int = 1, keep_every: int = 0
    ) -> None:
        if keep_last < 1:
            raise ConfigError(f"checkpoint.keep_last={keep_last}: give 1 or more.")
        self.directory = Path(directory).absolute()
        self.keep_last, self.keep_best, self.keep_every = keep_last, keep_best, keep_every

    def begin(self, step: int) -> Path:
        """Makes a directory to write a checkpoint to, and removes those that dead processes left.

        Raises:
            OSError: it cannot be made.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.discard(step)
        for found in sorted(self.directory.iterdir()):
            if _ASIDE.fullmatch(found.name):
                _remove_dead(found)
        aside = self._aside(step)
        aside.mkdir()
        _HELD[aside] = os.open(aside, os.O_RDONLY)
        try:
            fcntl.flock(_HELD[aside], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # at this moment another process has removed it as one of a dead process
            self.discard(step)
            raise
        except OSError as error:
            logger.debug(f"{aside} cannot be locked ({error.strerror}); other processes leave it alone all the same")
        return aside

    def save_states(self, directory: Path, states: Mapping[str, Any]) -> None:
        """Writes the states of the graph, by field, into a checkpoint's directory.

        Raises:
            OSError: the disk fails.
        """
        _dump(directory / "states.pkl", dict(states))

    def keep(self, step: int, value: Any) -> None:
        """Keeps what was drawn for a step until a checkpoint of that step or a later one is whole.

        Args:
            step: that trains on it.
            value: to pickle; another one of the same step is replaced.

        Raises:
            OSError: the disk fails; what was there before stays.
        """
        path = self._drawn(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary:
            _dump(temporary, value)
            sync(temporary)

    def link(self, step: int, directory: Path) -> None:
        """Puts what was kept of a step into a checkpoint's directory.

        Raises:
            FileNotFoundError: nothing was kept of it.
            OSError: the disk fails.
        """
        source, target = self._drawn(step), directory / f"samples_{step:06}.pkl"
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:  # the file system has no hard links
            shutil.copyfile(source, target)

    def commit(self, step: int, facts: Mapping[str, Any]) -> int:
        """Makes a checkpoint of the written files; then removes checkpoints that no rule keeps.

        It is whole, and on the disk, when this returns: no later failure of the process or the machine loses it.
        Checkpoints of later steps are removed: the run has resumed from an earlier one since.

        Args:
            step: that :meth:`begin` was called with.
            facts: of the run, which JSON can hold.

        Returns:
            Bytes of the checkpoint.

        Raises:
            OSError: the disk fails; what was written is removed.
            TypeError, ValueError: JSON cannot hold the facts; what was written is removed.
        """
        aside, target = self._aside(step), self._path(step)
        try:
            size = write_manifest(aside, step, facts)
            if os.path.lexists(target) and not self._set_aside(step):
                self.discard(step)
            else:
                aside.rename(target)
                _release(aside)
        except Exception:
            self.discard(step)
            raise
        sync(self.directory)
        try:
            self._retain(step)
        except OSError as error:
            logger.warning(f"older checkpoints in {self.directory} cannot be removed: {error}")
        return size

    def discard(self, step: int) -> None:
        """Removes what this process wrote of a checkpoint since :meth:`begin`; does nothing if there is nothing."""
        aside = self._aside(step)
        if aside in _HELD:
            _remove(aside)
            _release(aside)

    def whole(self) -> list[int]:
        """Returns the steps of the checkpoints that look whole: their files have the sizes that they should have."""
        return [step for step in self._steps() if self._manifest(step, contents=False) is not None]

    def newest(self) -> Checkpoint | None:
        """Returns the newest whole checkpoint, or None; warns of each newer one that is not whole.

        Raises:
            ConfigError: the directory cannot be read.
        """
        while True:
            for step in reversed(self._steps()):
                try:
                    manifest = self._read(step, contents=True)
                except Torn as error:
                    if not os.path.lexists(self._path(step)):
                        break  # a resumed run has removed it meanwhile, and has newer ones
                    logger.warning(f"checkpoint {self._path(step)} is not whole and is passed over: {error}.")
                else:
                    return Checkpoint(self._path(step), step, manifest.facts)
            else:
                return None

    def at(self, step: int) -> Checkpoint | None:
        """Returns the checkpoint of a step; None if there is none that is whole."""
        manifest = self._manifest(step, contents=True)
        return None if manifest is None else Checkpoint(self._path(step), step, manifest.facts)

    def _retain(self, committed: int) -> None:
        """Removes the checkpoints that no rule keeps, once the newest of those that are kept has been found whole.

        Checkpoints later than the committed one were written before the run resumed from an earlier one, and no longer
        belong to it.
        """
        sound = [step for step in self.whole() if step <= committed]
        while sound and self._manifest(sound[-1], contents=True) is None:
            sound.pop()
        if not sound:
            return
        kept = self._kept(sound)
        gone = [step for step in self._steps() if step not in kept]
        aside = [self._rename_aside(step) for step in gone]
        if aside:
            sync(self.directory)
        for path in aside:
            _remove(path)
        for found in sorted((self.directory / "drawn").glob("*")):
            if (match := _DRAWN.fullmatch(found.name)) and int(match[1]) <= sound[-1]:
                found.unlink(missing_ok=True)

    def _kept(self, steps: list[int]) -> set[int]:
        """Returns which of the steps, in ascending order, the rules keep."""
        scores = self._scores()
        rated = sorted((step for step in steps if step in scores), key=lambda step: (scores[step], step))
        kept = {*steps[-self.keep_last :], *rated[len(rated) - min(self.keep_best, len(rated)) :]}
        return kept | {step for step in steps if self.keep_every and step % self.keep_every == 0}

    def _scores(self) -> dict[int, float]:
        """Returns the mean score of the evaluation of each step that has one."""
        rows: dict[int, dict[str, float]] = {}
        for row in read_metrics(self.directory.parent / METRICS):
            rows.setdefault(row["step"], {}).update((name, value) for name, value in row.items() if value is not None)
        return {step: found[0] for step, row in rows.items() if (found := evaluation_in(row)) is not None}

    def _set_aside(self, step: int) -> bool:
        """Makes room for a checkpoint whose step has one already; returns False if that is the only whole one."""
        others = (other for other in self._steps() if other != step)
        if self._manifest(step, contents=True) and not any(self._manifest(o, contents=True) for o in others):
            return False
        _remove(self._rename_aside(step))
        return True

    def _rename_aside(self, step: int) -> Path:
        """Renames a checkpoint, so that it is not taken for one while it is removed."""
        old = self._aside(step).with_suffix(".old")
        if os.path.lexists(old):
            _remove(old)
        return self._path(step).rename(old)

    def _steps(self) -> list[int]:
        """Returns the steps that have a directory, in ascending order."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(
                f"checkpoints in {self.directory} cannot be read ({error.strerror}); name the directory of a run that "
                "you may read."
            ) from error
        found = {int(match[1]) for name in names if (match := _STEP.fullmatch(name))}
        return sorted(step for step in found if self._path(step).name in names)

    def _read(self, step: int, *, contents: bool) -> Manifest:
        path = self._path(step)
        manifest = read_manifest(path)
        if manifest.step != step:
            raise Torn(f"its manifest is that of step {manifest.step}")
        manifest.check(path, contents=contents)
        return manifest

    def _manifest(self, step: int, *, contents: bool) -> Manifest | None:
        """Returns the manifest of a checkpoint, if that is whole."""
        try:
            return self._read(step, contents=contents)
        except Torn:
            return None

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


def _remove_dead(aside: Path) -> None:
    """Removes an unfinished directory, unless the process that writes to it lives."""
    if aside in _HELD:
        return
    try:
        handle = os.open(aside, os.O_RDONLY)
    except FileNotFoundError:
        return  # another process removed it
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(aside)
    except BlockingIOError:
        logger.debug(f"{aside} is being written by another process")
    except OSError as error:  # some network file systems lock no directories
        logger.warning(f"{aside} may still be written ({error.strerror}); remove it if no process of the run is left.")
    finally:
        os.close(handle)


def _release(aside: Path) -> None:
    os.close(_HELD.pop(aside))


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
    """Reads a pickle.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return pickle.load(file)
    except Exception as error:  # unpickling runs code of the classes that it finds
        raise DataError(
            f"checkpoint file {path} cannot be read ({type(error).__name__}: {error}); use the versions of dataflow "
            "and of your own modules that wrote it."
        ) from error
