"""Selects and sorts samples: ``score<0.5 and explanation~wrong``. Conditions are parsed, never evaluated as code."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.errors import ConfigError, nearest
from dataflow.samples.files import Row, number

ALIASES = {"latency": "latency_s", "reward": "score", "version": "weights_version"}
"""Short names of columns, for samples that have no column of that name."""

_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_CONDITION = re.compile(
    r"""\s*(?P<column>[^\s<>=!~"']+)\s*(?P<op><=|>=|!=|==|=|<|>|~)\s*"""
    r"""(?P<value>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s"']+)(?P<end>\s+and\s+|\s*$)""",
    re.DOTALL | re.IGNORECASE,
)
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_HOW = "write COLUMN OP VALUE [and ...], with OP one of = != < <= > >= ~ (contains), such as score<0.5"


@dataclass(frozen=True)
class Condition:
    """A condition on one column.

    Attributes:
        column: name of the column, or an alias.
        op: ``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, or ``~``: the text contains the value, in any case.
        value: as it was written, without quotes.
        quoted: whether it was quoted, which makes it a text.
    """

    column: str
    op: str
    value: str
    quoted: bool = False

    def holds(self, row: Row) -> bool:
        """Whether a row, which has the column, meets the condition.

        A missing value meets ``= null`` and each ``!=`` but ``!= null``.

        Raises:
            ConfigError: the column holds numbers and the value is not one; or an order of texts is requested.
        """
        found = row[self.column]
        if self.op == "~":
            return found is not None and self.value.casefold() in str(found).casefold()
        null = not self.quoted and self.value.casefold() == "null"
        if found is None or null or found != found:
            same = (found is None or found != found) is null
            return same if self.op == "=" else not same if self.op == "!=" else False
        wanted = self._wanted(found)
        if self.op == "=":
            return bool(found == wanted)
        return bool(found != wanted) if self.op == "!=" else _ORDERS[self.op](found, wanted)

    def _wanted(self, found: Any) -> Any:
        if isinstance(found, str):
            if self.op in _ORDERS:
                raise ConfigError(f"where: '{self.column}' is a text; compare it with = != or ~ (contains).")
            return self.value
        if isinstance(found, bool) and self.value.casefold() in ("true", "false"):
            return self.value.casefold() == "true"
        try:
            # An integer may have more digits than a float keeps.
            return int(self.value) if isinstance(found, int) and _INTEGER.fullmatch(self.value) else float(self.value)
        except ValueError:
            what = "true or false" if isinstance(found, bool) else "a number"
            raise ConfigError(f"where: '{self.column}' is {what}, '{self.value}' is not; give {what}.") from None


def parse_where(text: str) -> list[Condition]:
    r"""Returns the conditions of a text, all of which must hold.

    Raises:
        ConfigError: the text is no list of conditions.

    >>> parse_where("score<0.5 and explanation ~ 'off by one'")[1]
    Condition(column='explanation', op='~', value='off by one', quoted=True)
    """
    found: list[Condition] = []
    at = 0
    while True:
        match = _CONDITION.match(text, at)
        if match is None:
            raise ConfigError(f"where: '{text[at:].strip()}' is no condition; {_HOW}.")
        value = match["value"]
        quoted = value[0] in "\"'"
        if quoted:
            value = re.sub(r"\\(.)", r"\1", value[1:-1], flags=re.DOTALL)
        found.append(Condition(match["column"], "=" if match["op"] == "==" else match["op"], value, quoted))
        at = match.end()
        if not match["end"].strip():
            return found


def named(column: str, columns: Iterable[str], where: str) -> str:
    """Returns the column that a name or an alias means.

    Args:
        column: the name.
        columns: the existing ones.
        where: the key that names it, for the message.

    Raises:
        ConfigError: there is no such column.
    """
    known = list(dict.fromkeys(columns))
    for name in (column, ALIASES.get(column)):
        if name in known:
            return name
    raise ConfigError(
        f"{where}: no column '{column}'{nearest(column, known) or ';'} the samples have {', '.join(known)}."
    )


def select(rows: Sequence[Row], where: str | None, sort: str | None) -> list[Row]:
    """Returns the rows that meet all conditions, sorted.

    Args:
        rows: of one file or of several; a row that lacks a column of the others has no value in it.
        where: conditions, see :func:`parse_where`; None for all rows.
        sort: column to sort by, smallest first, with ``-`` before it largest first; rows without a value come last,
            equal ones stay in order. None leaves the order.

    Raises:
        ConfigError: bad conditions, or a column that no row has.
    """
    conditions = parse_where(where) if where else []
    if not rows:
        return []
    columns = [name for row in rows for name in row] if conditions or sort else []
    columns = list(dict.fromkeys(columns))
    at = [Condition(named(c.column, columns, "where"), c.op, c.value, c.quoted) for c in conditions]
    missing = dict.fromkeys(c.column for c in at)
    found = [row for row in rows if all(c.holds({**missing, **row}) for c in at)] if at else list(rows)
    if sort:
        name = named(sort.removeprefix("-"), columns, "sort")
        found = _sorted(found, name, sort.startswith("-"))
    return found


def _sorted(rows: Sequence[Row], name: str, falling: bool) -> list[Row]:
    numbers = [(number(row.get(name)), row) for row in rows]
    texts = [(row[name], row) for row in rows if isinstance(row.get(name), str)]
    keyed: list[tuple[Any, Row]] = texts or [(value, row) for value, row in numbers if value is not None]
    there = {id(row) for _, row in keyed}
    keyed.sort(key=lambda pair: pair[0], reverse=falling)
    return [row for _, row in keyed] + [row for row in rows if id(row) not in there]
