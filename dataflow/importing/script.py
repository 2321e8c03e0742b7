"""Follows a shell script to its launch of verl. Nothing of it is run.

Assignments, arrays, ``if`` and ``case`` whose conditions can be known are followed. A variable that depends on anything
else, such as the output of a command, is unknown, which matters only if the launch needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple

from dataflow.errors import ConfigError
from dataflow.importing.values import MARK, PRINTED, WRITE_OUT, Unknown, Variables, needed
from dataflow.importing.words import Operator, Reader, Word

MAIN = re.compile(r"(^|[\s./])verl[./]trainer[./]main_ppo(\.py)?(\s|$)")
"""What names verl's trainer in a command."""

_DECLARING = ("export", "declare", "typeset", "local", "readonly")
_LOOPS = {"for": "done", "while": "done", "until": "done", "select": "done"}
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
Status = bool | None
"""Whether a command would succeed; None if that is unknown."""


class Launch(NamedTuple):
    """A launch that was found.

    Attributes:
        arguments: of ``main_ppo``.
        line: of the script.
        passes_on: whether the script's own arguments are among them (``"$@"``).
        unknown: what :data:`~dataflow.importing.values.MARK` stands for in the arguments, by its name.
    """

    arguments: list[str]
    line: int
    passes_on: bool
    unknown: Mapping[str, Unknown] = MappingProxyType({})


