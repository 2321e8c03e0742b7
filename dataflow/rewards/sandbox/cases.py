"""Test cases of a program, in verl's forms, and the program in a response."""

from __future__ import annotations

import ast
import json
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from dataflow.rewards.sandbox.outcome import BadCases, Outcome, short

_KEYS = ("inputs", "outputs", "fn_name", "assert_case")
_PYTHON = ("python", "python_gpu")
"""Languages whose programs a statement or a call can be added to."""
_ignored: set[str] = set()

_MODULES = [
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
]
"""What a function may use without importing it: the names of verl's wrapper."""

_FUNCTION = """\
import json, sys
names = {{"__name__": "__main__"}}
for statement in ("from {{}} import *", "import {{}}"):
    for module in {modules!r}:
        exec(statement.format(module), names)
exec(compile({source!r}, "solution.py", "exec"), names)
text = sys.stdin.read()
arguments = [json.loads(line) for line in text.rstrip().split("\\n")] if text.strip() else []
name = {name!r}
function = names[name] if name in names else getattr(names["Solution"](), name)
result = function(*arguments)
plain = isinstance(result, (dict, list, tuple, bool)) or result is None
print(json.dumps(result) if plain else result)
"""

_CHECKED = """\
def checked(source, statement):
    import os
    write, mark = os.write, b""
    while len(mark) < {size}:
        mark += os.read(0, {size} - len(mark)) or os.abort()
    names = globals()
    del names["checked"]
    exec(compile(source, "solution.py", "exec"), names)
    exec(compile(statement, "assert_case", "exec"), names)
    write(1, mark)
checked({source!r}, {statement!r})
"""
"""Prints the beginning of its input once the statement has passed: a program that ends itself before cannot know it.

The two are compiled one by one, so that no end of a program makes the statement a part of something else.
"""


@dataclass(frozen=True)
class Case:
    """A program with its input and the output that is expected.

    Attributes:
        source: of the program.
        stdin: its input.
        expected: texts of which its output must be one; empty if it only has to end with exit code 0.
        mark: a secret text that it prints, besides its output, once its last statement has passed; "" for none.
    """

    source: str
    stdin: str
    expected: tuple[str, ...]
    mark: str = ""

    def verdict(self, outcome: Outcome) -> str:
        """Returns ``passed``, ``wrong_answer``, or the outcome's status if the program did not finish."""
        if outcome.status != "finished":
            return outcome.status
        if self.mark not in outcome.stdout:
            return "runtime_error"
        shown = outcome.stdout.replace(self.mark, "", 1).rstrip("\n")
        return "passed" if not self.expected or shown in self.expected else "wrong_answer"


def code_of(response: str) -> str | None:
    """Returns the program in a response, as verl does: the last block of Python, or else the first block.

    >>> code_of("Look:\\n```python\\nprint(1)\\n```\\nDone.")
    '\\nprint(1)\\n'
    >>> code_of("no block") is None
    True
    """
    if "```python" in response:
        return response.split("```python")[-1].split("```")[0]
    if "```" not in response:
        return None
    block = response.split("```")[1]
    first, newline, rest = block.partition("\n")
    return rest if newline and first.strip().isalpha() else block


def cases_of(code: str, truth: Any, most: int | None = None, language: str = "python") -> list[Case]:
    """Returns the test cases of a sample.

    Args:
        code: the program, or the definition of a function.
        truth: a dict, or its JSON: ``inputs`` and ``outputs``, lists of one entry per case; with ``fn_name``, each
            input holds the arguments of that function, JSON, one a line. Or ``assert_case``, a list of statements to
            be run after the program. An output of None accepts any.
        most: number of cases that count, from the first; None for all.
        language: of the program.

    Raises:
        BadCases: it has another form.
    """
    given = _parsed(truth)
    asserts, name = given.get("assert_case"), given.get("fn_name") or ""
    _check_kind(asserts, name, language)
    if asserts is not None:
        asserts = _list(given, "assert_case")
        for at, statement in enumerate(asserts[:most]):
            _check_statement(statement, at)
        columns = {"inputs": [""] * len(asserts), "outputs": [None] * len(asserts)}
        given = {**columns, **{key: value for key, value in given.items() if value is not None}}
    inputs, outputs = _list(given, "inputs"), _list(given, "outputs")
    asserts = [None] * len(inputs) if asserts is None else asserts
    if not len(inputs) == len(outputs) == len(asserts):
        raise BadCases(
            f"the ground truth has {len(inputs)} inputs, {len(outputs)} outputs and {len(asserts)} assert_case entries"
        )
    if not inputs:
        raise BadCases("the ground truth has no test case")
    rows = list(zip(inputs, outputs, asserts, strict=True))[:most]
    return [_case(code, name, at, *row) for at, row in enumerate(rows)]


