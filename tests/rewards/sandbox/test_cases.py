"""Test cases in verl's forms, and the program in a response."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from dataflow.rewards.sandbox.cases import BadCases, Case, Outcome, cases_of, code_of

# Each starts programs.
pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```", "\na\n"),
        ("```python\na\n``` or ```python\nb\n```", "\nb\n"),
        ("```\nd\n```", "\nd\n"),
        ("none", None),
    ],
)
def test_the_program_in_a_response(response: str, code: str | None) -> None:
    assert code_of(response) == code


def test_inputs_and_outputs_as_a_dict_as_json_and_as_arrays() -> None:
    truth: dict[str, Any] = {"inputs": ["1\n", None, 3], "outputs": ["2\n", None, 4]}
    arrays = {name: np.array(value, dtype=object) for name, value in truth.items()}
    for given in (truth, json.dumps(truth), arrays):
        cases = cases_of("p", given)
        assert [case.stdin for case in cases] == ["1\n", "", "3"]
        assert [case.expected for case in cases] == ["2\n", None, 4]
        assert {case.source for case in cases} == {"p\n\n"}
    assert len(cases_of("p", truth, 2)) == 2


def ran(case: Case) -> str:
    """Returns the verdict on a case that a process of Python has run."""
    done = subprocess.run(
        [sys.executable, "-c", case.source], input=case.stdin, capture_output=True, text=True, timeout=30
    )
    return case.verdict(Outcome("finished" if done.returncode == 0 else "runtime_error", done.stdout, done.stderr))


@pytest.mark.parametrize(
    ("code", "verdicts"),
    [
        ("def f(n):\n    print(n)\n    return n", ["passed", "runtime_error"]),
        ("import sys\nsys.exit(0)", ["runtime_error"] * 2),
        ("import os\nos._exit(0)", ["runtime_error"] * 2),
        ("import atexit, os\natexit.register(os._exit, 0)\ndef f(n): return 2", ["runtime_error"] * 2),
        ("x = '" + "''", ["runtime_error"] * 2),
        # Names that the wrapper uses are the program's to define, and to replace in vain.
        ("def f(n): return 1\ndef exec(a): pass\ndef compile(a): pass\ndef open(): pass\nos = write = mark = 1",
         ["passed"] * 2),
        # Tests and examples of its own, and what it does to its output, change nothing.
        ("import sys, unittest\ndef f(n): return 1\nif __name__ == '__main__': unittest.main()", ["passed"] * 2),
    ],
)  # fmt: skip
def test_a_statement_passes_only_if_it_is_reached(code: str, verdicts: list[str]) -> None:
    cases = cases_of(code, {"assert_case": ["assert f(1) == 1", "assert f(2) == 1"]})
    assert [case.expected for case in cases] == [None, None]
    assert [ran(case) for case in cases] == verdicts


def test_a_function_whose_result_does_not_matter_must_return() -> None:
    truth = {"fn_name": "f", "inputs": ["1\n"], "outputs": [None]}
    assert [ran(case) for case in cases_of("def f(n): return n", truth)] == ["passed"]
    assert [ran(case) for case in cases_of("exit()", truth)] == ["runtime_error"]


@pytest.mark.parametrize(
    ("name", "code", "verdict"),
    [
        # A name that is imported is not that of a method, and none that the program defines.
        ("merge", "class Solution:\n    def merge(self, a): return a", "passed"),
        ("search", "from re import *\nclass Solution:\n    def search(self, a): return a", "passed"),
        ("f", "def f(a): return a\nclass Solution:\n    def f(self, a): return 0", "passed"),
        ("f", "x = 1", "runtime_error"),
        ("f", "def f(a: List[int]) -> Optional[int]: return gcd(a, math.comb(a, 1))", "passed"),
        ("f", "import numpy\ndef f(a): return numpy.int64(a)", "passed"),
        # What it prints, does as the main module and finds in its input is no result.
        ("f", "def f(a):\n    print('a is', a)\n    return a\nprint(f(5))", "passed"),
        ("f", "def f(a): return a\nif __name__ == '__main__': print(f(int(input())))", "passed"),
        ("f", "def f(a): exit()", "runtime_error"),
    ],
)
def test_a_function_is_one_that_the_program_defines(name: str, code: str, verdict: str) -> None:
    (case,) = cases_of(code, {"fn_name": name, "inputs": ["7"], "outputs": [7]})
    assert ran(case) == verdict


@pytest.mark.parametrize(
    ("output", "shown", "verdict"),
    [
        ("[2,1]", "[2, 1]", "passed"),
        ("abab", '"abab"', "passed"),
        ('{"a": [true, null]}', '{"a": [true, null]}', "passed"),
        ("True", "true", "passed"),
        ("[1]", "[1, 2]", "wrong_answer"),
        (3, "[3]", "wrong_answer"),
    ],
)
def test_what_a_function_returns_is_compared_as_a_value(output: Any, shown: str, verdict: str) -> None:
    (case,) = cases_of("p", {"fn_name": "f", "inputs": ["1"], "outputs": [output]})
    assert case.verdict(Outcome("finished", shown + case.mark)) == verdict


CHECK = "def check(f):\n    assert f(1) == 2\n"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("pass", "passes with every program"),
        (CHECK, "call what it defines"),
        (f"'Checks f.'\nasync {CHECK}", "call what it defines"),
        (f"METADATA = {{}}\n{CHECK}def other(): check(add)", "call what it defines"),
    ],
)
def test_a_statement_that_passes_with_every_program_is_an_error(statement: str, said: str) -> None:
    with pytest.raises(BadCases, match=said):
        cases_of("p", {"assert_case": [statement]})


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ("{", "is not JSON"),
        ({}, "no list 'inputs'"),
        ({"inputs": ["1"]}, "no list 'outputs'"),
        ({"inputs": ["1"], "outputs": []}, "no list 'outputs' with an entry for each"),
        ({"assert_case": ["assert x", None]}, "entry 1 .* '', passes with every program"),
        ({"assert_case": [5]}, "entry 0 of the ground truth's assert_case, 5, is no statement of Python"),
        ({"fn_name": "f(x)", "inputs": ["1"], "outputs": [3]}, "fn_name, 'f\\(x\\)', is no name of a function"),
        ({"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}, "entry 0 of .* inputs is a list; give each argument"),
        ({"fn_name": "f", "inputs": ["1", "a"], "outputs": [1, 2]}, "entry 1 of .*'a', is not JSON"),
        ({"inputs": ["1"], "outputs": [["a", "b"]]}, "entry 0 of .* outputs is a list; give the text"),
    ],
)
def test_a_ground_truth_without_cases_is_an_error_that_no_try_mends(truth: Any, said: str) -> None:
    with pytest.raises(BadCases, match=said) as caught:
        cases_of("p", truth)
    assert caught.value.retry is False
