"""Test cases of a program, in verl's forms, and the program in a response."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from dataflow.errors import an
from dataflow.rewards.sandbox.outcome import BadCases, Outcome, short
from dataflow.rewards.sandbox.statement import check_statement, check_tests

_KEYS = ("inputs", "outputs", "fn_name", "assert_case")
_PYTHON = ("python", "python_gpu")
"""Languages whose programs a statement or a call can be added to."""
_warned: set[str] = set()

_MODULES = [
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
]
"""What a function may use without importing it: the names of verl's wrapper."""

_FUNCTION = """\
def call(source, name, modules):
    import builtins, json, os, sys
    library = type(sys)("builtins")
    vars(library).update(vars(builtins))
    for statement in ("from {{}} import *", "import {{}}"):
        for module in modules:
            exec(statement.format(module), vars(library))
    text = sys.stdin.read()
    arguments = [json.loads(line) for line in text.rstrip().split("\\n")] if text.strip() else []
    sys.modules["solution"] = program = type(sys)("solution")
    program.__builtins__ = library
    with open(os.dup(1), "w") as shown:
        os.dup2(2, 1)
        exec(compile(source, "solution.py", "exec"), vars(program))
        function, solution = vars(program).get(name), vars(program).get("Solution")
        if function is None and solution is None:
            raise NameError("the program defines neither " + name + " nor a class Solution")
        if function is None or hasattr(solution, name) and getattr(function, "__module__", None) != "solution":
            function = getattr(solution(), name)
        result = function(*arguments)
        plain = isinstance(result, (dict, list, tuple, bool)) or result is None
        value = lambda each: each.tolist()
        shown.write((json.dumps(result, default=value) if plain else str(result)) + "\\n")
call({source!r}, {name!r}, {modules!r})
"""
"""Calls a function of the program, or a method of its ``Solution``, which a name that it has imported does not hide.

What it may use without importing it is built in, so that its own names are those that it defines. It is a module of
its own, not the main one, and what it prints are messages: neither an example of its use nor a trace changes a result.
"""

_CHECKED = """\
def checked(source, statement, name):
    import os, sys
    def begin():
        given = b""
        while piece := os.read(0, 1 << 20):
            given += piece
        mark, rest = given[:{size}], given[{size}:]
        if len(mark) < {size}:
            os.abort()
        if rest:
            import tempfile
            file = tempfile.TemporaryFile(buffering=0)
            file.write(rest)
            file.seek(0)
        else:
            file = open(os.devnull)
        with file:
            os.dup2(file.fileno(), 0)
        return mark
    names = globals()
    del names["checked"]
    sys.modules[name] = sys.modules["__main__"]
    for call, *given in (
        (names.update, (("__name__", name),)),
        (exec, compile(source, "solution.py", "exec"), names),
        (names.update, (("__name__", "__main__"),)),
        (exec, compile(statement, "assert_case", "exec"), names),
        (os.write, os.dup(1), begin()),
    ):
        call(*given)
checked({source!r}, {statement!r}, {name!r})
"""
"""Prints the beginning of its input once the statement has passed: a program that ends itself before cannot know it.

The two are compiled one by one, so that no end of a program makes the statement a part of something else. All that is
called, is looked up before the program runs, which may have functions of the same names, and may close its output. The
program finds the beginning of the input neither by reading the input again nor as a variable of its caller. For the
statement, this is the main module.
"""


