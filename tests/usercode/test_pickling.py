import pickle
import sys
import traceback
from fractions import Fraction

import pytest

from dataflow.usercode.load import load_file
from dataflow.usercode.pickling import dumps

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
