"""Writes files atomically (a reader sees the old or the new file), checks whether paths can be written; the cache."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dataflow.errors import RunError


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside ``path``, which replaces ``path`` at the end of the block unless that raises.

    An OSError of a write, which has no name of a file, gets that of ``path``.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(target)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def cache_home() -> Path:
    """Returns the directory of what is worth keeping between runs: `$XDG_CACHE_HOME/dataflow` or
    `~/.cache/dataflow`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "dataflow"


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a file, in hexadecimal; it is read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def no_file(path: str | os.PathLike[str]) -> str | None:
    """Returns why a path leads to no regular file, as a clause; None if it does. Opening a pipe would block."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "there is no such file"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        return f"it cannot be opened ({getattr(error, 'strerror', None) or error})"
    if stat.S_ISREG(mode):
        return None
    return "it is a directory" if stat.S_ISDIR(mode) else "it is a device, a pipe or a socket"


def unwritable(path: str | os.PathLike[str]) -> str | None:
    """Returns why a file in an existing directory cannot be written, and the fix; None if it seems that it can be."""
    target = Path(path)
    if target.is_dir():
        return "it is a directory; give the name of a file."
    if not target.parent.is_dir():
        return f"there is no directory {target.parent}; make it, or give another name."
    return unmakable(target.parent)


def unmakable(path: str | os.PathLike[str]) -> str | None:
    """Returns why a directory cannot be made or written to, and the fix; None if it can be. Leaves nothing behind."""
    place = Path(path)
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a directory; give another one."
    import tempfile  # it imports random, which pure modules must not

    try:  # only an attempt covers disks that are full or read-only, quotas and /proc
        tempfile.TemporaryDirectory(prefix=".", dir=place).cleanup()
    except OSError as error:
        return f"{place} cannot be written ({error.strerror}); give another place."
    return None


def decoded(data: bytes) -> str:
    """Decodes UTF-8 text, without the byte order mark that some editors add.

    The message of its ValueError is the end of a sentence about the data.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


_ROOM = "make room there, or let runs= name another place"


@contextmanager
def written(what: str, path: str | os.PathLike[str], fix: str = _ROOM) -> Iterator[None]:
    """Turns an OSError in the block, such as a full disk, into a RunError that names the file.

    ``what`` is the kind of file, ``fix`` what to do, by default for a file of a run.
    """
    try:
        yield
    except OSError as error:
        raise cannot_write(what, path, error, fix) from error


def cannot_write(what: str, path: str | os.PathLike[str], error: Exception, fix: str = _ROOM) -> RunError:
    """Returns the error of a file that cannot be written; libraries have errors of their own beside OSError."""
    return RunError(f"{what} {path} cannot be written: {getattr(error, 'strerror', None) or error}; {fix}.")
