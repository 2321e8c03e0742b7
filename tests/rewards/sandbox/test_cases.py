"""Test cases in verl's forms, and the program in a response."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dataflow.rewards.sandbox.cases import Case, cases_of, code_of
from dataflow.rewards.sandbox.outcome import BadCases, Outcome


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```", "\na\n"),
        ("```python\na\n``` or ```python\nb\n```", "\nb\n"),
        ("```py\nc\n```", "c\n"),
        ("```\nd\n```", "\nd\n"),
        ("```e = 1\nf```", "e = 1\nf"),
        ("an open block ```python\ng", "\ng"),
        ("none", None),
        ("", None),
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
        assert [case.expected for case in cases] == [("2",), (), ("4", "4")]
        assert {case.source for case in cases} == {"p\n\n"}
    assert len(cases_of("p", truth, 2)) == 2


def test_statements_to_append_replace_inputs_and_outputs() -> None:
    cases = cases_of("p", {"assert_case": ["assert f(1)", "assert f(2)"]})
    assert [(case.source, case.stdin, case.expected) for case in cases] == [
        ("p\n\nassert f(1)", "", ()),
        ("p\n\nassert f(2)", "", ()),
    ]


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a list"),
        (None, "is a NoneType"),
        ("7", "is a int"),
        ({}, "no list 'inputs'"),
        ({"inputs": ["1"]}, "no list 'outputs'"),
        ({"inputs": "1", "outputs": "2"}, "no list 'inputs'"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs, 0 outputs and 1 assert_case"),
        ({"inputs": [], "outputs": []}, "no test case"),
        ({"assert_case": []}, "no test case"),
        ({"assert_case": "assert 1"}, "no list 'assert_case'"),
    ],
)
def test_a_ground_truth_without_cases_is_an_error_that_no_try_mends(truth: Any, said: str) -> None:
    with pytest.raises(BadCases, match=said) as caught:
        cases_of("p", truth)
    assert caught.value.retry is False


def test_a_verdict_is_that_of_the_output_if_the_program_finished() -> None:
    case = Case("p", "", ("a",))
    assert case.verdict(Outcome("finished", "a\n\n")) == "passed"
    assert case.verdict(Outcome("finished", "b")) == "wrong_answer"
    assert case.verdict(Outcome("finished", " a")) == "wrong_answer"
    assert case.verdict(Outcome("timeout", "a")) == "timeout"
    assert Case("p", "", ()).verdict(Outcome("finished", "anything")) == "passed"
