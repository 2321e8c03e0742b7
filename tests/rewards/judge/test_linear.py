"""Texts of models are read in time linear in their length, whatever they hold.

The texts here take some tenths of a second where reading is linear, and minutes where it is quadratic: each test has a
deadline far from both.
"""

from __future__ import annotations

import pytest

from dataflow.rewards import gsm8k
from dataflow.tools.reader import Hermes

pytestmark = pytest.mark.timeout(60)

SIZE = 200_000  # characters; the pattern of the number took 23 s for 100,000


def repeated(piece: str) -> str:
    return piece * (SIZE // len(piece))


@pytest.mark.slow
@pytest.mark.parametrize("method", gsm8k.METHODS)
@pytest.mark.parametrize(
    "text",
    [
        "#### 1" + repeated(",23"),
        repeated("1,23,23.5,"),
        "####" + repeated(" "),
        repeated("-$"),
        repeated("1"),
    ],
    ids=lambda text: text[:12],
)
def test_numbers(text: str, method: str) -> None:
    for whole in (text, f"{text} x", f"{text}\n#### 7"):
        gsm8k.extract(whole, method)
    assert gsm8k.extract(f"{text}\n#### 7", method) == "7"


@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call>{", "<think>", "</think>"])
def test_tool_calls(piece: str) -> None:
    for text in (repeated(piece), repeated(piece) + "</tool_call>", "<tool_call>" + repeated(" ") + piece):
        assert all(call.error for call in Hermes().parse(text))
