"""YAML values: numbers are decimal, duplicate keys are errors, and messages are parts of a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import yaml

from dataflow.config.keys.yaml_values import dump, inline, load, load_hydra

# fmt: off
TEXTS = [
    "1e5", "1e-5", "+1e5", "1.5e3", "1.e5", "1E400", "+.5", ".5", "010", "08", "-089", "0x10", "0o10", "0b1", "1_000",
    "1:30", "1:30:00", "1.5:3", "2001-01-01", "yes", "no", "on", "NULL", "~", "true", ".inf", "-.inf", ".NaN", "=",
    "<<", "-", "?", "*", "&", "!", "%", "{", "[", "#x", "'",
]
# fmt: on
WRITTEN = [
    *TEXTS,
    "",
    " a ",
    "a: b",
    "a\nb",
    "é",
    "1",
    "null",
    "- a",
    "[1]",
    1,
    -3,
    1e-6,
    1e16,
    1e300,
    -math.inf,
    True,
    None,
]


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
        ("- " * 5000, "nests too deep"),
        ("a: &x [*x]", "aliases"),
        ("a: 1\n---\nb: 2", "expected a single document in the stream, but found another"),
        ("9" * 5000, "4300 digits"),
        ("a\0b", "does not take"),
        ("!!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(text)


@pytest.mark.parametrize("read", [load, load_hydra, yaml.safe_load])
def test_what_is_written_reads_back_as_it_was_here_and_elsewhere(read: Callable[[str], object]) -> None:
    values = {"list": WRITTEN, "keys": {str(value): value for value in WRITTEN}}
    assert read(dump(values)) == values
    assert read(inline(values)) == values
    for value in WRITTEN:
        assert [type(found := read(write(value))) for write in (dump, inline)] == [type(value)] * 2
        assert found == value


def test_hydras_types() -> None:
    assert load_hydra("[1e-6, 010, 1:30, 2001-01-01, 0x10]") == [1e-6, 8, 90, "2001-01-01", 16]
    with pytest.raises(ValueError, match="key 'a' is given twice"):
        load_hydra("a: 1\na: 2")
