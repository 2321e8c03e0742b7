"""Test cases of a program, in verl's forms, and the program in a response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.rewards.sandbox.outcome import BadCases, Outcome

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
arguments = [json.loads(line) for line in text.split("\\n")] if text.strip() else []
name = {name!r}
function = names[name] if name in names else getattr(names["Solution"](), name)
result = function(*arguments)
plain = isinstance(result, (dict, list, tuple, bool)) or result is None
print(json.dumps(result) if plain else result)
"""


@dataclass(frozen=True)
class Case:
    """A program with its input and the output that is expected.

    Attributes:
        source: of the program.
        stdin: its input.
        expected: texts of which its output must be one; empty if it only has to end with exit code 0.
    """

    source: str
    stdin: str
    expected: tuple[str, ...]

    def verdict(self, outcome: Outcome) -> str:
        """Returns ``passed``, ``wrong_answer``, or the outcome's status if the program did not finish."""
        if outcome.status != "finished":
            return outcome.status
        shown = outcome.stdout.rstrip("\n")
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


def cases_of(code: str, truth: Any, most: int | None = None) -> list[Case]:
    """Returns the test cases of a sample.

    Args:
        code: the program, or the definition of a function.
        truth: a dict, or its JSON: ``inputs`` and ``outputs``, lists of one entry per case; with ``fn_name``, each
            input holds the arguments of that function, JSON, one a line. Or ``assert_case``, a list of statements to
            be appended to the program. An output of None accepts any.
        most: number of cases that count, from the first; None for all.

    Raises:
        BadCases: it has another form.
    """
    given = _parsed(truth)
    asserts = given.get("assert_case")
    if asserts is not None:
        asserts = _list(given, "assert_case")
        given = {"inputs": [""] * len(asserts), "outputs": [None] * len(asserts), **given}
    inputs, outputs, name = _list(given, "inputs"), _list(given, "outputs"), given.get("fn_name")
    asserts = [""] * len(inputs) if asserts is None else asserts
    if not len(inputs) == len(outputs) == len(asserts):
        raise BadCases(
            f"the ground truth has {len(inputs)} inputs, {len(outputs)} outputs and {len(asserts)} assert_case entries"
        )
    if not inputs:
        raise BadCases("the ground truth has no test case")
    found = []
    for stdin, output, statement in list(zip(inputs, outputs, asserts, strict=True))[:most]:
        source = f"{code}\n\n{statement}"
        if name:
            source = _FUNCTION.format(modules=_MODULES, source=source, name=str(name))
        found.append(Case(source, "" if stdin is None else str(stdin), _expected(output)))
    return found


def _parsed(truth: Any) -> Mapping[str, Any]:
    if isinstance(truth, str | bytes):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError) as error:
            raise BadCases(f"the ground truth is not JSON ({error})") from error
    if not isinstance(truth, Mapping):
        raise BadCases(f"the ground truth is a {type(truth).__name__}")
    return truth


def _list(given: Mapping[str, Any], name: str) -> Sequence[Any]:
    value: Any = given.get(name)
    value = value.tolist() if hasattr(value, "tolist") else value  # a column of a parquet file
    if not isinstance(value, list | tuple):
        raise BadCases(f"the ground truth has no list '{name}'")
    return value


def _expected(output: Any) -> tuple[str, ...]:
    if output is None:
        return ()
    if isinstance(output, str):
        return (output.rstrip("\n"),)
    # verl compares with str(), which differs from the JSON that a function's result is printed as.
    return (str(output), json.dumps(output, default=str))
