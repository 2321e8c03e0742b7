"""A dry run: everything that a start checks, and what it would find out late; nothing is started or left behind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TypeAlias

from dataflow.config.base import BaseConfig
from dataflow.errors import UserError
from dataflow.models.directory import here_only
from dataflow.running.preparing.check import Check, Finding, collect
from dataflow.running.preparing.preparation import Preparation
from dataflow.running.reporting.progress import Progress
from dataflow.running.resume import Complete, began
from dataflow.system.secrets import redact

PATIENCE_S = 5.0
"""Seconds in which servers elsewhere shall answer."""
_REST = Finding("all else", "not checked", "it depends on the check above, which found a problem")
Load: TypeAlias = Callable[[Sequence[str]], tuple[ModuleType, BaseConfig]]


def dry_run(load: Load, arguments: Sequence[str]) -> list[Finding]:
    """Returns what all checks of a run found, the problems among them, with secrets masked.

    ``load`` returns the pipeline file and its configuration with the ``key=value`` arguments.
    """
    with here_only():
        found = list(_findings(load, arguments))
    # At the end, when all secrets are known; a message may show what the user typed.
    return [replace(each, message=redact(each.message)) for each in found]


def _findings(load: Load, arguments: Sequence[str]) -> Iterator[Finding]:
    given = list(arguments)
    while True:  # without an argument that is wrong, the next problem is found
        try:
            module, config = load(given)
            break
        except UserError as error:
            yield Finding("configuration", "problem", str(error))
            # A sentence names its key first; it does not name policy by policy.split.
            keys = {text: re.escape(text.partition("=")[0].strip()) for text in given}
            named = {text: re.search(rf"(?<![\w.]){key}(?!\w|\.\w)", str(error)) for text, key in keys.items() if key}
            places = {text: match.start() for text, match in named.items() if match is not None}
            if not places:
                yield _REST
                return
            given.remove(min(places, key=lambda text: places[text]))
    if len(given) == len(arguments):
        what = ", ".join(given) if len(given) <= 3 else f"{len(given)} keys are given"
        yield Finding("configuration", "ok", what or "as in the file, no key given")
    try:
        make = partial(Preparation, patience_s=PATIENCE_S)
        prepared = began(module, config, given, Progress(quiet=True), make)
    except UserError as error:
        yield from (Finding("resume", "problem", str(error)), _REST)
        return
    if isinstance(prepared, Complete):
        yield Finding("resume", "ok", f"{prepared.words}; there is nothing left to do")
        return
    yield from collect(_checks(prepared))


def _checks(prepared: Preparation) -> Iterator[Check]:
    yield from prepared.checks()
    yield from prepared.needs()  # which depend on the graph that the others have made
