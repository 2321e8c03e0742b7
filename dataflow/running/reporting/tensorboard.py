"""Writes metrics for TensorBoard, with TensorBoard's own writer.

verl's backend writes the same files through torch's, whose import takes seconds of CPU in the run's own process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dataflow.system import clock


class TensorBoard:
    """A directory of event files, with the methods of verl's ``Tracking``.

    Args:
        directory: of the files; made if missing.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(directory))

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Writes the metrics of a step.

        Raises:
            OSError: an earlier event could not be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, value in data.items():
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            self._writer.add_event(Event(step=step, wall_time=clock.now(), summary=summary))

    def finish(self, exit_code: int = 0) -> None:
        """Writes what is buffered and closes the file."""
        self._writer.close()
