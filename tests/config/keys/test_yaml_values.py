"""YAML values: numbers are decimal, duplicate keys are errors, and messages are parts of a sentence."""

from __future__ import annotations

import math

import pytest

from dataflow.config.keys.yaml_values import load


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("010", 10),
        ("-3", -3),
        ("1_000", 1000),
        ("0x10", "0x10"),
        ("1:40", "1:40"),
        ("1e4", 1e4),
        ("1e-4", 1e-4),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("null", None),
        ("'1'", "1"),
        ("[1, {a: 2.0}]", [1, {"a": 2.0}]),
        ("1e400", math.inf),
    ],
)
def test_a_value_means_what_it_looks_like(text: str, value: object) -> None:
    assert load(text) == value
    assert type(load(text)) is type(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: 1, a: 2}", "key 'a' is given twice"),
        ("a: 1\nb: {c: 1, c: 2}", "given twice"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("[1", "expected"),
        ("[" * 5000, "nests too deep"),
        ("9" * 5000, "4300 digits"),
        ("a\0b", "does not take"),
        ("!!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(text)
