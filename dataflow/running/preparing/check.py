"""A check of what a run needs, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dataflow.errors import NotChecked, RunError, UserError
from dataflow.system.extras import missing_extra

State = Literal["ok", "problem", "not checked"]


@dataclass(frozen=True)
class Check:
    """A check of what a run needs.

    Attributes:
        what: is checked, in one or two words.
        find: returns what it found, as a clause, or None if that is not worth a line; raises a
            :class:`~dataflow.errors.UserError` for a problem, :class:`~dataflow.errors.NotChecked` if it cannot tell.
        needs: names of earlier checks; after a problem of one of these, this one would find the same fault.
    """

    what: str
    find: Callable[[], str | None]
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
"""Checks in the order of a start. Each is made before the next one is asked for, which may depend on it."""


def make_all(checks: Checks) -> None:
    """Makes checks until the first problem.

    Raises:
        UserError: of the first problem.
    """
    with closing(checks):
        for check in checks:
            check.find()


def collect(checks: Checks) -> Iterator[Finding]:
    """Makes all checks, and yields what each found; a sentence that two checks end with, once."""
    wrong, said = set[str](), set[str]()
    with closing(checks):
        for check in checks:
            found = _found(check, wrong)
            if found is None:
                continue
            if found.state == "problem":
                wrong.add(found.what)
                if found.message in said:
                    continue
                said.add(found.message)
            yield found


def _found(check: Check, wrong: Collection[str]) -> Finding | None:
    if found := [name for name in check.needs if name in wrong]:
        return Finding(check.what, "not checked", f"it depends on the check '{found[0]}', which found a problem")
    try:
        message = check.find()
    except NotChecked as reason:
        return Finding(check.what, "not checked", str(reason))
    except (UserError, RunError) as error:
        return Finding(check.what, "problem", str(error))
    except ImportError as error:
        if (why := missing_extra(error)) is None:
            raise
        return Finding(check.what, "problem", why)
    return None if message is None else Finding(check.what, "ok", message)
