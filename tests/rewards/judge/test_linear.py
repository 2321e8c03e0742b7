"""Texts of models are read in time linear in their length, whatever they hold.

The texts here take some tenths of a second where reading is linear, and minutes where it is quadratic: each test has a
deadline far from both.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.models.chat import without
from dataflow.rewards import gsm8k
from dataflow.tools.reader import Hermes

pytestmark = pytest.mark.timeout(60)

SIZE = 200_000  # characters; the pattern of the number took 23 s for 100,000
ANYWHERE = re.compile(gsm8k._NUMBER)
"""What ``flexible`` found numbers by: right, and quadratic."""
TOKENS = ("<end>", "<pad>", "[CLS]")


def repeated(piece: str) -> str:
    return piece * (SIZE // len(piece))


@pytest.mark.slow
@pytest.mark.parametrize("method", gsm8k.METHODS)
@pytest.mark.parametrize(
    "text",
    [
        "1" + repeated(",23"),
        "#### 1" + repeated(",23"),
        repeated("12,"),
        repeated("1,23,23.5,"),
        repeated(",123") + ",12" * 9,
        repeated("#### 1,234,"),
        repeated("#"),
        "####" + repeated(" "),
        repeated("-$"),
        repeated("1."),
        repeated("-"),
        repeated("1"),
        repeated("a"),
    ],
    ids=lambda text: text[:12],
)
def test_numbers(text: str, method: str) -> None:
    for whole in (text, f"{text} x", f"{text}\n#### 7"):
        gsm8k.extract(whole, method)
    assert gsm8k.extract(f"{text}\n#### 7", method) == "7"


PIECES = st.sampled_from(["1", "12", "123", "1234", ",", ",", ",", ".", "$", "-", "\u2212", " ", "a", ")", "####"])


@given(st.lists(PIECES, max_size=24).map("".join))
def test_the_last_number_is_the_one_it_was(text: str) -> None:
    found = ANYWHERE.findall(text)
    assert gsm8k.extract(text, "flexible") == (gsm8k.extract(f"#### {found[-1]}") if found else None)


@pytest.mark.parametrize(
    "piece", ["<tool_call>", "</tool_call>", "<tool_call>{", "<tool_call>[", "<think>", "</think>", "<tool_call>1"]
)
def test_tool_calls(piece: str) -> None:
    for text in (repeated(piece), repeated(piece) + "</tool_call>", "<tool_call>" + repeated(" ") + piece):
        assert all(call.error for call in Hermes().parse(text))


def test_special_tokens_that_arise_when_others_are_taken_out() -> None:
    depth = SIZE // 5
    assert without("<e" * depth + "nd>" * depth, TOKENS) == ""
    assert without("<e" * depth + "<end>" * depth, TOKENS) == "<e" * depth


@given(
    st.lists(st.sampled_from(["<", "e", "nd", ">", "<p", "ad>", "[C", "LS]", "<end>", "x"]), max_size=14).map("".join)
)
def test_the_same_tokens_are_taken_out_as_before(text: str) -> None:
    left = text
    while found := next((token for token in TOKENS if token in left), None):
        left = left.replace(found, "")
    assert without(text, TOKENS) == left


@pytest.mark.parametrize("piece", ["a", "a.", "Error", "Exception.", ".", ": "])
def test_the_error_of_a_worker_is_found_in_linear_time(piece: str) -> None:
    from dataflow.engines.vllm import engine  # imports torch

    assert engine._ERROR.search(repeated(piece)) is None
    found = engine._ERROR.search(f"{repeated(piece)}\n(worker) torch.cuda.OutOfMemoryError: no room left\n")
    assert found is not None
    assert found[0] == "torch.cuda.OutOfMemoryError: no room left"
