"""A check of what a run needs, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

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
        needs: names of earlier checks, without whose success this one cannot be made.
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


def make_all(checks: Iterable[Check]) -> None:
    """Makes checks until the first problem, and logs their warnings.

    Raises:
        UserError: of the first problem.
    """
    for check in checks:
        for sentence in found if isinstance(found := check.find(), list) else ():
            logger.warning(redact(sentence))


def collect(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yields what each check found that can be made; a problem that two checks share is yielded once."""
    without, said = set[str](), dict[str, str]()
    for check in checks:
        for found in _found(check, without):
            if found.state == "problem" and said.setdefault(found.message, check.what) != check.what:
                found = Finding(check.what, "not checked", _DEPENDS.format(said[found.message]))
            yield found
            if found.state in ("problem", "not checked"):
                without.add(check.what)


_DEPENDS = "it depends on the check '{}'"


def _found(check: Check, without: set[str]) -> list[Finding]:
    if missing := [name for name in check.needs if name in without]:
        return [Finding(check.what, "not checked", _DEPENDS.format(missing[0]))]
    try:
        found = check.find()
    except NotChecked as reason:
        return [Finding(check.what, "not checked", str(reason))]
    except (UserError, RunError) as error:
        return [Finding(check.what, "problem", str(error))]
    except ImportError as error:
        if (why := missing_extra(error)) is None:
            raise
        return [Finding(check.what, "problem", why)]
    if isinstance(found, list):
        return [Finding(check.what, "warning", sentence) for sentence in found]
    return [] if found is None else [Finding(check.what, "ok", found)]
