import cmath
import pickle
import sys
import threading
import traceback
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dataflow.usercode.load import load_file
from dataflow.usercode.pickling import _pickler, dumps, why_not_pickled

SOURCE = """
def fails():
    raise ValueError("a bad batch")

def made(limit):
    def inner():
        assert limit > 3, "a closure"
    return inner

class Reward:
    share = staticmethod(lambda: 1 / 0)

    def call(self):
        return [self.missing for _ in range(2)]
"""


@pytest.fixture
def module(tmp_path):
    """A user's module that no import finds, as in the process that reads the pickle."""
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    module = load_file(str(file), "reward.path")
    del sys.modules[module.__name__]
    return module


@pytest.mark.parametrize(
    ("of", "line"),
    [
        (lambda m: m.fails, 'raise ValueError("a bad batch")'),
        (lambda m: m.made(2), 'assert limit > 3, "a closure"'),
        (lambda m: m.Reward.share, "share = staticmethod(lambda: 1 / 0)"),
        (lambda m: m.Reward().call, "return [self.missing for _ in range(2)]"),
    ],
    ids=["function", "closure", "lambda", "method"],
)
def test_a_traceback_of_unpickled_code_shows_its_lines(module, of, line):
    read = pickle.loads(dumps(of(module)))
    with pytest.raises(Exception) as error:
        read()
    shown = "".join(traceback.format_exception(error.value))
    assert line in shown
    assert module.__file__ in shown


def test_objects_of_unimportable_classes_are_pickled(module):
    one = module.Reward()
    one.seen = [Fraction(1, 3)]
    read = pickle.loads(dumps({"a": one, "b": one}))
    assert read["a"] is read["b"]
    assert read["a"].seen == [Fraction(1, 3)]


def test_importable_code_is_pickled_by_name():
    assert pickle.loads(dumps(cmath.sqrt)) is cmath.sqrt
    assert len(dumps(load_file)) < 100


def test_buffers_can_stay_out_of_the_pickle():
    array, buffers = np.arange(100_000), []
    pickled = dumps([array], buffers.append)
    assert len(pickled) < 1000
    assert len(buffers) == 1
    assert np.array_equal(pickle.loads(pickled, buffers=buffers)[0], array)


def test_pickle_is_used_where_cloudpickle_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    _pickler.cache_clear()
    try:
        assert pickle.loads(dumps({"a": 1})) == {"a": 1}
        with pytest.raises((pickle.PicklingError, AttributeError)):
            dumps(lambda: 1)
    finally:
        _pickler.cache_clear()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ((threading.Lock(), 1), "TypeError: cannot pickle '_thread.lock' object"),
        ({"a": [open]}, ""),
        ([lambda: 1], ""),
        ({"weights": np.zeros(3)}, ""),
        ((n for n in range(3)), "TypeError: cannot pickle 'generator' object"),
    ],
)
def test_why_a_value_cannot_be_pickled(value: object, why: str) -> None:
    assert why_not_pickled(value) == why


def test_known_types_are_not_looked_at() -> None:
    class Large:
        def __reduce__(self) -> Any:
            raise AssertionError("it was pickled")

    assert why_not_pickled([Large()], (Large,)) == ""
    assert "it was pickled" in why_not_pickled([Large()])
