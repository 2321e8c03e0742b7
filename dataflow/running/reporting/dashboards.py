"""The dashboards that show a run's metrics: TensorBoard, and the other backends of verl's Tracking (wandb, ...).

Each gets every row, whatever its step: an evaluation ends after later steps have, and a run that resumes evaluates the
step that it resumes from.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.errors import ConfigError, nearest
from dataflow.running.reporting.run_ids import RunIds
from dataflow.running.reporting.tensorboard import TensorBoard
from dataflow.system.children import safe_path

if TYPE_CHECKING:
    from verl.utils.tracking import Tracking

_TENSORBOARD, _LOGGED = "tensorboard", "verl.jsonl"
_AXIS = "training/global_step"
"""verl's name of a row's step: the axis of W&B's charts, whose own steps are the numbers of the rows."""
_LOCAL = frozenset({"tensorboard", "file", "console"})
"""Backends that write to this machine alone."""

_PACKAGES = ("clearml", "mlflow", "swanlab", "trackio", "wandb")
"""Backends that are packages of the same name."""
# For each backend: the variable of its key; the variable that disables it, with the value; files that may contain a
# key, and a word that they then contain.
_KEYS: dict[str, tuple[str, str, tuple[str, ...], tuple[tuple[str, str], ...]]] = {
    "wandb": (
        "WANDB_API_KEY",
        "WANDB_MODE",
        ("offline", "disabled", "dryrun", "shared"),
        (
            ("$NETRC", "machine"),
            ("~/.netrc", "machine"),
            ("~/_netrc", "machine"),
            ("~/.config/wandb/settings", "mode"),
            ("wandb/settings", "mode"),
        ),
    ),
    "swanlab": (
        "SWANLAB_API_KEY",
        "SWANLAB_MODE",
        ("local", "offline", "disabled"),
        (("~/.swanlab/.netrc", "password"),),
    ),
    "clearml": (
        "CLEARML_API_ACCESS_KEY",
        "CLEARML_OFFLINE_MODE",
        ("1", "true"),
        (("~/clearml.conf", "access_key"),),
    ),
}
_STREAMS = frozenset({"console", "clearml", "trackio"})
"""Backends that get the rows as they come, and none again when the run resumes."""


@dataclass(frozen=True)
class Row:
    """A row of metrics.

    Attributes:
        number: of rows that the run logged before it, with those that were cut off since.
        step: of the run.
        metrics: numbers by name, or None; what is something else, no dashboard takes.
    """

    number: int
    step: int
    metrics: Mapping[str, Any]

    @property
    def line(self) -> dict[str, Any]:
        """What ``metrics.jsonl`` has of it."""
        return {"step": self.step, **self.metrics}


