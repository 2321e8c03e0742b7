"""The ids of a run in the services that track it, kept in its directory, so that a resumed run continues there.

wandb and SwanLab take an id that the run chooses; MLflow gives one. The other backends of verl always begin a new run.
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
        self._own = [name for name in _VARIABLES if name in backends and not environment.get(_VARIABLES[name])]
        known = self._read() if resumes else {}
        self._ids = {name: known[name] for name in self._own if name in known}
        for name in self._own:
            if name in _MODES:
                self._ids.setdefault(name, "".join(secrets.choice(_LETTERS) for _ in range(_LENGTH)))

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables from which the backends' packages take the ids."""
        modes = [_MODES[name] for name in self._ids if name in _MODES]
        return {**{_VARIABLES[name]: own for name, own in self._ids.items()}, **dict(modes)}

    def knows(self, backend: str) -> bool:
        """Whether the run has an id there, or will have the one that :attr:`variables` give."""
        return backend in self._ids

    def keep(self) -> None:
        """Writes the ids into the run's directory, once the backends are open.

        Raises:
            OSError: the disk fails.
        """
        mlflow = sys.modules.get("mlflow")
        if "mlflow" in self._own and "mlflow" not in self._ids and mlflow is not None:
            active = mlflow.active_run()
            if active is not None:  # verl continues without MLflow if it cannot be reached
                self._ids["mlflow"] = str(active.info.run_id)
        if self._ids:
            with replaced(self._file) as temporary:
                temporary.write_text(json.dumps(self._ids) + "\n", encoding="utf-8")

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(name): str(own) for name, own in dict(found).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            logger.warning(f"{self._file} cannot be read ({error}); it is a new run in {self._own}")
            return {}
