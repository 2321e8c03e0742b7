"""Writes metrics for TensorBoard.

verl's backend writes the same files through torch's writer, whose import takes seconds of CPU in the run's own process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from dataflow.planning.sources.logs.tfevents import VERSION, event_class, record
from dataflow.system import clock


class TensorBoard:
    """An event file in a directory, with the methods of verl's ``Tracking``.

    Args:
        directory: of the file; made if missing.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        began = clock.now()
        name = f"events.out.tfevents.{int(began):010}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = (directory / name).open("ab")
        self._write(wall_time=began, file_version=VERSION)

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Writes the metrics of a step.

        Raises:
            OSError: they cannot be written.
        """
        now = clock.now()
        for name, value in data.items():
            self._write(wall_time=now, step=step, summary={"value": [{"tag": name, "simple_value": value}]})
        self._file.flush()

    def finish(self, exit_code: int = 0) -> None:
        """Closes the file.

        Raises:
            OSError: what is buffered cannot be written.
        """
        self._file.close()

    def _write(self, **fields: object) -> None:
        self._file.write(record(event_class()(**fields).SerializeToString()))
