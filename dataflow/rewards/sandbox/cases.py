"""Test cases of a program, in verl's forms, the program in a response, and what becomes of it."""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dataflow.errors import DataError, RewardFailed, an
from dataflow.system.http import short
from dataflow.system.secrets import redact

Status = Literal["finished", "runtime_error", "timeout", "compile_error", "memory_limit", "output_limit"]
STDERR = 2000
"""Characters of a program's messages that are kept, the last ones."""

_PYTHON = ("python", "python_gpu")
"""Languages whose programs a statement or a call can be added to."""
_FUNCTION = """
import contextlib, json, sys, types
arguments = [json.loads(line) for line in sys.stdin if line.strip()]
program = sys.modules["solution"] = types.ModuleType("solution")
for statement in "from {} import *", "import {}":
    for module in (
        "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys "
        "json builtins typing"
    ).split():
        exec(statement.format(module), vars(program))
given = dict(vars(program))
with contextlib.redirect_stdout(sys.stderr):
    exec(compile(SOURCE, "solution.py", "exec"), vars(program))
    function = vars(program).get(NAME)
    if function is given.get(NAME) and hasattr(program, "Solution"):
        function = getattr(program.Solution(), NAME)
    result = function(*arguments)
print(json.dumps(result, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value)), end=MARK,
    file=sys.__stdout__)
"""
"""Prints what a function returns. It has the names of verl's wrapper, which hide no method of its ``Solution``.

It is a module of its own, not the main one, and what it prints are messages: no example of its use changes a result.
"""
_STATEMENT = """
import sys, types
program = sys.modules[NAME] = types.ModuleType(NAME)
exec(compile(SOURCE, "solution.py", "exec"), vars(program))
exec(compile(STATEMENT, "assert_case", "exec"), vars(program))
print(end=MARK, file=sys.__stdout__)
"""
"""Prints the mark once the statement has passed, which a program that ends itself before does not reach."""
_DEFINES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass
)  # fmt: skip
"""Statements that pass with every program."""


@dataclass(frozen=True)
class Outcome:
    """The end of a program; whatever its status, the sandbox has worked. It is ``finished`` if the exit code was 0."""

    status: Status
    stdout: str = ""
    stderr: str = ""


class SandboxError(RewardFailed):
    """The sandbox, not the program, failed; says nothing about the program."""

    retry = True
    retry_after: float | None = None
    status: int | None = None
    fix = "see the log of the sandbox service, or lower manager_kwargs.max_concurrent"

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(redact(message))
        vars(self).update(attributes)


class BadCases(DataError):
    """The ground truth of a sample holds no test cases."""

    retry = False
    fix = (
        "give a ground truth of test cases as JSON or a dict: {inputs: [...], outputs: [...]}, with fn_name for a "
        "function, or {assert_case: [...]}"
    )


@dataclass(frozen=True)
class Case:
    """A program with its input and the output that is expected.

    Attributes:
        expected: its output, or what its function returns; None if it only has to end with exit code 0.
        mark: a text that it prints after its output, once its last statement has passed; "" for none.
        returns: whether its output is the JSON of what a function returns.
    """

    source: str
    stdin: str
    expected: Any = None
    mark: str = ""
    returns: bool = False

    def verdict(self, outcome: Outcome) -> str:
        """Returns ``passed``, ``wrong_answer``, or the outcome's status if the program did not finish."""
        if outcome.status != "finished":
            return outcome.status
        if self.mark not in outcome.stdout:
            return "runtime_error"
        shown, fits = outcome.stdout.replace(self.mark, ""), _returned if self.returns else _printed
        return "passed" if self.expected is None or fits(shown, self.expected) else "wrong_answer"


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
    """Returns the test cases of a sample; only the first ``most`` count.

    Args:
        code: the program, or the definition of a function.
        truth: a dict, or its JSON: ``inputs`` and ``outputs``, lists of one entry per case; with ``fn_name``, each
            input holds the arguments of that function, JSON, one a line. Or ``assert_case``, a list of statements to be
            run after the program. An output of None accepts any. Another form raises BadCases.
    """
    given = _parsed(truth)
    found: list[Any] = [given.get(key) for key in ("fn_name", "inputs", "outputs", "assert_case")]
    name, inputs, outputs, asserts = found
    if name and not (isinstance(name, str) and name.isidentifier()):
        raise BadCases(f"the ground truth's fn_name, {short(repr(name))}, is no name of a function")
    if name and asserts is not None:
        raise BadCases("the ground truth has both fn_name and assert_case, of which a case has one")
    if (name or asserts is not None) and language not in _PYTHON:
        raise BadCases(f"the ground truth has fn_name or assert_case, which are Python, for programs in {language}")
    if isinstance(asserts, list):
        inputs, outputs = inputs or [""] * len(asserts), outputs or [None] * len(asserts)
        asserts = ["" if each is None else each for each in asserts]
    elif asserts is None and isinstance(inputs, list):
        asserts = [None] * len(inputs)
    columns = {"inputs": inputs, "outputs": outputs, "assert_case": asserts}
    for key, column in columns.items():
        if not isinstance(column, list) or not len(column) == len(inputs) > 0:
            has = short(", ".join(map(str, given))) or "nothing"
            raise BadCases(f"the ground truth has no list '{key}' with an entry for each test case, but {has}")
    rows = zip(range(len(inputs) if most is None else most), inputs, outputs, asserts, strict=False)
    return [_case(code, name or "", *row) for row in rows]


