"""A check of what a run needs, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from loguru import logger

from dataflow.errors import NotChecked, RunError, UserError
from dataflow.system.extras import missing_extra
from dataflow.system.secrets import redact


@dataclass(frozen=True)
class Check:
    """A check of what a run needs, which is named in one or two words.

    ``find`` returns what it found, as a clause, or None if that is not worth a line, or warnings, each a sentence. It
    raises a :class:`~dataflow.errors.UserError` for a problem, :class:`~dataflow.errors.NotChecked` if it cannot tell.
    ``needs`` names earlier checks, without whose success this one cannot be made; a ``slow`` one takes seconds.
    """

    what: str
    find: Callable[[], str | list[str] | None]
    needs: tuple[str, ...] = ()
    slow: bool = False


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        what: was checked.
        state: of it.
        message: what was found; of a problem, the sentence that a start would end with.
    """

    what: str
    state: Literal["ok", "warning", "problem", "not checked"]
    message: str


def make_all(checks: Iterable[Check]) -> None:
    """Makes checks until the first problem, whose UserError it raises, and logs their warnings."""
    for check in checks:
        for sentence in found if isinstance(found := check.find(), list) else ():
            logger.warning(redact(sentence))


def collect(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yields what each check found that can be made; a problem that two checks share is yielded once."""
    without, said = set[str](), dict[str, str]()
    for check in checks:
        missing = next((name for name in check.needs if name in without), None)
        found = None
        try:
            found = None if missing else check.find()
        except (UserError, RunError, ImportError) as error:
            why = missing_extra(error)
            if why is None and isinstance(error, ImportError):
                raise
            without.add(check.what)
            if isinstance(error, NotChecked):
                yield Finding(check.what, "not checked", str(error))
            elif (first := said.setdefault(why or str(error), check.what)) == check.what:
                yield Finding(check.what, "problem", why or str(error))
            else:
                missing = first
        if missing:
            without.add(check.what)
            yield Finding(check.what, "not checked", f"it depends on the check '{missing}'")
        elif isinstance(found, list):
            yield from (Finding(check.what, "warning", sentence) for sentence in found)
        elif found is not None:
            yield Finding(check.what, "ok", found)
