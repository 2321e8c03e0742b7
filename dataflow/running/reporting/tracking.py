"""The rows of a run's metrics: in ``metrics.jsonl``, in TensorBoard's files, and in other backends of verl's Tracking.

metrics.jsonl is written first and flushed after each step, so that it has all finished steps of a killed run. A run
that resumes cuts it off behind its checkpoint, and makes TensorBoard's files and verl.jsonl again from it. A service
cannot cut anything off: W&B and SwanLab go on with the run under the id that it has there, and get a step that is
trained again twice.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.errors import ConfigError
from dataflow.files import replaced, written
from dataflow.system import clock
from dataflow.usercode.numeric import finite

if TYPE_CHECKING:
    from verl.utils.tracking import Tracking

METRICS = "metrics.jsonl"
IDS = "tracking.json"
"""File of a run's directory with the ids, by environment variable, under which the services know the run."""
_BOARD, _LOGGED = "tensorboard", "verl.jsonl"
_AXIS = "training/global_step"
"""verl's name of a row's step: the axis of W&B's charts, whose own steps count the rows, as it takes no earlier one."""


class Tracker:
    """Writes the metrics of a run, a row at a time.

    Args:
        directory: made if missing. Gets ``metrics.jsonl``, and ``tensorboard/`` if that is a backend.
        backends: any of verl's Tracking ("tensorboard", "console", "wandb", ...); metrics.jsonl is always written.
        config: of the run, for backends that show it.
        upto: the last step to keep of what the run wrote before; None for a new run.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        backends: Sequence[str] = (),
        project: str = "dataflow",
        name: str = "run",
        config: Mapping[str, Any] | None = None,
        upto: int | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._backends: dict[str, Tracking | _TensorBoard] = {}
        path = self.directory / METRICS
        with written("metrics of the run", self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            kept = [] if upto is None else [row for row in read_metrics(path) if row["step"] <= upto]
            if upto is not None:
                with replaced(path) as temporary:
                    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
                shutil.rmtree(self.directory / _BOARD, ignore_errors=True)
            if others := [backend for backend in backends if backend != _BOARD]:
                tracking = _open(self.directory, others, project, name, config or {}, upto is not None)
                self._backends |= dict.fromkeys(tracking.logger, tracking)
            if _BOARD in backends:
                self._backends[_BOARD] = _TensorBoard(self.directory / _BOARD)
            for backend in self._backends.keys() & {_BOARD, "file"}:  # which begin anew
                for row in filter(_numbers, kept):
                    self._backends[backend].log(_numbers(row), row["step"], backend=[backend])
            self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a row; numpy and torch scalars become numbers, NaN and infinities null.

        Steps count from 1; 0 is for metrics from before training. An evaluation that ends late has an earlier step.
        """
        row = {"step": step, **finite(metrics)}
        with written("metrics of the run", self.directory):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
            numbers = _numbers(row)
            for backend, tracking in self._backends.items() if numbers else ():
                if backend == "wandb":
                    tracking.log({**numbers, _AXIS: step}, None, backend=[backend])
                else:
                    tracking.log(numbers, step, backend=[backend])

    def close(self, exit_code: int = 0) -> None:
        """Flushes and closes everything; backends that record the run's exit code (wandb) get it."""
        with written("metrics of the run", self.directory):
            try:
                self._file.close()
            finally:
                for tracking in self._backends.values():  # here, as verl's __del__ would fail at interpreter exit
                    tracking.finish(exit_code=exit_code)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file, except for those that are damaged, such as an incomplete last one."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: of for name, of in row.items() if isinstance(of, int | float) and name != "step"}


class _TensorBoard:
    """TensorBoard's own writer, as verl's Tracking, whose import takes 7 s of CPU for nothing else in most runs."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))

    def log(self, data: Mapping[str, float], step: int | None, backend: Sequence[str] = ()) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in data.items()]
        self._writer.add_event(Event(wall_time=clock.now(), step=step, summary=Summary(value=values)))

    def finish(self, exit_code: int = 0) -> None:
        self._writer.close()


def _open(
    directory: Path, backends: Sequence[str], project: str, name: str, config: Mapping[str, Any], resumes: bool
) -> Tracking:
    """Opens verl's backends, W&B and SwanLab with the run that they know. Imports verl, which takes seconds."""
    from verl.utils.tracking import Tracking

    file = directory / IDS
    known = json.loads(file.read_text()) if resumes and file.exists() else {}
    names = ("WANDB_RUN_ID", "SWANLAB_RUN_ID")
    ids = {name: os.environ.get(name) or known.get(name) or secrets.token_hex(8) for name in names}
    how = {"WANDB_RESUME": "allow", "SWANLAB_RESUME": "allow", "VERL_FILE_LOGGER_PATH": str(directory / _LOGGED)}
    # Variables that are there are the user's, as on some clouds.
    own = {name: value for name, value in {**ids, **how}.items() if not os.environ.get(name)}
    os.environ.update(own)
    try:
        # verl's wandb backend always reads config["trainer"].
        tracking = Tracking(project, name, default_backend=list(backends), config={"trainer": {}, **config})
    except Exception as error:  # a package has errors of its own if its service refuses a key or cannot be reached
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise ConfigError(
            f"tracking.backends={backends}: cannot be opened ({reason}); check the key, or take the backend out."
        ) from error
    finally:
        for variable in own:
            os.environ.pop(variable, None)
    if "wandb" in tracking.logger:
        tracking.logger["wandb"].define_metric(_AXIS, summary="max")
        tracking.logger["wandb"].define_metric("*", step_metric=_AXIS)
    if {"wandb", "swanlab"}.intersection(backends):
        with replaced(file) as temporary:
            temporary.write_text(json.dumps(ids) + "\n", encoding="utf-8")
    return tracking
