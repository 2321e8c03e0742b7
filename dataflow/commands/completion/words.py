"""The words that may stand at the cursor: files, runs, steps, and ``key=value`` of what stands before it."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dataflow.commands.completion.keys import Key, keys_of_class, keys_of_file

PIPELINES = (".py", ".yaml", ".yml")
_OF_RUNS = ("config.yaml", "trace.json")
"""A directory with one of these is a run's."""
Words = dict[str, str]
"""The words with a description each, which zsh and fish show."""
Completer = Callable[..., Words]


def attach(parser: argparse.ArgumentParser) -> None:
    """Gives each argument of each command what completes it; what is not named here takes any file."""
    for name, command in _commands(parser):
        for action in command._actions:
            completer = _COMPLETERS.get((name, action.dest)) or _COMPLETERS.get(("", action.dest))
            if completer is not None:
                action.completer = completer  # type: ignore[attr-defined]


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def paths(prefix: str, suffixes: Sequence[str] = ("",), folders: bool = True) -> Words:
    """Returns the files and directories that continue a path, in any case the directories that lead further."""
    place, name = os.path.split(prefix)
    found: Words = {}
    for entry in _entries(os.path.expanduser(place) or "."):
        hidden = entry.name.startswith(".") and not name.startswith(".")
        if entry.name.startswith(name) and not hidden:
            if entry.is_dir():
                found |= {f"{os.path.join(place, entry.name)}/": ""} if folders else {}
            elif entry.name.endswith(tuple(suffixes)):
                found[os.path.join(place, entry.name)] = ""
    return found


