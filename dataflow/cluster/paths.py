"""Paths that the nodes of a cluster must have in common: what a process sees at one, and how two views differ.

The process of a service looks at the paths that it will use; the run compares them with its own view, and ends with a
sentence before anything is built. Files of a run's directory are recognised by a marker that the run writes there: a
directory of the same name on another disk is not the same one.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import secrets
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from dataflow.cluster.answer import answering
from dataflow.cluster.process import version

_HASHED_BYTES = 1 << 24
"""Files up to this size are compared by their content, larger ones by their size."""
_NEEDED = (".json", ".safetensors", ".jinja")
"""Files of a model's directory that must be on each node."""
_SENT_BYTES = 1 << 26
"""Largest directory that is sent to a node."""


@dataclass(frozen=True)
class View:
    """What a process sees at a path.

    Attributes:
        kind: of what is there; "" for nothing.
        digest: of a file.
        sizes: in bytes, of the files in a directory, by name.
    """

    kind: Literal["", "file", "directory"]
    digest: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)


def look(path: str) -> View:
    """Returns what this process sees at a path."""
    place = Path(path)
    try:
        if place.is_dir():
            files = sorted(each for each in place.iterdir() if each.is_file())
            return View("directory", sizes={each.name: each.stat().st_size for each in files})
        size = place.stat().st_size
        small = size <= _HASHED_BYTES
        return View("file", hashlib.sha256(place.read_bytes()).hexdigest() if small else f"{size} bytes")
    except OSError:
        return View("")


def difference(mine: View, theirs: View) -> str:
    """Returns how the view of another node differs, as a clause after the node's name; "" if it does not."""
    if mine.kind == "":
        return ""  # the service that reads the file reports the error
    if theirs.kind == "":
        return f"does not have this {mine.kind}"
    if theirs.kind != mine.kind:
        return f"has a {theirs.kind} there, not a {mine.kind}"
    if mine.digest != theirs.digest:
        return "has another file there"
    for name, size in mine.sizes.items():
        there = theirs.sizes.get(name)
        if there is None and name.endswith(_NEEDED):
            return f"lacks its file {name}"
        if there not in (None, size) and name.endswith(_NEEDED):
            return f"has another {name} there"
    return ""


@contextmanager
def marked(directory: str) -> Iterator[str]:
    """Writes a marker into a directory; yields the path by which others recognise the directory.

    Raises:
        OSError: it cannot be written.
    """
    marker = Path(directory) / f".shared.{secrets.randbits(63)}"
    marker.touch()
    try:
        yield str(marker)
    finally:
        marker.unlink(missing_ok=True)


def packed(directory: str) -> bytes | None:
    """Returns the files of a small directory as an archive; None if it is large."""
    if sum(look(directory).sizes.values()) > _SENT_BYTES:
        return None
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
        for name in look(directory).sizes:
            tar.add(Path(directory) / name, name)
    return archive.getvalue()


def unpack(archive: bytes, directory: str) -> None:
    """Makes a directory of an archive, at once and whole, unless there is one.

    Raises:
        OSError: it cannot be made.
    """
    place = Path(directory)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f"{place.name}.part-") as part:
        made = Path(part) / "made"
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(made, filter="data")
        try:
            if not place.is_dir():
                os.rename(made, place)
        except OSError as error:  # another process has made it meanwhile
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise


class Where(NamedTuple):
    """The node of an actor, by its id and its address, and the version of this package there."""

    node: str
    address: str
    version: str


class SeesPaths:
    """An actor whose node a run compares with its own."""

    def where(self) -> Where:
        """Returns where this process is."""
        import ray

        return Where(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), version())

    def look(self, paths: Sequence[str]) -> list[View]:
        """Returns what this process sees at these paths."""
        return [look(path) for path in paths]

    @answering
    def unpack(self, archive: bytes, directory: str) -> None:
        """Makes a directory of an archive on this node."""
        unpack(archive, directory)