@dataclass(frozen=True)
class Case:
    """A program with its input and the output that is expected.

    Attributes:
        source: of the program.
        stdin: its input.
        expected: texts of which its output must be one; empty if it only has to end with exit code 0.
        mark: a secret text that it prints, besides its output, once its last statement has passed; "" for none.
        value: what its output, read as JSON, may be instead; alone in a tuple, which is empty if nothing may.
    """

    source: str
    stdin: str
    expected: tuple[str, ...]
    mark: str = ""
    value: tuple[Any, ...] = ()

    def verdict(self, outcome: Outcome) -> str:
        """Returns ``passed``, ``wrong_answer``, or the outcome's status if the program did not finish."""
        if outcome.status != "finished":
            return outcome.status
        if self.mark not in outcome.stdout:
            return "runtime_error"
        shown = outcome.stdout.replace(self.mark, "", 1)
        passed = (
            not self.expected or _trimmed(shown) in self.expected or any(_shows(shown, each) for each in self.value)
        )
        return "passed" if passed else "wrong_answer"


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
            check_statement(statement, f"entry {at} of the ground truth's assert_case")
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
    if name and all(isinstance(output, list) and len(output) == 1 for output in outputs):
        _warn(
            "each output of a fn_name is a list of one element, which its function must return; in the form of APPS, "
            "which puts every result into a list, take it out of that list"
        )
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
    stdin, expected = _input(given, at, bool(name)), _expected(output, at, bool(name))
    source = f"{code}\n\n"
    if name:
        source = _FUNCTION.format(modules=_MODULES, source=source, name=name)
    if statement is None and (expected or not name):
        return Case(source, stdin, expected, value=_value(output) if name else ())
    if statement is not None and not expected:
        check_tests(statement, f"entry {at} of the ground truth's assert_case")
    mark = secrets.token_hex(16)
    # A program that is to be tested only, may not run what it does as the main one, such as tests of its own.
    alone = statement is not None and not stdin and not expected
    checked = _CHECKED.format(
        size=len(mark), source=source, statement=statement or "", name="solution" if alone else "__main__"
    )
    return Case(checked, mark + stdin, expected, mark)


def _input(given: Any, at: int, arguments: bool) -> str:
    if given is None:
        return ""
    if not isinstance(given, str | int | float) or isinstance(given, bool):
        form = "give each argument as JSON, one a line" if arguments else "give the text that the program reads"
        raise BadCases(f"entry {at} of the ground truth's inputs is {an(type(given).__name__)}; {form}")
    text = str(given)
    if arguments and text.strip():
        try:
            for line in text.rstrip().split("\n"):
                json.loads(line)
        except (ValueError, RecursionError) as error:
            what = f"entry {at} of the ground truth's inputs, {short(repr(text))}"
            raise BadCases(f"{what}, is not JSON, one argument a line ({error})") from error
    return text


def _parsed(truth: Any) -> Mapping[str, Any]:
    if isinstance(truth, str | bytes):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError) as error:
            raise BadCases(f"the ground truth is not JSON ({error})") from error
    if not isinstance(truth, Mapping):
        raise BadCases(f"the ground truth is {an(type(truth).__name__)}")
    for key in map(str, truth):
        if key in _KEYS:
            continue
        if meant := get_close_matches(key, [each for each in _KEYS if each not in truth], n=1, cutoff=0.75):
            raise BadCases(f"the ground truth has an unknown key '{short(key)}' (did you mean '{meant[0]}'?)")
        # That of another data set's form may be meant as one that has an effect.
        _warn(f"the key '{short(key)}' of ground truths is ignored; those used are {', '.join(_KEYS)}")
    return truth


def _warn(what: str) -> None:
    """Says something once; more than a few of them are not kept in mind."""
    if what in _warned or len(_warned) > 20:
        return
    _warned.add(what)
    from loguru import logger  # as in local.py

    logger.warning(f"sandbox: {what}.")


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


def _expected(output: Any, at: int, returned: bool) -> tuple[str, ...]:
    if output is None:
        return ()
    if isinstance(output, str):
        return (_trimmed(output),)
    if isinstance(output, list | dict) and not returned:
        kind = type(output).__name__
        raise BadCases(f"entry {at} of the ground truth's outputs is {an(kind)}; give the text that the program prints")
    # verl compares with str(), which differs from the JSON that a function's result is printed as.
    return (str(output), json.dumps(output, default=str))


def _trimmed(text: str) -> str:
    """Returns a text without white space at the ends of its lines and empty lines at its end, as most judges do."""
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def _value(output: Any) -> tuple[Any, ...]:
    """Returns the value that an output of a function stands for, in a tuple, which is empty if it is no JSON."""
    try:
        return (json.loads(output if isinstance(output, str) else json.dumps(output)),)
    except (ValueError, TypeError, RecursionError):
        return ()


def _shows(shown: str, value: Any) -> bool:
    """Returns whether a function that returns a value may have printed this."""
    if isinstance(value, str):
        return shown.removesuffix("\n") == value
    try:
        return _same(json.loads(shown), value)
    except (ValueError, RecursionError):
        return False


def _same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal; of numbers 1 and 1.0 are, but true is no number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)
