"""Metrics of a run: metrics.jsonl, TensorBoard, the other backends of verl's Tracking (wandb, ...), and summary.json.

metrics.jsonl is written first and flushed after each step, so that it has all finished steps of a killed run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dataflow.errors import ConfigError, nearest
from dataflow.files import replaced, written
from dataflow.running.reporting.run_ids import RunIds
from dataflow.running.reporting.tensorboard import TensorBoard
from dataflow.system.children import safe_path
from dataflow.timeline.agents import causes_of
from dataflow.timeline.causes.attribution import pool_waits
from dataflow.timeline.spans import POOLS, Trace, covered
from dataflow.usercode.numeric import finite

if TYPE_CHECKING:
    from verl.utils.tracking import Tracking

# verl's names for stages with a role; any other stage keeps its own name.
TIMINGS = {"samples": "gen", "trains": "update_actor"}
FIELDS = {"old_log_probs": "old_log_prob", "ref_log_probs": "ref", "advantages": "adv"}
FIELDS |= {"values": "values", "critic": "update_critic"}
"""verl's names for stages, by a field that they write."""
_TAKEN = {*TIMINGS.values(), *FIELDS.values(), "testing", "reward", "step"}
"""What follows ``timing_s/`` in a name that means one thing, whatever the stages are called."""

METRICS = "metrics.jsonl"
_TENSORBOARD, _LOGGED = "tensorboard", "verl.jsonl"
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


