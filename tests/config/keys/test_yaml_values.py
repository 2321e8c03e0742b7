"""YAML values: the types of YAML 1.1, and what is written reads back as it was."""

from __future__ import annotations

import math

import pytest
import yaml

from dataflow.config.keys.yaml_values import dump, inline, load

WRITTEN = [
    *("1e5", "1e-5", "1.5e3", ".5", "010", "0x10", "1_000", "1:30", "2001-01-01", "yes", "~", "true", "<<", "-", "{"),
    *("", " a ", "a: b", "a\nb", "é", "1", "null", 1, -3, 1e-6, 1e300, -math.inf, True, None),
]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5e3", 1500.0),
        ("-2e5", -2e5),
        ("[1, {a: 2.0}]", [1, {"a": 2.0}]),
    ],
)
def test_a_number_with_an_exponent_is_a_number(text: str, value: object) -> None:
    assert load(text) == value
    assert type(load(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: 1, a: 2}", "key 'a' is given twice"),
        ("a: 1\nb:\n  c: 1\n  c: 2", r"key 'c' is given twice; give it once \(line 4\)"),
        ("[1", "did not find expected"),
        ("a: 1\n---\nb: 2", "but found another"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(text)


@pytest.mark.parametrize("read", [load, yaml.safe_load])
def test_what_is_written_reads_back_as_it_was_here_and_elsewhere(read) -> None:
    values = {"list": WRITTEN, "keys": {str(value): value for value in WRITTEN}}
    assert read(dump(values)) == read(inline(values)) == values
