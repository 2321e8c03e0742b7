"""The keys of a configuration and their values, from a file in the cache: to load a pipeline takes about a second."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

from dataflow.errors import DataflowError
from dataflow.files import cache_home, replaced

if TYPE_CHECKING:
    from types import ModuleType

    from pydantic import BaseModel

_REVISION = 1
"""Of the files in the cache."""


class Key(NamedTuple):
    """A key, as a line in the cache.

    Attributes:
        name: with dots.
        values: that are worth offering: choices, or the default.
        path: whether the value may be the path of a file.
        help: its first sentence.
        below: keys of the sections that a user names under this key.
    """

    name: str
    values: list[str]
    path: bool
    help: str
    below: list[Any]


def keys_of_file(path: str) -> list[Key]:
    """Returns the keys of a pipeline file or a configuration file; none of one that cannot be loaded."""

    def load() -> tuple[type[BaseModel], list[str]]:
        from dataflow.config.loading.saved import module_of

        module = module_of(path)
        return module.Config, [path, *_files_of(module)]

    return _kept(os.path.abspath(path), load)


def keys_of_class(module: str, name: str) -> list[Key]:
    """Returns the keys of a configuration of the package itself."""

    def load() -> tuple[type[BaseModel], list[str]]:
        from importlib import import_module

        return getattr(import_module(module), name), []

    return _kept(f"{module}.{name}", load)


def _kept(name: str, load: Callable[[], tuple[type[BaseModel], list[str]]]) -> list[Key]:
    """Returns the keys from the cache, unless a file that they come from has changed since."""
    file = cache_home() / "completion" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["revision"] == _REVISION and kept["stamps"] == _stamps(kept["stamps"]):
            return [Key(*each) for each in kept["keys"]]
    try:
        cls, paths = load()
    except DataflowError:
        return []  # the command itself says what is wrong with the file
    keys = list(_keys(cls))
    stamps = _stamps(sorted({os.path.abspath(each) for each in (*paths, *_defining(cls))}))
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time alone
        file.parent.mkdir(parents=True, exist_ok=True)
        with replaced(file) as temporary:
            temporary.write_text(json.dumps({"revision": _REVISION, "stamps": stamps, "keys": keys}), encoding="utf-8")
    return keys


def _stamps(paths: Sequence[str]) -> dict[str, int]:
    return {path: os.stat(path).st_mtime_ns for path in paths}


def _files_of(module: ModuleType) -> Iterator[str]:
    """Yields the files of a pipeline and of the pipelines that it builds on."""
    for each in (module, *(value for value in vars(module).values() if isinstance(value, type(module)))):
        if getattr(each, "__file__", None) and Path(str(each.__file__)).is_file():
            yield str(each.__file__)


def _defining(cls: type[BaseModel]) -> Iterator[str]:
    """Yields the files that define a configuration and its sections."""
    import sys

    from dataflow.config.keys.overrides import fields, section_of

    for section in (cls, *(found for _, info in fields(cls) if (found := section_of(info)) is not None)):
        for base in section.__mro__:
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            if file and base.__module__.partition(".")[0] not in ("pydantic", *sys.stdlib_module_names):
                yield file


def _keys(cls: type[BaseModel], defaults: bool = True) -> Iterator[Key]:
    from dataflow.config.keys.overrides import accepts, default_of, fields, named_section_of, section_of

    for path, info in fields(cls):
        section, at = section_of(info), path
        if section is not None:
            short = getattr(section, "shorthand", None)
            if short is None:
                continue
            at, info = (*path, short), section.model_fields[short]
        below = [] if (named := named_section_of(info)) is None else list(_keys(named, defaults=False))
        values = list(dict.fromkeys([*_choices(info.annotation), *(info.examples or ())]))
        text = accepts(info.annotation, str) and not accepts(info.annotation, dict) and not values
        if not values and defaults:
            default = default_of(cls, at)
            values = [str(default)] if isinstance(default, int | float | str) and default != "" else []
        if values and accepts(info.annotation, type(None)):
            values.append("null")
        description = " ".join((info.description or "").split()).partition(". ")[0].rstrip(".")
        yield Key(".".join(path), values, text, description, below)


def _choices(annotation: Any, form: str = "{}") -> Iterator[str]:
    """Yields the values that a type lists: true and false, or the members of a Literal; of a list of them one each."""
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from (form.format(each) for each in get_args(annotation) if isinstance(each, str | int))
    elif get_origin(annotation) is list:
        for each in get_args(annotation):
            yield from _choices(each, "[{}]")
    elif get_origin(annotation) is not dict:
        for each in get_args(annotation):
            yield from _choices(each, form)
