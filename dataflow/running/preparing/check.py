"""A check of what a run needs, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, TypeAlias

from loguru import logger

from dataflow.errors import NotChecked, RunError, UserError
from dataflow.system.extras import missing_extra
from dataflow.system.secrets import redact

State = Literal["ok", "warning", "problem", "not checked"]


@dataclass(frozen=True)
class Check:
    """A check of what a run needs.

    Attributes:
        what: is checked, in one or two words.
        find: returns what it found, as a clause, or None if that is not worth a line, or warnings, each a sentence;
            raises a :class:`~dataflow.errors.UserError` for a problem, :class:`~dataflow.errors.NotChecked` if it
            cannot tell.
        needs: names of earlier checks; after a problem of one of these, this one cannot be made, or would find the
            same fault.
    """

    what: str
    find: Callable[[], str | list[str] | None]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        what: was checked.
        state: of it.
        message: what was found; of a problem, the sentence that a start would end with.
    """

    what: str
    state: State
    message: str


Checks: TypeAlias = Generator[Check, None, None]
"""Checks in the order of a start, the same ones whatever becomes of each. Each is made before the next is asked for."""


def make_all(checks: Checks) -> None:
    """Makes checks until the first problem, and logs their warnings.

    Raises:
        UserError: of the first problem.
    """
    with closing(checks):
        for check in checks:
            for sentence in found if isinstance(found := check.find(), list) else ():
                logger.warning(redact(sentence))


def collect(checks: Checks) -> Iterator[Finding]:
    """Makes all checks, and yields what each found; what another one has found is not told again."""
    wrong, said = set[str](), dict[str, str]()
    with closing(checks):
        for check in checks:
            for found in _found(check, wrong):
                if found.state == "problem":
                    wrong.add(found.what)
                    first = said.setdefault(found.message, found.what)
                    if first != found.what:
                        found = Finding(found.what, "not checked", _DEPENDS.format(first))
                elif found.what in wrong:
                    continue  # a later part of a check that has its line
                yield found


_DEPENDS = "it depends on the check '{}', which found a problem"


def _found(check: Check, wrong: Collection[str]) -> list[Finding]:
    if found := [name for name in check.needs if name in wrong]:
        return [Finding(check.what, "not checked", _DEPENDS.format(found[0]))]
    try:
        message = check.find()
    except NotChecked as reason:
        return [Finding(check.what, "not checked", str(reason))]
    except (UserError, RunError) as error:
        return [Finding(check.what, "problem", str(error))]
    except ImportError as error:
        if (why := missing_extra(error)) is None:
            raise
        return [Finding(check.what, "problem", why)]
    if isinstance(message, list):
        return [Finding(check.what, "warning", sentence) for sentence in message]
    return [] if message is None else [Finding(check.what, "ok", message)]
