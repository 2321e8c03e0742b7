"""Durations read as people say them."""

from __future__ import annotations

import pytest

from dataflow.drawing.duration import seconds


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0.00 s"),
        (9.99, "9.99 s"),
        (9.996, "10.0 s"),
        (119.94, "119.9 s"),
        (120, "2 min 00 s"),
        (3600, "1 h 00 min"),
    ],
)
def test_the_unit_fits_the_value(value: float, words: str) -> None:
    assert seconds(value) == words