class Tracker:
    """Writes the metrics of a run, a step at a time.

    Args:
        directory: of the run; made if missing. Gets ``metrics.jsonl``, and ``tensorboard/`` if that is a backend.
        backends: any of verl's Tracking ("tensorboard", "console", "wandb", ...); metrics.jsonl is always written.
        project, name: of the run in the backends.
        config: of the run, for backends that show it.
        upto: the last step to keep of what the run wrote before; None for a new run.

    Raises:
        ConfigError: verl does not have a backend, or its package is not installed.
        RunError: the files cannot be written.
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
        with self._written():
            self.directory.mkdir(parents=True, exist_ok=True)
            rows = None if upto is None else self._cut(upto)
            ids = RunIds(self.directory, backends, resumes=upto is not None)
            self._backends = _opened(self.directory, list(backends), project, name, dict(config or {}), ids)
            ids.keep()
            # Append, so that a resumed run continues the file.
            self._file: IO[str] | None = (self.directory / METRICS).open("a", encoding="utf-8")
            if rows is not None and self._backends and _LOCAL.issuperset(backends):
                for row in rows:
                    self._show(row["step"], row)

    def _cut(self, upto: int) -> list[dict[str, Any]]:
        """Removes rows of later steps, and the files of local backends; returns the rows to fill these again."""
        rows = [row for row in read_metrics(self.directory / METRICS) if row["step"] <= upto]
        with replaced(self.directory / METRICS) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        shutil.rmtree(self.directory / _TENSORBOARD, ignore_errors=True)
        (self.directory / _LOGGED).unlink(missing_ok=True)
        return rows

    def _show(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Sends a row to the backends, which take numbers alone; TensorBoard raises on anything else."""
        taken = {k: v for k, v in numbers.items() if isinstance(v, int | float) and k != "step"}
        for backend in self._backends:
            backend.log(taken, step)

    def _written(self) -> AbstractContextManager[None]:
        return written("metrics of the run", self.directory)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a step's metrics.

        Args:
            step: counts from 1; 0 for metrics from before training.
            metrics: numbers by name; numpy and torch scalars become numbers, NaN and infinities null.

        Raises:
            RunError: they cannot be written.
        """
        if self._file is None:
            raise ValueError(f"metrics of step {step}: the tracker is closed.")
        numbers = finite(metrics)
        with self._written():
            self._file.write(json.dumps({"step": step, **numbers}, allow_nan=False) + "\n")
            self._file.flush()
            self._show(step, numbers)

    def close(self, exit_code: int = 0) -> None:
        """Flushes and closes everything; a second call does nothing.

        Args:
            exit_code: of the run, for backends that record it (wandb).

        Raises:
            RunError: buffered data cannot be written.
        """
        file, self._file = self._file, None
        backends, self._backends = self._backends, []
        with self._written():
            try:
                if file is not None:
                    file.close()
            finally:
                with contextlib.ExitStack() as closing:
                    for backend in backends:  # closed here, as verl's __del__ would fail at interpreter exit
                        closing.callback(backend.finish, exit_code=exit_code)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(exit_code=0 if kind is None else 1)


def _opened(
    directory: Path, backends: list[str], project: str, name: str, config: dict[str, Any], ids: RunIds
) -> list[Tracking | TensorBoard]:
    found: list[Tracking | TensorBoard] = []
    if others := [backend for backend in backends if backend != _TENSORBOARD]:
        found.append(_open(directory, others, project, name, config, ids))
    if len(others) < len(backends):
        found.append(TensorBoard(directory / _TENSORBOARD))
    return found


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
    if ids.knows("mlflow"):
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


def write_summary(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Writes a summary as JSON; the file is replaced atomically.

    Raises:
        RunError: it cannot be written.
    """
    with written("summary", path), replaced(path) as temporary:
        temporary.write_text(json.dumps(finite(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def step_metrics(trace: Trace, step: int) -> dict[str, float]:
    """Returns the times of a step under verl's names, in seconds.

    A step's time window runs from the end of the previous step (its last training task) to its own end. The windows
    cover the run without overlap, so ``timing_s/step`` and the waits add up over the steps. Time in
    which the run was not running, between a kill and the resume, counts in neither.

    Args:
        trace: of the run so far; the step's training tasks must be in it.
        step: number of the step.

    Returns:
        ``timing_s/<stage>``: time in which the tasks of this step ran that the stage, or the stages of one verl name,
        have, even outside the window;
        ``timing_s/reward``: how long the GPUs waited for rewards in the window, of several agents also for each,
        ``timing_s/reward/<agent>``; ``timing_s/step``: its length;
        ``overlap/exposed_wait_s``, ``overlap/gpu_busy_frac``: all waits and the busy share in the window.
        Empty if no training task of the step is in the trace.
    """
    own = [s for s in trace.spans if s.step == step]
    training = [s for s in own if not s.optional]
    if not training:
        return {}
    start = trace.window[0]
    begin = max((s.end for s in trace.spans if s.step < step and not s.optional), default=start)
    end = max(begin, max(s.end for s in training))
    names = timing_names(trace)
    ran: dict[str, list[tuple[float, float]]] = {}
    for span in own:
        ran.setdefault(names.get(span.stage, span.stage), []).append((span.begin, span.end))
    metrics = {f"timing_s/{name}": covered(spans, -math.inf, math.inf) for name, spans in ran.items()}
    waits = pool_waits(trace, (begin, end))
    waited = sum(waits.values())
    by_agent = {agent: waits.get(cause, 0.0) for cause, agent in causes_of(trace).items()}
    metrics["timing_s/reward"] = sum(by_agent.values())
    if len(by_agent) > 1:
        metrics |= {f"timing_s/reward/{agent}": seconds for agent, seconds in by_agent.items()}
    metrics["timing_s/step"] = took = trace.running_s(begin, end)
    metrics["overlap/exposed_wait_s"] = waited
    metrics["overlap/gpu_busy_frac"] = 1 - waited / took if took > 0 else 0.0
    return metrics


def timing_names(trace: Trace) -> dict[str, str]:
    """Returns verl's name for each stage that verl times as well; for a validation, the stage that samples.

    A stage that has such a name, or that of a sum, and does something else is ``stage/NAME``.
    """
    placed = trace.placed
    names = {stage: f"stage/{stage}" for stage in placed if stage in _TAKEN or stage.startswith("reward/")}
    names |= {stage: TIMINGS[role] for stage, role in trace.roles.items() if role in TIMINGS}
    names |= {stage: "testing" for stage in trace.with_role("validates") if placed.get(stage) in POOLS}
    return names | {s["name"]: FIELDS[field] for s in trace.declared for field in s["writes"] if field in FIELDS}
