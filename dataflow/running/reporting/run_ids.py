"""The ids of a run in the services that track it, kept in its directory, so that a resumed run continues there.

wandb and SwanLab take an id that the run chooses; MLflow gives one. The other backends of verl take none.
An id in the environment (``WANDB_RUN_ID``, as some clouds set it) is the user's, and stays.
"""

from __future__ import annotations

import json
import os
import secrets
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from loguru import logger

from dataflow.files import replaced

FILE = "tracking.json"
"""File of a run's directory with its id by backend."""

_VARIABLES = {"mlflow": "MLFLOW_RUN_ID", "swanlab": "SWANLAB_RUN_ID", "wandb": "WANDB_RUN_ID"}
_ROWS = "wandb_rows"
_MODES = {"swanlab": ("SWANLAB_RESUME", "allow"), "wandb": ("WANDB_RESUME", "allow")}
_LETTERS, _LENGTH = string.ascii_lowercase + string.digits, 21  # the only form that SwanLab takes


class RunIds:
    """The ids of one run.

    Args:
        directory: of the run.
        backends: that it writes to.
        resumes: whether the run is resumed; a new run has new ids.
        environment: of the process.
    """

    def __init__(
        self,
        directory: Path,
        backends: Sequence[str],
        *,
        resumes: bool,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._file = directory / FILE
        named = {name: variable for name, variable in _VARIABLES.items() if name in backends}
        self._backends = frozenset(named)
        self._known = known = self._read() if resumes else {}
        self.rows = int(known.get(_ROWS, 0))
        """Rows of the run that wandb had when it was last closed; those after them it may have lost."""
        given = {name: environment[variable] for name, variable in named.items() if environment.get(variable)}
        self._ids = {**{name: known[name] for name in named if name in known}, **given}
        self._continued = {name for name, own in self._ids.items() if known.get(name) == own}
        for name in named:
            if name in _MODES:
                self._ids.setdefault(name, "".join(secrets.choice(_LETTERS) for _ in range(_LENGTH)))
        ours = {named[name]: own for name, own in self._ids.items() if name not in given}
        modes = [_MODES[name] for name in self._ids if name in _MODES and (name not in given or self.continues(name))]
        self.variables = {**ours, **{mode: how for mode, how in modes if not environment.get(mode)}}
        """The environment variables from which the backends' packages take the ids."""

    def continues(self, backend: str) -> bool:
        """Whether the run there is the one that an earlier process of this run wrote to."""
        return backend in self._continued

    def keep(self, rows: int | None = None) -> None:
        """Writes the ids into the run's directory, once the backends are open or closed.

        Args:
            rows: that wandb has, as it was closed; None before that.

        Raises:
            OSError: the disk fails.
        """
        mlflow = sys.modules.get("mlflow")
        if "mlflow" in self._backends - self._ids.keys() and mlflow is not None:
            active = mlflow.active_run()
            if active is not None:  # verl continues without MLflow if it cannot be reached
                self._ids["mlflow"] = str(active.info.run_id)
        if rows is not None and "wandb" in self._backends:
            self.rows = rows
        if self._ids:
            with replaced(self._file) as temporary:
                facts = {**self._known, **self._ids, _ROWS: str(self.rows)}
                temporary.write_text(json.dumps(facts) + "\n", encoding="utf-8")

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(name): str(own) for name, own in dict(found).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            logger.warning(
                f"{self._file} cannot be read ({error}); it is a new run in {', '.join(sorted(self._backends))}"
            )
            return {}
