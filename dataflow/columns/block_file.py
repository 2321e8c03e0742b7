"""A file for blocks of bytes that a process only seldom reads again, such as the packed requests of a long run."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import NamedTuple

from dataflow.errors import RunError


class Place(NamedTuple):
    """Where a block is in its file, in bytes."""

    offset: int
    size: int


class BlockFile:
    """A file without a name, which the operating system removes with the last process that has it open.

    It is made with its first block. One thread may add blocks while others read.

    Args:
        directory: in which the file takes its room.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._file: int | None = None
        self._size = 0

    def put(self, block: bytes) -> Place | None:
        """Adds a block; returns its place, or None if it cannot be written, as the disk is full."""
        place = Place(self._size, len(block))
        try:
            if self._file is None:
                self._file = self._opened()
            done = 0
            while done < len(block):  # a nearly full disk may accept only part of it
                done += os.pwrite(self._file, block[done:], place.offset + done)
        except OSError:
            return None
        self._size += len(block)
        return place

    def get(self, place: Place) -> bytes:
        """Returns a block.

        Raises:
            RunError: it cannot be read.
        """
        assert self._file is not None
        found, why = b"", "its end is missing"
        try:
            while (left := place.size - len(found)) and (more := os.pread(self._file, left, place.offset + len(found))):
                found += more
        except OSError as error:
            why = error.strerror or str(error)
        if len(found) < place.size:
            raise RunError(
                f"{self._directory}: the requests of earlier steps, which are in a file without a name there, cannot "
                f"be read ({why}); check the disk, then resume the run."
            )
        return found

    def _opened(self) -> int:
        import tempfile  # it imports random, which pure modules must not

        with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
            own = os.dup(file.fileno())
        weakref.finalize(self, os.close, own)
        return own