def launch_of(text: str, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Returns the launch of verl in a script.

    Args:
        text: of the script.
        name: of the script, for messages.
        arguments: that the script would be started with.
        environment: likewise.

    Raises:
        ConfigError: there is no launch of ``verl.trainer.main_ppo``, there are several, what it needs is unknown, or
            the script is too deep or its values are too long to be followed.
    """
    try:
        found = _Follower(text, name, Variables(environment, arguments, name)).follow()
    except RecursionError as error:
        raise ConfigError(f"{name} nests too deep to be followed; {WRITE_OUT}.") from error
    if not found:
        raise ConfigError(
            f"{name}: no command that would be reached in it launches verl.trainer.main_ppo; give the script that "
            f"does, or {PRINTED}."
        )
    if len(found) > 1:
        raise ConfigError(
            f"{name} launches verl {len(found)} times (lines {', '.join(str(each.line) for each in found)}); "
            "give a script with one launch."
        )
    return found[0]


class _Follower:
    def __init__(self, text: str, name: str, variables: Variables) -> None:
        self._tokens = Reader(text, name).tokens()
        self._at = 0
        self._name = name
        self._variables = variables
        self._unsure: Unknown | None = None
        self._skipping = 0
        self._ended = False
        self._found: list[Launch] = []

    def follow(self) -> list[Launch]:
        while self._at < len(self._tokens):
            before = self._at
            self._list()
            if self._at == before:
                self._at += 1  # a closing word without its opening one
        return self._found

    @property
    def _active(self) -> bool:
        return not self._skipping and not self._ended

    def _token(self) -> Word | Operator | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _word(self) -> str:
        """The present token if it is a plain word."""
        token = self._token()
        return token.plain if isinstance(token, Word) else ""

    def _operator(self) -> str:
        token = self._token()
        return token.text if isinstance(token, Operator) else ""

    def _list(self, *ends: str) -> Status:
        """Follows commands up to a word that ends them, which stays."""
        status: Status = True
        while self._token() is not None:
            if self._operator() in (";", "\n", "&", "redirect"):
                self._at += 1
            elif self._word() in ends or self._operator() in ends or self._operator() in (")", ";;"):
                break
            else:
                status = self._chain()
        return status

    def _chain(self) -> Status:
        status = self._pipeline()
        while (operator := self._operator()) in ("&&", "||"):
            self._at += 1
            self._breaks()
            taken = status if operator == "&&" or status is None else not status
            after = self._branch(taken, self._pipeline, self._hope if operator == "&&" and self._external else None)
            if taken is None:
                status = None
            elif taken:
                status = after
        return status

    def _branch(self, taken: Status, follow: Callable[[], Status], doubt: Unknown | None = None) -> Status:
        """Follows commands that run, do not run, or may run."""
        if taken is None:
            before = self._unsure
            self._unsure = before or doubt or self._doubt()
            status = follow()
            self._unsure = before
            return status
        self._skipping += not taken
        status = follow()
        self._skipping -= not taken
        return status

    def _doubt(self) -> Unknown:
        token = self._token()
        line = token.line if token is not None else 0
        why = self._condition
        if why is not None and why.variable:
            return Unknown(why.variable, why.why, why.line)
        return Unknown("", "is set under a condition that is not known", line)

    _condition: Unknown | None = None
    _external = False
    """Whether the last command was an unknown one, such as cd; a launch behind it is taken to be reached."""
    _hope = Unknown("", "is set only if a command before it succeeds", 0)

    def _breaks(self) -> None:
        while self._operator() == "\n":
            self._at += 1

    def _pipeline(self) -> Status:
        negated = self._word() == "!"
        self._at += negated
        status = self._command()
        while self._operator() == "|":
            self._at += 1
            self._breaks()
            self._command()
            status = None
        return None if status is None else status != negated

    def _command(self) -> Status:
        word = self._word()
        if word == "if":
            return self._if()
        if word == "case":
            return self._case()
        if word in _LOOPS:
            return self._loop()
        if word == "[[":
            return self._test()
        if word == "{" or self._operator() == "(":
            end = "}" if word == "{" else ")"
            self._at += 1
            status = self._list(end)
            self._at += 1
            return status
        if word == "function" or self._defines():
            return self._function()
        return self._simple()

    def _defines(self) -> bool:
        following = self._tokens[self._at + 1 : self._at + 3]
        return bool(self._word()) and [getattr(each, "text", "") for each in following] == ["(", ")"]

    def _function(self) -> Status:
        """Passes over a function; one that holds the launch is not followed."""
        self._at += 1 + (self._word() == "function")
        while self._operator() in ("(", ")", "\n"):
            self._at += 1
        return self._branch(False, self._command)

    def _if(self) -> Status:
        open_: Status = True  # whether no branch was taken yet
        while self._word() in ("if", "elif"):
            self._at += 1
            holds = self._branch(open_, lambda: self._list("then"))
            self._at += 1
            taken = False if open_ is False else None if None in (open_, holds) else holds
            self._branch(taken, lambda: self._list("elif", "else", "fi"))
            open_ = False if taken or open_ is False else None if taken is None else True
        if self._word() == "else":
            self._at += 1
            self._branch(open_, lambda: self._list("fi"))
        self._at += 1
        return None

    def _case(self) -> Status:
        self._at += 1
        token = self._token()
        subject = self._variables.text(token, unset="") if isinstance(token, Word) else ""
        self._at += 1
        before, self._condition = self._condition, subject if isinstance(subject, Unknown) else self._condition
        while self._word() != "in" and self._token() is not None:
            self._at += 1
        self._at += 1
        open_: Status = None if isinstance(subject, Unknown) else True
        while self._token() is not None and self._word() != "esac":
            patterns = []
            while self._token() is not None and self._operator() != ")":
                token = self._token()
                if isinstance(token, Word):
                    patterns.append(self._variables.text(token, unset=""))
                self._at += 1
            if not patterns:
                break
            self._at += 1
            fits = open_ and any(isinstance(each, str) and fnmatchcase(str(subject), each) for each in patterns)
            self._branch(fits, lambda: self._list("esac"))
            open_ = False if fits else open_
            while self._operator() in (";;", "\n"):
                self._at += 1
        self._at += 1
        self._condition = before
        return None

    def _loop(self) -> Status:
        self._at += 1
        while self._word() != "do" and self._token() is not None:
            self._at += 1
        self._at += 1
        self._branch(None if self._active else False, lambda: self._list("done"))
        self._at += 1
        return None

    def _test(self) -> Status:
        self._at += 1
        items: list[Word | str] = []
        while (token := self._token()) is not None and self._word() != "]]":
            items.append(token if isinstance(token, Word) else token.text)
            self._at += 1
        self._at += 1
        return self._holds(items) if self._active else None

    def _holds(self, items: list[Word | str]) -> Status:
        for operator, whole in (("||", True), ("&&", False)):
            if operator in items:
                at = items.index(operator)
                first, second = self._holds(items[:at]), self._holds(items[at + 1 :])
                if whole in (first, second):
                    return whole
                return None if None in (first, second) else not whole
        words = [item for item in items if isinstance(item, Word)]
        return self._tested(words)

    def _tested(self, words: Sequence[Word]) -> Status:
        """Returns whether a test holds, such as ``-z $NAME`` or ``$NAME = value``."""
        if words and words[0].plain == "!":
            inner = self._tested(words[1:])
            return None if inner is None else not inner
        texts = [self._variables.text(word, unset="") for word in words]
        lost = next((text for text in texts if isinstance(text, Unknown)), None)
        if lost is not None:
            self._condition = lost
            return None
        known = [str(text) for text in texts]
        if len(known) == 1:
            return bool(known[0])
        if len(known) == 2 and known[0] in ("-z", "-n"):
            return bool(known[1]) == (known[0] == "-n")
        if len(known) == 3 and known[1] in ("=", "==", "!="):
            return fnmatchcase(known[0], known[2]) == (known[1] != "!=")
        if len(known) == 3 and known[1] in _NUMBERS:
            try:
                return _NUMBERS[known[1]](int(known[0]), int(known[2]))
            except ValueError:
                return None
        return None

    def _simple(self) -> Status:
        words: list[Word] = []
        while (token := self._token()) is not None:
            if isinstance(token, Word):
                words.append(token)
            elif token.text != "redirect":
                break
            self._at += 1
        if not words:
            self._at += self._operator() not in ("\n", ";", ")", ";;", "|", "&", "&&", "||")
            return True
        return self._run(words) if self._active else None

    def _run(self, words: list[Word]) -> Status:
        assigned = 0
        while assigned < len(words) and words[assigned].assigns is not None:
            assigned += 1
        if assigned == len(words):
            for word in words:
                self._variables.assign(word, self._unsure)
            return True
        self._external = False
        # A variable set for one command alone is not that of the script.
        words = words[assigned:]
        name = words[0].plain
        if name in _DECLARING:
            for word in words[1:]:
                if word.assigns is not None:
                    self._variables.assign(word, self._unsure)
            return True
        if name == "unset":
            for word in words[1:]:
                self._variables.unset(word.plain)
            return True
        if name == "shift" and self._unsure is None:
            del self._variables.arguments[:1]
            return True
        if name in ("[", "test"):
            return self._tested(words[1 : -1 if name == "[" else None])
        if name in ("exit", "return") and self._unsure is None:
            self._ended = True
            return True
        self._launched(words)
        self._external = True
        return {"true": True, ":": True, "set": True, "echo": True, "false": False}.get(name)

    def _launched(self, words: list[Word]) -> None:
        """Notes a command that launches verl."""
        self._variables.passed_on = False
        marked: dict[str, Unknown] = {}
        fields = [(field, word.line) for word in words for field in self._variables.fields(word, marked=marked)]
        at = next((i for i, (each, _) in enumerate(fields) if isinstance(each, str) and MAIN.search(each)), None)
        if at is None:
            return
        line = words[0].line
        if str(fields[at][0]).strip().count(" "):
            raise ConfigError(f"{self._name}, line {line}: the launch is a text within a command; write it out.")
        if self._unsure is not None and self._unsure is not self._hope:
            raise needed([Unknown(self._unsure.variable, self._unsure.why, self._unsure.line)], self._name)
        rest = [str(field) for field, _ in fields[at + 1 :]]
        used = {name for field in rest for name in MARK.findall(field)}
        unknown = {name: value for name, value in marked.items() if name in used}
        self._found.append(Launch(rest, line, self._variables.passed_on, unknown))
