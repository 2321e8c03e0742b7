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
from dataflow.running.preparing.needs import check_packages, needs
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

    Args:
        load: returns the pipeline file and its configuration with ``key=value`` arguments.
        arguments: these.
    """
    with here_only():
        found = list(_findings(load, arguments))
    # At the end, when all secrets are known; a message may show what the user typed.
    return [replace(each, message=redact(each.message)) for each in found]


def _findings(load: Load, arguments: Sequence[str]) -> Iterator[Finding]:
    found, wrong = _readable(load, arguments)
    yield from wrong
    if found is None:
        yield _REST
        return
    module, config, given = found
    if not wrong:
        what = ", ".join(given) if len(given) <= 3 else f"{len(given)} keys are given"
        yield Finding("configuration", "ok", what or "as in the file, no key given")
    yield from collect([Check("packages", partial(check_packages, config))])
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
    yield from needs(prepared, PATIENCE_S)  # which depend on the graph that the others have made


def _readable(
    load: Load, arguments: Sequence[str]
) -> tuple[tuple[ModuleType, BaseConfig, list[str]] | None, list[Finding]]:
    """Returns the configuration without the arguments that are wrong, and a finding for each of these.

    The sentence about a problem names its key first; without that argument, the next problem is found.
    """
    given, wrong = list(arguments), list[Finding]()
    while True:
        try:
            return (*load(given), given), wrong
        except UserError as error:
            wrong.append(Finding("configuration", "problem", str(error)))
            named = [(at, text) for text in given if (at := _named(text.partition("=")[0].strip(), str(error))) >= 0]
            if not named:
                return None, wrong
            given.remove(min(named)[1])


def _named(key: str, sentence: str) -> int:
    """Returns where a sentence first names a key, which ``policy.split`` does not do of ``policy``; -1 if nowhere."""
    found = re.search(rf"(?<![\w.]){re.escape(key)}(?!\w|\.\w)", sentence) if key else None
    return -1 if found is None else found.start()