def runs(prefix: str, suffixes: Sequence[str] = (), **_: Any) -> Words:
    """Returns the directories of runs, those of ``runs/`` without a path, and the paths that lead to others."""
    place = os.path.dirname(prefix)
    found = paths(prefix, suffixes)
    for folder in [place] if place else ["runs"] if "runs".startswith(prefix) else []:
        for entry in _entries(os.path.expanduser(folder)):
            at = os.path.join(folder, entry.name)
            if at.startswith(prefix) and any(os.path.isfile(os.path.join(entry.path, name)) for name in _OF_RUNS):
                found.pop(f"{at}/", None)
                found.pop(f"{folder}/", None)
                found[at] = "a run"
    return found


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Returns the entries of a directory whose names a shell can be sent: one to a line, in UTF-8."""
    try:
        found = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    return [entry for entry in found if entry.name.isprintable()]  # bytes that are not UTF-8 are surrogates


def _pipelines(prefix: str, **_: Any) -> Words:
    return paths(prefix, PIPELINES)


def _folders(prefix: str, **_: Any) -> Words:
    return paths(prefix, suffixes=())


def _runs_and(*suffixes: str) -> Completer:
    return lambda prefix, **_: runs(prefix, suffixes)


class Overrides:
    """Completes ``key=value``.

    Args:
        keys: the keys, by the arguments before.
        more: what may stand there besides.
        values: of keys whose values are in files, by the arguments before.
    """

    def __init__(
        self,
        keys: Callable[[argparse.Namespace], list[Key]],
        more: Completer | None = None,
        **values: Callable[[argparse.Namespace], Iterable[str]],
    ) -> None:
        self._keys, self._more, self._values = keys, more, values

    def __call__(self, prefix: str, parsed_args: argparse.Namespace, **_: Any) -> Words:
        """Returns the keys, or behind ``=`` the values of one, that continue a word."""
        name, equals, value = prefix.partition("=")
        keys = _spread(self._keys(parsed_args), prefix)
        if not equals:
            given = {word.partition("=")[0] for word in _given(parsed_args)}
            return _shortened([key for key in keys if key.name not in given], prefix) | (
                self._more(prefix) if self._more else {}
            )
        key = next((key for key in keys if key.name == name), None)
        if key is None:
            return {}
        own = self._values.get(name)
        words = dict.fromkeys(key.values if own is None else map(str, own(parsed_args)), key.help)
        if key.path:
            words |= paths(value)
        return {f"{name}={word}": description for word, description in words.items()}


def _given(options: argparse.Namespace) -> list[str]:
    return [*(getattr(options, "overrides", None) or ()), *(getattr(options, "runs", None) or ())]


def _spread(keys: Iterable[Key], prefix: str) -> list[Key]:
    """Returns the keys with those below the sections that the user names, if the word names one."""
    found = []
    for key in keys:
        found.append(key)
        rest = prefix.removeprefix(f"{key.name}.")
        if key.below and rest != prefix and "." in rest:
            section = f"{key.name}.{rest.partition('.')[0]}"
            found += [each._replace(name=f"{section}.{each.name}") for each in (Key(*one) for one in key.below)]
    return found


def _shortened(keys: Sequence[Key], prefix: str) -> Words:
    """Returns ``key=`` of each key that continues a word; of several sections their names alone, ``section.``."""
    fitting = [key for key in keys if key.name.startswith(prefix)]
    words: Words = {}
    for key in fitting:
        section, dot, _ = key.name[len(prefix) :].partition(".")
        words[f"{prefix}{section}." if dot else f"{key.name}="] = "" if dot else key.help
    if sum(word.endswith(".") for word in words) == 1:  # a shell would put a space behind its only word
        words = {f"{key.name}=": key.help for key in fitting}
    return words


def _of_pipeline(options: argparse.Namespace) -> list[Key]:
    return keys_of_file(options.pipeline) if options.pipeline else []


def _of_run(options: argparse.Namespace) -> list[Key]:
    return keys_of_file(os.path.join(options.run, "config.yaml"))


def _of_compared(options: argparse.Namespace) -> list[Key]:
    first = (options.runs or [""])[0]
    return keys_of_file(first) if first.endswith(PIPELINES) else []


def _of_plan(_: argparse.Namespace) -> list[Key]:
    return keys_of_class("dataflow.planning.config", "PlanConfig")


def _of_samples(_: argparse.Namespace) -> list[Key]:
    return keys_of_class("dataflow.samples.command", "SamplesQuery")


def _of_export(_: argparse.Namespace) -> list[Key]:
    return [Key("step", [], False, "of which step; the newest by default", [])]


def _numbered(pattern: str) -> Callable[[argparse.Namespace], Iterator[str]]:
    """Returns what lists the steps that the names of a run's files have."""

    def steps(options: argparse.Namespace) -> Iterator[str]:
        folder, name = os.path.split(pattern)
        for entry in _entries(os.path.join(options.run or "", folder)):
            if (found := re.fullmatch(name, entry.name)) is not None:
                yield str(int(found[1]))

    return steps


_COMPLETERS: dict[tuple[str, str], Completer] = {
    ("", "run"): runs,
    ("", "costs"): runs,
    ("", "pipeline"): _pipelines,
    ("run", "overrides"): Overrides(_of_pipeline),
    ("show", "overrides"): Overrides(_of_pipeline),
    ("resume", "overrides"): Overrides(_of_run),
    ("export", "overrides"): Overrides(_of_export, step=_numbered(r"checkpoints/step_(\d+)")),
    ("export", "out"): _folders,
    ("init", "directory"): _folders,
    ("plan", "source"): _runs_and(""),
    ("plan", "overrides"): Overrides(_of_plan, _runs_and("")),
    ("timeline", "run"): _runs_and(".json", ".json.gz"),
    ("timeline", "merge"): lambda prefix, **_: paths(prefix, (".json", ".json.gz")),
    ("samples", "overrides"): Overrides(
        _of_samples, step=_numbered(r"samples/step_(\d+)\.parquet"), val=_numbered(r"samples/val_(\d+)\.parquet")
    ),
    ("compare", "runs"): Overrides(_of_compared, _runs_and(".json", ".json.gz", *PIPELINES)),
}
"""By command and argument; "" for any command."""
