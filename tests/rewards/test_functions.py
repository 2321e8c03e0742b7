"""Loading the user's reward code, calling it, reading its results, and the error messages."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.functions import build_reward, find_reward, load_reward
from dataflow.usercode.load import is_async

pytestmark = pytest.mark.timeout(60)

FOUR = {"data_source": "d", "solution_str": "s", "ground_truth": "3", "extra_info": None}
ROUTER = {"reward_router_address": "h:1"}
BOTH = {**ROUTER, "reward_model_tokenizer": "tokenizer"}

FORMS = """
import functools

def plain(data_source, solution_str, ground_truth, extra_info=None):
    return data_source, solution_str, ground_truth

def anything(*args, **kwargs):
    assert not args
    return kwargs["data_source"], kwargs["solution_str"], kwargs["ground_truth"]

async def later(data_source, solution_str, ground_truth, extra_info):
    return plain(data_source, solution_str, ground_truth)

def more(data_source, solution_str, ground_truth, extra_info, suffix):
    return data_source, solution_str, ground_truth

filled = functools.partial(more, suffix="")

class Sync:
    def compute_score(self, data_source, solution_str, ground_truth, extra_info):
        return plain(data_source, solution_str, ground_truth)

class Late:
    async def compute_score(self, data_source, solution_str, ground_truth, extra_info):
        return plain(data_source, solution_str, ground_truth)

class Static:
    @staticmethod
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return plain(data_source, solution_str, ground_truth)

class CalledLate:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return plain(data_source, solution_str, ground_truth)

called_late, ready = CalledLate(), Sync()
"""
SYNC = ["plain", "anything", "filled", "ready", "Sync", "Static"]
ASYNC = ["later", "Late", "called_late"]

CONTEXT_FORMS = """
def named(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer=None):
    return reward_router_address, reward_model_tokenizer

def router(data_source, solution_str, ground_truth, extra_info, reward_router_address="own"):
    return reward_router_address

