"""The manifest of a checkpoint: its step, facts of the run, and size and SHA-256 of each of its files.

It is JSON in one exact layout with a digest of itself, so that a change of any byte is found.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.errors import DataflowError
from dataflow.files import sha256_of

NAME = "manifest.json"


class Torn(DataflowError):
    """A checkpoint is not whole; the message says what is wrong with it, and follows its path and a colon."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: whose weights it holds.
        facts: of the run, as JSON holds them.
        files: size in bytes and SHA-256 of each file but the manifest, by path within the checkpoint.
    """

    step: int
    facts: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]

    def check(self, directory: Path, *, contents: bool) -> None:
        """Checks that a directory holds the files of the manifest and no other.

        Args:
            directory: of the checkpoint.
            contents: whether to hash the files; otherwise their sizes alone are compared.

        Raises:
            Torn: it does not.
        """
        with _reading(directory):
            found = dict(_files(directory))
        for name in sorted({*self.files, *found} - {NAME}):
            if name not in found:
                raise Torn(f"{name} is missing")
            if name not in self.files:
                raise Torn(f"{name} is not in the manifest")
            if not stat.S_ISREG(found[name].st_mode):
                raise Torn(f"{name} is no regular file")
            if found[name].st_size != self.files[name][0]:
                raise Torn(f"{name} has {found[name].st_size} bytes instead of {self.files[name][0]}")
        for name, (_size, digest) in self.files.items() if contents else ():
            with _reading(directory / name):
                if sha256_of(directory / name) != digest:
                    raise Torn(f"the contents of {name} have changed")


def write_manifest(directory: Path, step: int, facts: Mapping[str, Any]) -> int:
    """Writes the manifest of all files in a directory; all is on the disk when it returns.

    Args:
        directory: of the checkpoint.
        step: whose weights it holds.
        facts: of the run, which JSON can hold.

    Returns:
        Bytes of all files together.

    Raises:
        OSError: a file cannot be read, or the manifest not written.
        TypeError, ValueError: JSON cannot hold the facts.
    """
    (directory / NAME).unlink(missing_ok=True)
    files, size = {}, 0
    for name, found in sorted(_files(directory)):
        if not stat.S_ISREG(found.st_mode):
            raise DataflowError(f"checkpoint {directory}: {name} is no regular file; write files and directories only.")
        files[name] = {"bytes": found.st_size, "sha256": sha256_of(directory / name)}
        size += found.st_size
        sync(directory / name)
    # A second pass through JSON makes keys texts and tuples lists, as they will be read.
    body = json.loads(_text({"step": step, "facts": dict(facts), "files": files}))
    data = _text(_signed(body)).encode()
    with (directory / NAME).open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    for parent, _directories, _names in os.walk(directory):
        sync(parent)
    return size + len(data)


def read_manifest(directory: Path) -> Manifest:
    """Returns the manifest of a checkpoint; does not look at its files.

    Raises:
        Torn: it is missing, unreadable or changed.
    """
    with _reading(directory / NAME):
        if not stat.S_ISREG((directory / NAME).stat().st_mode):  # to read a pipe takes for ever
            raise Torn(f"{NAME} is no regular file")
        data = (directory / NAME).read_bytes()
    changed = Torn(f"{NAME} is cut off or changed")
    try:
        found = json.loads(data)
        body = {key: found[key] for key in found if key != "sha256"}
        intact = _text(_signed(body)).encode() == data
    except (ValueError, TypeError, KeyError) as error:
        raise changed from error
    if not intact:
        raise changed
    files = {name: (file["bytes"], file["sha256"]) for name, file in body["files"].items()}
    return Manifest(body["step"], body["facts"], files)


def sync(path: str | os.PathLike[str]) -> None:
    """Waits until a file's contents, or a directory's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _signed(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(_text(body).encode()).hexdigest(), **body}


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def _files(directory: Path, within: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yields path and status of everything but directories; does not follow links."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path), f"{within}{entry.name}/")
            else:
                yield f"{within}{entry.name}", entry.stat(follow_symlinks=False)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns an OSError in the block into :class:`Torn`."""
    try:
        yield
    except FileNotFoundError as error:
        raise Torn(f"{path.name} is missing") from error
    except OSError as error:
        raise Torn(f"{path.name} cannot be read ({error.strerror})") from error