def _case(code: str, name: str, at: int, given: Any, output: Any, statement: Any) -> Case:
    if isinstance(given, bool | list | dict):
        form = "each argument as JSON, one a line" if name else "the text that the program reads"
        raise BadCases(f"entry {at} of the ground truth's inputs is {an(type(given).__name__)}; give {form}")
    stdin, mark = "" if given is None else str(given), secrets.token_hex(16)
    if name:
        try:
            [json.loads(line) for line in stdin.split("\n") if line.strip()]
        except ValueError as error:
            what = f"entry {at} of the ground truth's inputs, {short(repr(stdin))}"
            raise BadCases(f"{what}, is not JSON, one argument a line ({error})") from error
        return Case(f"SOURCE, NAME, MARK = {(code, name, mark)!r}{_FUNCTION}", stdin, output, mark, returns=True)
    if isinstance(output, list | dict):
        kind = an(type(output).__name__)
        raise BadCases(f"entry {at} of the ground truth's outputs is {kind}; give the text that the program prints")
    if statement is None:
        return Case(f"{code}\n\n", stdin, output)
    _check(statement, at, output)
    # A program that is to be tested only, may not run what it does as the main one, such as tests of its own.
    name = "__main__" if stdin or output is not None else "solution"
    filled = f"SOURCE, STATEMENT, NAME, MARK = {(code, statement, name, mark)!r}{_STATEMENT}"
    return Case(filled, stdin, output, mark)


def _check(statement: Any, at: int, output: Any) -> None:
    """Checks that a statement is one, and does more than to define what would test the program."""
    what = f"entry {at} of the ground truth's assert_case, {short(repr(statement))},"
    try:
        body = ast.parse(statement).body
    except (TypeError, SyntaxError, ValueError) as error:
        raise BadCases(f"{what} is no statement of Python ({error})") from error
    tests = [each for each in body if not isinstance(each, _DEFINES)]
    if output is None and all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in tests):
        raise BadCases(f"{what} passes with every program: it only defines names; call what it defines")


def _parsed(truth: Any) -> dict[str, Any]:
    if isinstance(truth, str | bytes):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise BadCases(f"the ground truth is not JSON ({error})") from error
    if not isinstance(truth, Mapping):
        raise BadCases(f"the ground truth is {an(type(truth).__name__)}")
    return {key: _plain(value) for key, value in truth.items()}


def _plain(value: Any) -> Any:
    """Returns a value of a parquet file, which may hold arrays, as JSON has it."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _printed(shown: str, expected: Any) -> bool:
    """Returns whether two outputs are equal but for white space at the ends of lines and empty lines at the end."""
    one, other = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (shown, str(expected)))
    return one == other


def _returned(shown: str, expected: Any) -> bool:
    """Returns whether a function returned this value, which is given as it is, as JSON, or as Python prints it."""
    try:
        value = json.loads(shown)
    except (ValueError, RecursionError):
        return False
    if value == expected or _printed(str(value), expected) or _printed(shown, expected):
        return True
    try:
        return bool(value == json.loads(expected))
    except (TypeError, ValueError, RecursionError):
        return False
