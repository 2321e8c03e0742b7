"""Checks that the nodes of a service's processes have this package and see its paths, before it is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.cluster.answer import cause, fetch
from dataflow.cluster.paths import View, Where, difference, look, marked, packed
from dataflow.cluster.process import version
from dataflow.errors import ConfigError

RUN = "runs"
"""The key that names the run's directory."""


@dataclass(frozen=True)
class SharedPaths:
    """The paths that one service shares with the process that starts it.

    Attributes:
        service: its name.
        files: that it reads; see :class:`~dataflow.stage.Hosted`, also for the next two.
        made: directories that the run has made itself.
        writes: files that it writes outside the run's directory.
        directory: of the run, if the service uses it.
    """

    service: str
    files: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)
    writes: Mapping[str, str] = field(default_factory=dict)
    directory: str | None = None

    async def check(self, actors: Mapping[str, Any]) -> None:
        """Compares the view of each node with that of this process; copies what the run has made itself.

        Args:
            actors: one on each node other than this process's, by the node's address.

        Raises:
            ConfigError: a node does not see a path.
        """
        paths = {**self.files, **self.made}
        common = {} if self.directory is None else {RUN: self.directory}
        common |= {key: _existing(path) for key, path in self.writes.items()}
        if not actors or not (paths or common):
            return
        mine = {path: look(path) for path in paths.values()}
        with ExitStack() as stack:
            markers = [_marker(stack, key, directory) for key, directory in common.items()]
            for address, actor in actors.items():
                theirs = await fetch(actor.look.remote([*markers, *paths.values()]))
                for (key, directory), there in zip(common.items(), theirs, strict=False):
                    if not there.kind:
                        raise ConfigError(self._not_shared(key, directory, address))
                for key, path, there in zip(paths, paths.values(), theirs[len(markers) :], strict=True):
                    await self._compare(key, path, mine[path], there, address, actor)

    async def _compare(self, key: str, path: str, here: View, there: View, address: str, actor: Any) -> None:
        if key in self.made and not there.kind and (archive := packed(path)) is not None:
            try:
                await fetch(actor.unpack.remote(archive, path))
            except Exception as error:
                why = cause(error)
                raise ConfigError(
                    f"{key}={path}: it cannot be copied to node {address}, where '{self.service}' runs ({why}); "
                    "set XDG_CACHE_HOME to a directory that all nodes can write, or share."
                ) from error
            return
        if clause := difference(here, there):
            raise ConfigError(
                f"{key}={path}: node {address}, where '{self.service}' runs, {clause}; put it on a disk that all "
                "nodes share, or copy it there."
            )

    def _not_shared(self, key: str, directory: str, address: str) -> str:
        where = f"node {address}, where '{self.service}' runs, does not see"
        fix = f"ray.nodes.{self.service} labels of this machine's node."
        if path := self.writes.get(key):
            return (
                f"{key}={path}: {where} the directory {directory} of this machine; give a file on a disk that all "
                f"nodes share, or {fix}"
            )
        return (
            f"{key}: {where} the run's directory {directory}, which it has files in; give {key}= a directory on a "
            f"disk that all nodes share, or {fix}"
        )


def _existing(path: str) -> str:
    """Returns the directory of a file, or, if it is still to be made, the innermost one above it that is there."""
    return str(next(each for each in Path(path).parents if each.is_dir()))


def _marker(stack: ExitStack, key: str, directory: str) -> str:
    """Writes a marker, which the stack removes; returns its path."""
    try:
        return stack.enter_context(marked(directory))
    except OSError as error:
        raise ConfigError(f"{key}: {directory} cannot be written: {error.strerror}.") from error


def check_version(what: str, where: Where) -> None:
    """Checks that a process has the version of this package that this one has.

    Args:
        what: runs there, for the message.
        where: it is.

    Raises:
        ConfigError: it has another.
    """
    if where.version != version():
        raise ConfigError(
            f"node {where.address}, where {what} runs, has dataflow {where.version}, and this machine {version()}; "
            "give all nodes the same Python environment."
        )


def one_on_each(actors: Sequence[Any], places: Sequence[Where], here: str | None) -> dict[str, Any]:
    """Returns the first actor on each node other than this process's, by the node's address.

    Args:
        actors: in order of rank.
        places: of each.
        here: id of this process's node.
    """
    found: dict[str, tuple[str, Any]] = {}
    for actor, where in zip(actors, places, strict=True):
        if where.node != here:
            found.setdefault(where.node, (where.address, actor))
    return dict(_named_apart(found))


def _named_apart(found: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields actors by address, with the node's id if another node has the same address (nodes of one machine)."""
    addresses = [address for address, _actor in found.values()]
    for node, (address, actor) in found.items():
        yield (f"{address} ({node[:8]})" if addresses.count(address) > 1 else address), actor
