"""The files that the nodes of a service must have in common with the run's own, checked before the service is built.

A process of each node looks at the paths that the service will use; the run compares that with its own view. A run's
directory is recognised by a marker that the run writes there: one of the same name on another disk is not the same.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dataflow.errors import ConfigError
from dataflow.executors.ray.answers import fetch
from dataflow.executors.ray.nodes import log_nodes

RUN = "runs"
"""The key that names the run's directory."""
_HASHED_BYTES = 1 << 24
"""Files up to this size are compared by their content, larger ones by their size."""
_NEEDED = (".json", ".safetensors", ".jinja")
"""Files of a model's directory that must be on each node; they are compared by their size."""

View = dict[str, str]
"""What a process sees at a path: size or digest of a file, by its name; nothing if there is no file."""


def look(path: str) -> View:
    """Returns what this process sees of a file, or of a directory's files that a model needs."""
    place = Path(path)
    if place.is_dir():
        return {each.name: f"{each.stat().st_size} bytes" for each in place.iterdir() if each.name.endswith(_NEEDED)}
    if not place.exists():
        return {}
    size = place.stat().st_size
    return {"": hashlib.sha256(place.read_bytes()).hexdigest() if size <= _HASHED_BYTES else f"{size} bytes"}


def difference(mine: View, theirs: View) -> str:
    """Returns how the view of another node differs, as a clause after the node's name; "" if it does not.

    What this process does not see either is left to the service that reads it.
    """
    if mine and not theirs:
        return "does not have it"
    for name, what in mine.items():
        if theirs.get(name) != what:
            return f"has another {name or 'file'} there" if name in theirs else f"lacks its file {name}"
    return ""


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

        return Where(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), _version())

    def look(self, paths: Sequence[str]) -> list[View]:
        """Returns what this process sees at these paths."""
        return [look(path) for path in paths]


@dataclass(frozen=True)
class SharedPaths:
    """The paths that one service shares with the process that starts it.

    Attributes:
        service: its name.
        files: that it reads; see :class:`~dataflow.stage.Hosted`.
        directory: of the run, if the service uses it.
    """

    service: str
    files: Mapping[str, str] = field(default_factory=dict)
    directory: str | None = None

    async def check(self, actors: Sequence[Any], where: Sequence[Where], here: str | None) -> None:
        """Checks the nodes of the service's processes, and logs which these are.

        Args:
            actors: the processes, which are :class:`SeesPaths`, by rank.
            where: each is.
            here: id of this process's node; None if it is on none.

        Raises:
            ConfigError: a node has another version of this package, or does not see a path.
        """
        others = {at.node: (at, actor) for at, actor in zip(where, actors, strict=True) if at.node != here}
        for at, _actor in others.values():
            if at.version != _version():
                raise ConfigError(
                    f"node {at.address}, where '{self.service}' runs, has dataflow {at.version}, and this machine "
                    f"{_version()}; give all nodes the same Python environment."
                )
        with _marked(self.directory) as marker:
            for at, actor in others.values():
                *files, run = await fetch(actor.look.remote([*self.files.values(), marker]))
                for (key, path), there in zip(self.files.items(), files, strict=True):
                    if clause := difference(look(path), there):
                        raise ConfigError(
                            f"{key}={path}: node {at.address}, where '{self.service}' runs, {clause}; put it on a disk "
                            "that all nodes share, or copy it there."
                        )
                if self.directory is not None and not run:
                    raise ConfigError(
                        f"{RUN}={self.directory}: node {at.address}, where '{self.service}' runs, does not see this "
                        f"directory of this machine; give {RUN}= on a disk that all nodes share, or "
                        f"ray.nodes.{self.service} labels of this machine's node."
                    )
        log_nodes(f"'{self.service}'", [at.node for at in where])


@contextmanager
def _marked(directory: str | None) -> Iterator[str]:
    """Writes a marker into the run's directory, and removes it; yields its path, or that of nothing."""
    if directory is None:
        yield os.devnull
        return
    marker = Path(directory) / f".shared.{secrets.randbits(63)}"
    marker.touch()
    try:
        yield str(marker)
    finally:
        marker.unlink(missing_ok=True)


def _version() -> str:
    return str(sys.modules["dataflow"].__version__)  # its name cannot be imported from a module below it
