"""Recipes, and the messages between a worker and the pool; test_processes tests the processes."""

from __future__ import annotations

import importlib.util
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.user import gsm8k
from dataflow.rewards.user.function import build_reward, load_reward
from dataflow.rewards.user.worker import Recipe, WorkerError, read_reply, recipe_of, reply_of
from dataflow.usercode.load import describe

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]

FILE = """
from functools import partial
def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address=None, add=0):
    return float(ground_truth) + add, reward_router_address
filled = partial(compute_score, add=3)
class Slotted:
    __slots__ = ()
    def compute_score(self, data_source, solution_str, ground_truth, extra_info): return 1.0
"""


def test_recipes(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    context = {"reward_router_address": "h:1"}
    fields = {"data_source": "d", "solution_str": "s", "ground_truth": "3", "extra_info": None}
    for name, kwargs, score in (("compute_score", {"add": 2}, 5), ("compute_score", {}, 3), ("filled", {}, 6)):
        recipe = recipe_of(build_reward(load_reward(str(path), name, kwargs), kwargs, context))
        assert recipe == Recipe(str(path), name, kwargs, context)
        assert recipe.build()(**fields) == (score, "h:1")
    assert recipe_of(gsm8k.compute_score) == Recipe("dataflow.rewards.user.gsm8k", "compute_score")
    assert Recipe("dataflow.rewards.user.gsm8k", "compute_score").build() is gsm8k.compute_score
    assert recipe_of(load_reward(str(path), "filled")) == Recipe(str(path), "filled")


def test_what_has_no_recipe(tmp_path: Path) -> None:
    def inner(**_arguments: Any) -> float:
        return 1.0

    path = tmp_path / "mine.py"
    path.write_text(FILE)
    slotted = build_reward(load_reward(str(path), "Slotted"))
    for reward in (inner, lambda **_: 0, partial(inner), slotted):
        with pytest.raises(ConfigError, match=r"cannot be built in another process; define it at the top of a file"):
            recipe_of(reward)


def test_results_and_errors_go_over() -> None:
    assert read_reply(reply_of({"score": 1.0}, None)) == ({"score": 1.0}, None)
    try:
        int("x")
    except ValueError as error:
        result, told = read_reply(reply_of(None, error))
    assert result is None
    assert isinstance(told, ValueError)
    assert describe(told).startswith("ValueError: invalid literal for int() with base 10: 'x' (test_worker.py:")
    assert "Traceback" in str(told.__cause__)


def test_what_does_not_go_over() -> None:
    class Local(Exception):
        retry = True

    for error in (Local("x"), StopIteration("x"), SystemExit("x"), KeyboardInterrupt("x")):
        told = read_reply(reply_of(None, error))[1]
        assert type(told) is WorkerError
        assert str(told) == f"{type(error).__name__}: x"
        assert getattr(told, "retry", None) is getattr(error, "retry", None)
    told = read_reply(reply_of(threading.Lock(), None))[1]
    assert "it returned a lock, which cannot be sent" in str(told)
    assert "the worker's reply cannot be read" in str(read_reply(b"no pickle")[1])


def test_a_result_of_a_class_that_is_not_here(tmp_path: Path) -> None:
    (tmp_path / "far.py").write_text("class Far: pass")
    spec = importlib.util.spec_from_file_location("far_module", tmp_path / "far.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["far_module"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reply = reply_of(module.Far(), None)
    del sys.modules["far_module"]
    assert "No module named 'far_module'" in str(read_reply(reply)[1])
