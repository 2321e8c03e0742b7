"""Durations read as people say them."""

from __future__ import annotations

import pytest

from dataflow.drawing.duration import figure, seconds


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


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 4, "0"),
        (0.01234567, 4, "0.01235"),
        (999.6, 3, "1000"),
        (1940.3, 3, "1940"),
        (-1940.3, 3, "-1940"),
        (123456.7, 4, "123457"),
    ],
)
def test_a_figure_is_rounded_and_has_no_exponent(value: float, digits: int, text: str) -> None:
    assert figure(value, digits) == text