class Dashboards:
    """The backends of a run.

    Args:
        directory: of the run.
        backends: their names.
        project, name: of the run in them.
        config: of the run, for those that show it.
        before: if the run resumes, the rows that it keeps, and those that were cut off. A local file is made again.
            A service that continues the run there cannot cut anything off: it gets what it lacks of the rows kept, and
            of a step that is trained again what it had not got the first time.

    Raises:
        ConfigError: verl does not have a backend, or its package is not installed.
    """

    def __init__(
        self,
        directory: Path,
        backends: Sequence[str],
        project: str,
        name: str,
        config: Mapping[str, Any],
        before: tuple[Sequence[Row], Sequence[Row]] | None,
    ) -> None:
        kept, cut = before or ((), ())
        if before is not None:
            shutil.rmtree(directory / _TENSORBOARD, ignore_errors=True)
            (directory / _LOGGED).unlink(missing_ok=True)
        self._ids = RunIds(directory, backends, resumes=before is not None)
        self._tracking: Tracking | None = None
        self._board: TensorBoard | None = None
        self._there: dict[str, dict[int, set[str]]] = {}
        """By backend and step, metrics that it has of rows that were cut off."""
        if others := [backend for backend in backends if backend != _TENSORBOARD]:
            self._tracking = _open(directory, others, project, name, dict(config), self._ids)
        if len(others) < len(backends):
            self._board = TensorBoard(directory / _TENSORBOARD)
        self._ids.keep()
        if "wandb" in others:  # after the run is known, as it may have no step of its own before
            self._wandb.define_metric(_AXIS, summary="max")
            self._wandb.define_metric("*", step_metric=_AXIS)
        for backend in backends:
            there = self._there[backend] = {}
            if (has := self._rows_in(backend)) is None:
                continue
            for row in cut:
                if row.number < has:
                    there.setdefault(row.step, set()).update(row.metrics)
            for row in kept:
                if row.number >= has:
                    self._send(backend, row)

    @property
    def _wandb(self) -> Any:
        assert self._tracking is not None
        return self._tracking.logger["wandb"]

    def _rows_in(self, backend: str) -> float | None:
        """Returns how many of the rows that the run logged a backend has for certain; None where that is no matter."""
        if backend in _STREAMS:
            return None
        if not self._ids.continues(backend):
            return 0
        # What wandb had not sent when its process was killed is lost; of a run that it keeps offline it knows no step.
        return max(self._ids.rows, self._wandb.run.step) if backend == "wandb" else math.inf

    def show(self, row: Row) -> None:
        """Sends a row to all backends."""
        for backend in self._there:
            self._send(backend, row)

    def _send(self, backend: str, row: Row) -> None:
        """Sends what of a row is a number, as TensorBoard raises on anything else, and not there already."""
        there = self._there[backend].get(row.step, ())
        taken = {k: v for k, v in row.metrics.items() if isinstance(v, int | float) and k not in there}
        if not taken:
            return
        if backend == _TENSORBOARD:
            assert self._board is not None
            self._board.log(taken, row.step)
            return
        assert self._tracking is not None
        if backend == "wandb":  # it leaves out what has a step before that of the last row
            self._tracking.log({**taken, _AXIS: row.step}, row.number, backend=[backend])
        else:
            self._tracking.log(taken, row.step, backend=[backend])

    def close(self, rows: int, exit_code: int) -> None:
        """Closes all backends.

        Args:
            rows: that the run has logged.
            exit_code: of the run, for backends that record it (wandb).

        Raises:
            OSError: buffered data cannot be written.
        """
        with contextlib.ExitStack() as closing:
            for each in (self._board, self._tracking):  # closed here, as verl's __del__ would fail at interpreter exit
                if each is not None:
                    closing.callback(each.finish, exit_code=exit_code)
        self._ids.keep(rows)


def _open(
    directory: Path, backends: list[str], project: str, name: str, config: dict[str, Any], ids: RunIds
) -> Tracking:
    """Opens verl's backends. Imports verl, which takes seconds."""
    from verl.utils.tracking import Tracking

    for backend in backends:
        if backend not in Tracking.supported_backend:
            known = Tracking.supported_backend
            raise ConfigError(
                f"tracking.backends: no backend '{backend}'{nearest(backend, known)} (there are {', '.join(known)})."
            )
    # verl's wandb backend always reads config["trainer"].
    config = {**config, "trainer": config.get("trainer") or {}}
    if ids.continues("mlflow"):
        config = {"trainer": {}}  # it has the parameters, and refuses one that has changed, such as more steps
    places = {
        "VERL_FILE_LOGGER_PATH": str(directory / _LOGGED),
        **ids.variables,
    }
    # These print where they write; others hook into sys.stdout, which must then be the real one.
    quiet = contextlib.redirect_stdout(io.StringIO()) if _LOCAL.issuperset(backends) else contextlib.nullcontext()
    try:
        with _environment(places), safe_path(), quiet:
            return Tracking(project, name, default_backend=backends, config=config)
    except ImportError as error:
        raise ConfigError(
            f"tracking.backends={backends}: {error}; install the package, or take the backend out."
        ) from error
    # If a service refuses a key or cannot be reached, its package raises errors of its own.
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise ConfigError(
            f"tracking.backends={backends}: cannot be opened ({reason}); check the key, or take the backend out."
        ) from error


def check_backends(backends: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Checks that each backend's package is installed, and that it has a key if it needs one. Imports none of them.

    Raises:
        ConfigError: a package or a key is missing.
    """
    for backend in backends:
        if backend in _PACKAGES and importlib.util.find_spec(backend) is None:
            raise ConfigError(
                f"tracking.backends: '{backend}' needs the package {backend}, which is not installed; run "
                f"pip install {backend}, or take the backend out."
            )
        if backend not in _KEYS:
            continue
        variable, switch, off, files = _KEYS[backend]
        if environment.get(variable) or environment.get(switch, "").lower() in off:
            continue
        if not any(_names_key(Path(os.path.expandvars(file)).expanduser(), word) for file, word in files):
            raise ConfigError(
                f"tracking.backends: '{backend}' has no API key; set {variable}, or {switch}={off[0]} to track without "
                "an account, or take the backend out."
            )


def _names_key(file: Path, word: str) -> bool:
    try:
        return word in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False  # it does not exist, or cannot be read


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables while verl's constructors read them, so that a second run does not inherit them."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
