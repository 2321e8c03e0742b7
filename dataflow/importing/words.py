"""The words of a shell script: quotes, variables, arrays, comments, continued lines, redirections.

Nothing is expanded here, and nothing is ever run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dataflow.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = re.compile(r"[@*#?$!0-9-]")
_ASSIGNS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?=")
_REDIRECTS = re.compile(r"([0-9]*|&)(<<<|<<-|<<|>>|>\||>&|<&|<>|>|<)")
_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class Text:
    """Characters that stand for themselves."""

    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Variable:
    """``$NAME`` or ``${NAME...}``.

    Attributes:
        name: also ``@``, ``*``, ``#`` or a number.
        index: of an array: a number, ``@`` or ``*``; "" for none.
        operator: what follows the name, such as ``:-``; "#" before it is ``length``.
        operand: behind the operator.
    """

    name: str
    quoted: bool
    index: str = ""
    operator: str = ""
    operand: str = ""
    length: bool = False


@dataclass(frozen=True)
class Command:
    """``$(...)`` or a pair of backticks; its output is unknown, as nothing is run."""

    text: str
    quoted: bool


@dataclass(frozen=True)
class Arithmetic:
    """``$((...))``."""

    text: str
    quoted: bool


Part = Text | Variable | Command | Arithmetic


@dataclass
class Word:
    """A word of a command.

    Attributes:
        parts: in order, joined without a space.
        line: counts from 1.
        items: of ``NAME=(...)``; None for any other word.
    """

    parts: list[Part]
    line: int
    items: list[Word] | None = None

    @property
    def plain(self) -> str:
        """The word if it is one unquoted text, else an empty one."""
        only = self.parts[0] if len(self.parts) == 1 else None
        return only.text if isinstance(only, Text) and not only.quoted else ""

    @property
    def assigns(self) -> str | None:
        """What precedes the value of an assignment, such as ``NAME+=``; None for another word."""
        first = self.parts[0] if self.parts else None
        found = _ASSIGNS.match(first.text) if isinstance(first, Text) and not first.quoted else None
        return found[0] if found else None


@dataclass
class Operator:
    """``;``, ``&&``, a line break, or a redirection with its target, which is of no interest."""

    text: str
    line: int


@dataclass
class Reader:
    """Splits a script into words and operators.

    Args:
        text: of the script.
        name: for messages.
        line: of its first line.
    """

    text: str
    name: str
    line: int = 1
    _at: int = 0
    _heres: list[str] = field(default_factory=list)

    def tokens(self) -> list[Word | Operator]:
        """Returns all words and operators, the last of them a line break.

        Raises:
            ConfigError: a quote or a bracket is not closed.
        """
        found: list[Word | Operator] = []
        while (token := self._next()) is not None:
            found.append(token)
        return [*found, Operator("\n", self.line)]

    def error(self, what: str) -> ConfigError:
        """Returns an error that names the present line."""
        return ConfigError(f"{self.name}, line {self.line}: {what}.")

    def _peek(self, text: str) -> bool:
        return self.text.startswith(text, self._at)

    def _blanks(self) -> None:
        while self._at < len(self.text):
            if self._peek("\\\n") or self._peek("\\\r\n"):
                self._at += 2 if self._peek("\\\n") else 3
                self.line += 1
            elif self.text[self._at] in " \t\r":
                self._at += 1
            elif self.text[self._at] == "#":
                end = self.text.find("\n", self._at)
                self._at = len(self.text) if end < 0 else end
            else:
                return

    def _next(self) -> Word | Operator | None:
        self._blanks()
        if self._at >= len(self.text):
            return None
        redirects = _REDIRECTS.match(self.text, self._at)
        if redirects and not self.text.startswith("(", redirects.end()):
            return self._redirected(redirects)
        for text in _OPERATORS:
            if self._peek(text):
                self._at += len(text)
                found = Operator(text, self.line)
                if text == "\n":
                    self.line += 1
                    self._skip_heres()
                return found
        return self._word()

    def _redirected(self, found: re.Match[str]) -> Operator:
        self._at = found.end()
        self._blanks()
        target = self._word()
        if found[2].startswith("<<") and found[2] != "<<<":
            self._heres.append("".join(part.text for part in target.parts if isinstance(part, Text)))
        return Operator("redirect", self.line)

    def _skip_heres(self) -> None:
        for end in self._heres:
            while self._at < len(self.text):
                line, _, _rest = self.text[self._at :].partition("\n")
                self._at += len(line) + 1
                self.line += 1
                if line.strip() == end:
                    break
        self._heres.clear()

    def _word(self) -> Word:
        word = Word([], self.line)
        while self._at < len(self.text):
            at = self.text[self._at]
            if at in " \t\r\n;|&)" or self._peek("\\\n"):
                break
            if at in "<>" and not self.text.startswith("(", self._at + 1):
                break
            if at == "(":
                _join(word.parts)
                if word.assigns is not None and word.plain == word.assigns:
                    self._at += 1
                    word.items = self._items()
                break
            word.parts += self._part()
        _join(word.parts)
        return word

    def _items(self) -> list[Word]:
        items, began = [], self.line
        while True:
            token = self._next()
            if token is None:
                raise ConfigError(f"{self.name}, line {began}: the bracket of an array is not closed.")
            if isinstance(token, Word):
                items.append(token)
            elif token.text == ")":
                return items

    def _part(self) -> list[Part]:
        at = self.text[self._at]
        if at == "'" or self._peek("$'"):
            self._at += 1 if at == "'" else 2
            return [Text(self._until("'"), quoted=True)]
        if at == '"':
            self._at += 1
            return self._double()
        if at == "\\":
            self._at += 2
            return [Text(self.text[self._at - 1 : self._at], quoted=True)]
        if at in "$`":
            return [self._expansion(quoted=False)]
        if at in "<>":  # a process whose output is a file
            self._at += 1
            return [Command(self._balanced("("), quoted=True)]
        self._at += 1
        return [Text(at)]

    def _until(self, end: str) -> str:
        stop = self.text.find(end, self._at)
        if stop < 0:
            raise self.error(f"the quote {end} is not closed")
        found, self._at = self.text[self._at : stop], stop + 1
        self.line += found.count("\n")
        return found

    def _double(self) -> list[Part]:
        parts: list[Part] = [Text("", quoted=True)]
        while self._at < len(self.text):
            at = self.text[self._at]
            if at == '"':
                self._at += 1
                return parts
            if at == "\\" and self.text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`"):
                parts.append(Text(self.text[self._at + 1], quoted=True))
                self._at += 2
            elif self._peek("\\\n"):
                self._at += 2
                self.line += 1
            elif at in "$`":
                parts.append(self._expansion(quoted=True))
            else:
                self.line += at == "\n"
                parts.append(Text(at, quoted=True))
                self._at += 1
        raise self.error('the quote " is not closed')

    def _expansion(self, quoted: bool) -> Part:
        if self._peek("`"):
            self._at += 1
            return Command(self._until("`"), quoted)
        self._at += 1
        if self._peek("(("):
            inner = self._balanced("(")
            if inner.startswith("(") and inner.endswith(")"):
                return Arithmetic(inner[1:-1], quoted)
            return Command(inner, quoted)
        if self._peek("("):
            return Command(self._balanced("("), quoted)
        if self._peek("{"):
            return self._braced(self._balanced("{"), quoted)
        found = _NAME.match(self.text, self._at) or _SPECIAL.match(self.text, self._at)
        if found is None:
            return Text("$", quoted)
        self._at = found.end()
        return Variable(found[0], quoted)

    def _braced(self, inner: str, quoted: bool) -> Part:
        length = inner.startswith("#") and len(inner) > 1
        text = inner[1:] if length else inner
        found = _NAME.match(text) or _SPECIAL.match(text)
        if found is None:
            raise self.error(f"${{{inner}}} is not read; write its value out")
        rest, index = text[found.end() :], ""
        if rest.startswith("["):
            index, _, rest = rest[1:].partition("]")
        operator = re.match(r":[-=?+]|%%|##|//|[-=?+%#/]|", rest)
        assert operator is not None
        if rest and not operator[0]:
            raise self.error(f"${{{inner}}} is not read; write its value out")
        return Variable(found[0], quoted, index, operator[0], rest[operator.end() :], length)

    def _balanced(self, opening: str) -> str:
        """Returns what is between a bracket at the present place and its partner; quotes hide brackets."""
        began, depth, start = self.line, 0, self._at + 1
        while self._at < len(self.text):
            at = self.text[self._at]
            if at == "\\":
                self._at += 1
            elif at in "'\"" and not (opening == "{" and at == "'"):
                end = self._at + 1
                while end < len(self.text) and self.text[end] != at:
                    end += 2 if at == '"' and self.text[end] == "\\" else 1
                self.line += self.text.count("\n", self._at, end)
                self._at = end
            elif at == opening:
                depth += 1
            elif at == _CLOSING[opening]:
                depth -= 1
                if not depth:
                    self._at += 1
                    return self.text[start : self._at - 1]
            self.line += at == "\n"
            self._at += 1
        raise ConfigError(f"{self.name}, line {began}: the bracket {opening} is not closed.")


def _join(parts: list[Part]) -> None:
    """Joins neighbouring texts that are quoted alike."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text) and part.quoted == last.quoted:
            joined[-1] = Text(last.text + part.text, part.quoted)
        else:
            joined.append(part)
    parts[:] = joined