def _check_kind(asserts: Any, name: Any, language: str) -> None:
    if not isinstance(name, str) or not (name == "" or name.isidentifier()):
        raise BadCases(f"the ground truth's fn_name {short(repr(name))} is no name of a function")
    if asserts is not None and name:
        raise BadCases("the ground truth has both fn_name and assert_case, of which a case has one")
    if (asserts is not None or name) and language not in _PYTHON:
        kind = "fn_name" if name else "assert_case"
        raise BadCases(f"the ground truth has {kind}, which is Python, for programs in {language}")


def _case(code: str, name: str, at: int, given: Any, output: Any, statement: Any) -> Case:
    stdin, expected = _input(given, at, bool(name)), _expected(output)
    source = f"{code}\n\n"
    if name:
        source = _FUNCTION.format(modules=_MODULES, source=source, name=name)
    if statement is None and (expected or not name):
        return Case(source, stdin, expected)
    mark = secrets.token_hex(16)
    checked = _CHECKED.format(size=len(mark), source=source, statement=statement or "")
    return Case(checked, mark + stdin, expected, mark)


def _input(given: Any, at: int, arguments: bool) -> str:
    if given is None:
        return ""
    if not isinstance(given, str | int | float) or isinstance(given, bool):
        form = "give each argument as JSON, one a line" if arguments else "give the text that the program reads"
        raise BadCases(f"entry {at} of the ground truth's inputs is a {type(given).__name__}; {form}")
    text = str(given)
    if arguments and text.strip():
        try:
            for line in text.rstrip().split("\n"):
                json.loads(line)
        except (ValueError, RecursionError) as error:
            what = f"entry {at} of the ground truth's inputs, {short(repr(text))}"
            raise BadCases(f"{what}, is not JSON, one argument a line ({error})") from error
    return text


def _check_statement(statement: Any, at: int) -> None:
    what = f"entry {at} of the ground truth's assert_case"
    if not isinstance(statement, str):
        raise BadCases(f"{what} is a {type(statement).__name__}, not a statement of Python as text")
    try:
        with warnings.catch_warnings(action="ignore"):
            empty = not ast.parse(statement).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        raise BadCases(f"{what}, {short(repr(statement))}, is no statement of Python ({error})") from error
    if empty:
        raise BadCases(f"{what} is empty, so that it would test nothing")


def _parsed(truth: Any) -> Mapping[str, Any]:
    if isinstance(truth, str | bytes):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError) as error:
            raise BadCases(f"the ground truth is not JSON ({error})") from error
    if not isinstance(truth, Mapping):
        raise BadCases(f"the ground truth is a {type(truth).__name__}")
    for key in map(str, truth):
        if key in _KEYS:
            continue
        if meant := get_close_matches(key, [each for each in _KEYS if each not in truth], n=1, cutoff=0.75):
            raise BadCases(f"the ground truth has an unknown key '{short(key)}'; did you mean '{meant[0]}'?")
        _warn(key)
    return truth


def _warn(key: str) -> None:
    """Says once that a key has no effect; that of another data set's form may be meant as one that has."""
    if key in _ignored or len(_ignored) > 20:
        return
    _ignored.add(key)
    from loguru import logger  # as in local.py

    logger.warning(f"sandbox: the key '{short(key)}' of ground truths is ignored; those used are {', '.join(_KEYS)}.")


def _list(given: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = _plain(given.get(name))
    if not isinstance(value, list):
        raise BadCases(f"the ground truth has no list '{name}'")
    return value


def _plain(value: Any) -> Any:
    """Returns a value of a parquet file, which may hold arrays, as JSON has it."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _expected(output: Any) -> tuple[str, ...]:
    if output is None:
        return ()
    if isinstance(output, str):
        return (output.rstrip("\n"),)
    # verl compares with str(), which differs from the JSON that a function's result is printed as.
    return (str(output), json.dumps(output, default=str))
