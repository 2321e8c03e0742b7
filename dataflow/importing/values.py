"""What the words of a shell script mean where that can be known without running anything."""

from __future__ import annotations

import ast
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from dataflow.errors import ConfigError
from dataflow.importing.words import Arithmetic, Command, Part, Reader, Text, Variable, Word


@dataclass(frozen=True)
class Unknown:
    """A value that only running the script would show.

    Attributes:
        variable: that must be set for it to be known; "" if none would help.
        why: part of a sentence, such as ``takes the output of a command``.
        line: of the script.
        unset: whether it is only that nothing sets the variable.
    """

    variable: str
    why: str
    line: int
    unset: bool = False


Value = str | list[str] | Unknown
_SUMS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Div: lambda a, b: int(a / b),
    ast.FloorDiv: operator.floordiv,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
MARK = re.compile(r"%%([A-Za-z_][A-Za-z0-9_]*)%%")
"""Stands in a value for what only the machine of the launch knows, by the name of a variable."""
PRINTED = "import what the launch prints with '--cfg job --resolve' behind it"
WRITE_OUT = f"write the launch out, or {PRINTED}"
_LONGEST_SUM = 200
_LONGEST = 2**23
"""Characters of all values of a script together; the system takes a fraction of it as the arguments of a command."""
_LONGEST_CUT = 2**12
"""Characters of a value that is cut or replaced by a pattern, whose time is the square of them."""


def mark(name: str) -> str:
    """Returns what stands in a value for a variable, see :data:`MARK`."""
    return f"%%{name}%%"


