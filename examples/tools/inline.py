"""Calls in mid-sentence: after "It is 12 + 5 =" the calculator writes the number, and the model continues.

The tiny model of the default run, which was not trained with tools, can call one so. Its turns end at the token " =":

dataflow run examples/tools/calculator.py tools.path=examples/tools/inline.py tools.names=calculator \
    tools.format=Equation engine.stop=Ġ=
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dataflow.tools import ToolCall

OPEN = re.compile(r"([0-9]+(?: [-+*] [0-9]+)+) =\Z")


class Equation:
    """A turn that ends in an equation without its right side calls the calculator."""

    def parse(self, text: str) -> list[ToolCall]:
        """Returns the call at the end of a turn, if there is one."""
        found = OPEN.search(text)
        return [ToolCall("calculator", {"expression": found[1]})] if found else []

    def frame(self, answers: Sequence[str]) -> str:
        """Returns only the number, without the chat template's frame."""
        return f" {answers[0]}"