def all_of_them(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return sorted(kwargs.items())

class Method:
    def compute_score(self, data_source, solution_str, ground_truth, extra_info, reward_router_address):
        return reward_router_address
    def post_process_scores(self, scores): return scores

class Made:
    def __init__(self, scale, reward_router_address, **rest): self.seen = scale, reward_router_address, rest
    def compute_score(self, data_source, solution_str, ground_truth, extra_info): return self.seen
"""


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def scored(reward: Any) -> Any:
    score = getattr(reward, "compute_score", reward)
    result = score(**FOUR)
    assert inspect.isawaitable(result) == is_async(score)
    if not inspect.isawaitable(result):
        return result

    async def body() -> Any:
        return await result

    return asyncio.run(body())


@pytest.mark.parametrize("name", SYNC + ASYNC)
def test_each_form_of_reward_is_called_alike(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "forms.py", FORMS)
    reward = build_reward(load_reward(path, name, context={}))
    assert scored(reward) == ("d", "s", "3")
    assert is_async(getattr(reward, "compute_score", reward)) == (name in ASYNC)


def test_the_context_is_passed_to_functions_that_accept_it(tmp_path: Path) -> None:
    path = write(tmp_path / "context.py", CONTEXT_FORMS)

    def call(name: str, context: dict[str, Any], **kwargs: Any) -> Any:
        return scored(build_reward(load_reward(path, name, kwargs, context), kwargs, context))

    assert call("named", BOTH) == ("h:1", "tokenizer")
    assert call("named", ROUTER) == ("h:1", None)
    assert call("router", {}) == "own"
    assert call("all_of_them", BOTH) == [("reward_model_tokenizer", "tokenizer"), ("reward_router_address", "h:1")]
    assert call("Method", BOTH) == "h:1"
    assert call("Made", BOTH, scale=2) == (2, "h:1", {})
    assert call("Made", {}, scale=2, reward_router_address="mine") == (2, "mine", {})
    # What the user writes himself wins.
    assert call("named", BOTH, reward_router_address="mine") == ("mine", "tokenizer")
    kept = build_reward(load_reward(path, "Method"), None, ROUTER)
    assert kept.post_process_scores([1]) == [1]
    assert not hasattr(kept, "log")


@pytest.mark.parametrize("name", ["named", "Method", "Made"])
def test_a_context_that_lacks_what_is_needed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "context.py", CONTEXT_FORMS)
    kwargs = {"scale": 2} if name == "Made" else {}
    found = load_reward(path, name, kwargs)  # before a run is configured, that is left open
    message = r"needs reward_router_address, which is not configured; set reward\.router_address or serve a model"
    with pytest.raises(ConfigError, match=message):
        build_reward(found, kwargs, {"reward_model_tokenizer": "tokenizer"})
    with pytest.raises(ConfigError, match=message):
        load_reward(path, name, kwargs, {})


def test_keywords_of_the_users_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.py",
        "class Mine:\n"
        "    def __init__(self, add=0): self.add = add\n"
        "    async def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):\n"
        "        return float(ground_truth) + self.add\n"
        "def scored(data_source, solution_str, ground_truth, extra_info, factor=1):\n"
        "    return float(ground_truth) * factor\n"
        "class Ready:\n"
        "    def compute_score(self, data_source, solution_str, ground_truth, extra_info, factor):\n"
        "        return scored(data_source, solution_str, ground_truth, extra_info, factor)\n"
        "ready = Ready()\n",
    )
    for name, kwargs, score in (("Mine", {"add": 5}, 8), ("scored", {"factor": 2}, 6), ("ready", {"factor": 3}, 9)):
        assert scored(build_reward(load_reward(path, name, kwargs), kwargs)) == score
    assert scored(build_reward(find_reward("dataflow.rewards.gsm8k:compute_score"))) == 0
    with pytest.raises(ConfigError, match=r"judge:Jury': it has no 'Jury'"):
        find_reward("dataflow.rewards.judge.judge:Jury")


def test_a_users_file_that_cannot_be(tmp_path: Path) -> None:
    good = write(
        tmp_path / "good.py",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
        "class Empty: pass\n"
        "class Sized:\n    def __init__(self, size): pass\n    def compute_score(self): pass\n"
        "class Short:\n    def compute_score(self, solution_str, ground_truth): pass\n"
        "def other(source, text, truth, info): pass\n"
        "number = 3\n",
    )
    assert load_reward(good).__name__ == "compute_score"
    wrong = [
        ((str(tmp_path / "none.py"),), "there is no such file"),
        ((good, "compute_scor"), "has no 'compute_scor'; did you mean 'compute_score'?"),
        ((good, "zzz"), "has no 'zzz'; it defines Empty, Short, Sized, compute_score, other"),
        ((good, "number"), "'number' is an int; give a function or a class"),
        ((good, "Empty"), "class 'Empty' has no method compute_score"),
        ((good, "Sized"), "'Sized' cannot be called with nothing (missing a required argument: 'size')"),
        ((good, "Short"), "'Short.compute_score' cannot be called with data_source, solution_str, ground_truth, extra"),
        ((good, "other"), "'other' cannot be called with data_source, solution_str, ground_truth, extra_info"),
        ((good, "compute_score", {"factor": 2}), "unexpected keyword argument 'factor'"),
        ((write(tmp_path / "a.py", "import no_such_module\n"),), "No module named 'no_such_module' (a.py:1)"),
        ((write(tmp_path / "b.py", "def f(:\n"),), "SyntaxError"),
        ((write(tmp_path / "c.py", "import sys\nsys.exit(1)\n"),), "SystemExit: 1 (c.py:2)"),
        ((write(tmp_path / "d.txt", ""),), "it is not a Python file"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ConfigError) as error:
            load_reward(*arguments)  # type: ignore[arg-type]
        assert message in str(error.value)
        assert str(error.value).startswith(f"custom_reward_function.path={arguments[0]}: ")
        assert "\n" not in str(error.value)


def test_a_class_that_cannot_be_built(tmp_path: Path) -> None:
    path = write(
        tmp_path / "bad.py",
        "class Bad:\n    def __init__(self): raise OSError('no disk')\n"
        "    def compute_score(self, data_source, solution_str, ground_truth, extra_info): pass\n",
    )
    with pytest.raises(ConfigError, match=r"reward class 'Bad' cannot be built: OSError: no disk \(bad.py:2\)"):
        build_reward(load_reward(path, "Bad"))


def test_an_installed_module_is_named_as_in_verl() -> None:
    found = load_reward("pkg://dataflow.rewards.gsm8k")
    assert found(**{**FOUR, "solution_str": "#### 3"}) == 1.0
    assert load_reward("pkg://dataflow/rewards/gsm8k") is found
    with pytest.raises(ConfigError, match=r"path=pkg://no_such: importing it raised ModuleNotFoundError"):
        load_reward("pkg://no_such")
    with pytest.raises(ConfigError, match="it has no 'nothing'"):
        load_reward("pkg://dataflow.rewards.gsm8k", "nothing")


@pytest.mark.heavy
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_verls_own_function_scores() -> None:
    found = build_reward(load_reward("pkg://verl.utils.reward_score", "default_compute_score", None, {}), None, {})
    assert found("openai/gsm8k", "so #### 72", "72", {}) == 1.0
    own = load_reward("pkg://dataflow.rewards.gsm8k")
    for text in (f"#### 42\n{'x' * 300}", "#### 42.", "#### $42"):  # as from_verl.md and VERLS_STRICT say
        assert found("openai/gsm8k", text, "42", {}) == 0.0
        assert own(**{**FOUR, "solution_str": text, "ground_truth": "42"}) == 1.0