class Variables:
    """The variables of a script.

    Args:
        environment: that it would be started in.
        arguments: behind the script's name, ``"$@"``.
        name: of the script, for messages.
    """

    def __init__(self, environment: Mapping[str, str], arguments: Sequence[str], name: str) -> None:
        self._values: dict[str, Value] = dict(environment)
        self.arguments = list(arguments)
        self.name = name
        self.passed_on = False
        """Whether the script has read ``"$@"``."""
        self._length = 0

    def set(self, name: str, value: Value, more: bool = False, line: int = 0) -> None:
        """Sets a variable, or adds to it (``+=``)."""
        before = self._values.get(name, [] if isinstance(value, list) else "")
        if more and not isinstance(before, Unknown) and not isinstance(value, Unknown):
            self._grow(len(before) // 16, line)  # a copy takes a fraction of the time of an expansion
            if isinstance(value, list):
                value = [*(before if isinstance(before, list) else [before]), *value]
            elif isinstance(before, list):
                value = [(before[0] if before else "") + value, *before[1:]]
            else:
                value = before + value
        self._values[name] = before if more and isinstance(before, Unknown) else value

    def _grow(self, length: int, line: int) -> None:
        """Counts what a line adds to the values: a few lines can make one that fits into no memory."""
        self._length += length
        if self._length > _LONGEST:
            raise ConfigError(f"{self.name}, line {line}: its values are too long to be followed; {WRITE_OUT}.")

    def unset(self, name: str) -> None:
        self._values.pop(name, None)

    def assign(self, word: Word, unsure: Unknown | None = None) -> None:
        """Carries out an assignment; with ``unsure`` the variable is unknown afterwards."""
        prefix = word.assigns or ""
        name, more = prefix.rstrip("=").removesuffix("+").partition("[")[0], prefix.endswith("+=")
        value: Value
        if unsure is not None or "[" in prefix:
            why = unsure or Unknown("", "sets one item of an array", word.line)
            value = Unknown(why.variable or name, why.why, why.line)
        elif word.items is not None:
            fields = [field for item in word.items for field in self.fields(item)]
            lost = next((field for field in fields if isinstance(field, Unknown)), None)
            value = lost or [field for field in fields if isinstance(field, str)]
        else:
            first, *rest = word.parts
            assert isinstance(first, Text)
            value = self.text(Word([Text(first.text[len(prefix) :]), *rest], word.line))
            if isinstance(value, str) and first.text[len(prefix) :].startswith("~/"):
                value = str(self._values.get("HOME", "~")) + value[1:]
            if isinstance(value, Unknown) and not value.unset and value.variable == "":
                value = Unknown(name, value.why, value.line)
        self.set(name, value, more, word.line)

    def text(self, word: Word, unset: str | None = None) -> str | Unknown:
        """Returns a word as one text.

        Args:
            word: of the script.
            unset: stands for a variable that is not set; None makes that unknown.
        """
        fields = self.fields(Word([_quoted(part) for part in word.parts], word.line), unset)
        lost = next((field for field in fields if isinstance(field, Unknown)), None)
        return lost or " ".join(str(field) for field in fields)

    def fields(
        self, word: Word, unset: str | None = None, marked: dict[str, Unknown] | None = None
    ) -> list[str | Unknown]:
        """Returns the arguments that a word becomes: none, one, or several of an array.

        Args:
            word: of the script.
            unset: see :meth:`text`.
            marked: gets what is not known by its name, for which :func:`mark` stands in the arguments; None makes an
                argument with it unknown as a whole.
        """
        found: list[str | Unknown] = []
        open_: str | Unknown | None = None
        # "${NAME[@]}" of an empty array is no argument, although the quotes alone would be an empty one.
        spread = any(isinstance(part, Variable) and "@" in (part.name, part.index) for part in word.parts)
        for part in word.parts:
            if spread and part == Text("", quoted=True):
                continue
            value = self._value(part, word.line)
            if isinstance(value, Unknown) and value.unset and unset is not None:
                value = unset
            if isinstance(value, Unknown) and marked is not None:
                name = (
                    value.variable
                    if value.variable.isidentifier()
                    else f"VALUE_{1 + sum(each.startswith('VALUE_') for each in marked)}"
                )
                marked[name] = value
                value = mark(name)
            if isinstance(value, Unknown):
                open_ = value if not isinstance(open_, Unknown) else open_
                continue
            pieces: list[str] = value if isinstance(value, list) else [value]
            if not part.quoted and not isinstance(part, Text):
                pieces = [piece for each in pieces for piece in each.split()]
            if not pieces:
                continue
            for more, piece in enumerate(pieces):
                self._grow(len(piece) + 1, word.line)
                if more:
                    found.append("" if open_ is None else open_)
                    open_ = None
                if not isinstance(open_, Unknown):
                    open_ = (open_ or "") + piece
        return found if open_ is None else [*found, open_]

    def _value(self, part: Part, line: int) -> str | list[str] | Unknown:
        if isinstance(part, Text):
            return part.text
        if isinstance(part, Command):
            return _output(part.text, line)
        if isinstance(part, Arithmetic):
            return self._sum(part.text, line)
        return self._variable(part, line)

    def _variable(self, part: Variable, line: int) -> str | list[str] | Unknown:
        value = self._held(part, line)
        missing = isinstance(value, Unknown) and value.unset
        empty = missing or (part.operator.startswith(":") and value in ("", []))
        kind = part.operator[-1:] if part.operator[:1] in (":", "-", "=", "?", "+") else ""
        if kind in ("-", "=") and empty:
            value = self._operand(part.operand, line)
            if kind == "=":
                self.set(part.name, value)
        elif kind == "+":
            value = "" if empty else self._operand(part.operand, line)
        elif kind == "?" and empty:
            return Unknown(part.name, "is not set", line, unset=True)
        if isinstance(value, Unknown):
            return value
        if part.length:
            return str(len(value))
        if part.operator and not kind:
            pattern = self._operand(part.operand, line)
            if isinstance(pattern, Unknown) or isinstance(value, list) or len(value) + len(pattern) > _LONGEST_CUT:
                return Unknown("", f"uses ${{{part.name}{part.operator}...}}", line)
            return _trimmed(value, part.operator, pattern)
        return value

    def _held(self, part: Variable, line: int) -> str | list[str] | Unknown:
        name = part.name
        if name in ("@", "*"):
            self.passed_on = True
            return list(self.arguments)
        if name == "#":
            return str(len(self.arguments))
        if name == "0":
            return self.name
        if name.isdigit():
            at = int(name) - 1
            return self.arguments[at] if at < len(self.arguments) else Unknown(name, "is not given", line, unset=True)
        if name not in self._values:
            return Unknown(name, "is not set", line, unset=True)
        value = self._values[name]
        if isinstance(value, Unknown) or part.index in ("@", "*"):
            return value
        if isinstance(value, list):
            at = int(part.index) if re.fullmatch("[0-9]{1,9}", part.index) else 0
            return value[at] if at < len(value) else ""
        return value

    def _operand(self, text: str, line: int) -> str | Unknown:
        reader = Reader(f'"{text}"' if '"' not in text else text, self.name, line)
        words = [token for token in reader.tokens() if isinstance(token, Word)]
        texts = [self.text(word) for word in words]
        lost = next((each for each in texts if isinstance(each, Unknown)), None)
        return lost or " ".join(str(each) for each in texts)

    def _sum(self, text: str, line: int) -> str | Unknown:
        inner = self._operand(text, line)
        if isinstance(inner, Unknown):
            return inner
        try:
            tree = ast.parse(inner.strip(), mode="eval").body
            return str(int(self._computed(tree, line)))
        except _NotKnownError as error:
            return error.value
        except (ArithmeticError, KeyError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
            return Unknown("", f"takes the sum $(({text.strip()[:_LONGEST_SUM]}))", line)

    def _computed(self, tree: ast.expr, line: int) -> int:
        if isinstance(tree, ast.Constant) and type(tree.value) is int:
            return tree.value
        if isinstance(tree, ast.Name):
            value = self._held(Variable(tree.id, quoted=True), line)
            if isinstance(value, Unknown):
                raise _NotKnownError(value)
            return int(str(value))
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            return -self._computed(tree.operand, line)
        if isinstance(tree, ast.BinOp):
            return _SUMS[type(tree.op)](self._computed(tree.left, line), self._computed(tree.right, line))
        if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
            right = self._computed(tree.comparators[0], line)
            return int(_SUMS[type(tree.ops[0])](self._computed(tree.left, line), right))
        raise ValueError(ast.dump(tree))


class _NotKnownError(Exception):
    def __init__(self, value: Unknown) -> None:
        super().__init__(value.why)
        self.value = value


def _quoted(part: Part) -> Part:
    """Returns a part as it is in an assignment, where no value is split at spaces."""
    if isinstance(part, Variable):
        return Variable(part.name, True, part.index, part.operator, part.operand, part.length)
    return part if isinstance(part, Text) else type(part)(part.text, True)


def _output(text: str, line: int) -> str | Unknown:
    """Returns the output of the two commands that tell a run's name; that of any other is unknown."""
    words = text.split()
    if words == ["pwd"]:
        return str(Path.cwd())
    form = " ".join(words[1:]).strip("\"'")
    if words[:1] == ["date"] and form.startswith("+"):
        return time.strftime(form[1:])
    return Unknown("", f"takes the output of a command, $({' '.join(words)[:60]})", line)


def _trimmed(value: str, operator_: str, pattern: str) -> str:
    if operator_.startswith("/"):
        old, _, new = pattern.partition("/")
        return value.replace(old, new, -1 if operator_ == "//" else 1)
    cuts = range(len(value) + 1)
    if operator_.startswith("%"):  # a suffix; the shortest for one sign, the longest for two
        fitting = [cut for cut in cuts if fnmatchcase(value[cut:], pattern)]
        return value[: (fitting[0] if operator_ == "%%" else fitting[-1])] if fitting else value
    fitting = [cut for cut in cuts if fnmatchcase(value[:cut], pattern)]
    return value[(fitting[-1] if operator_ == "##" else fitting[0]) :] if fitting else value


def needed(values: Sequence[Unknown], name: str) -> ConfigError:
    """Returns the error about unknown values that a launch needs: all variables at once.

    Args:
        values: at least one.
        name: of the script.
    """
    by_variable: dict[str, Unknown] = {}
    for each in values:
        by_variable.setdefault(each.variable, each)
    problems = [f"{u.variable or 'a value'} (line {u.line}) {u.why}" for u in by_variable.values()]
    settable = [variable for variable in by_variable if variable.isidentifier()]
    if len(settable) < len(by_variable):
        fix = f"write the value out, or {PRINTED}"
    else:
        fix = f"set it: {' '.join(f'{each}=...' for each in settable)} dataflow import-verl {name}"
    return ConfigError(f"{name}: {', '.join(problems)}; {fix}.")
