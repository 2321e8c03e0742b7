"""Loading the user's reward code, and the sentences about what is wrong with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.errors import ConfigError
from dataflow.reward_agent import build_agent, load_reward

pytestmark = pytest.mark.timeout(60)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_users_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.py",
        "class Mine:\n"
        "    def __init__(self, add=0): self.add = add\n"
        "    async def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):\n"
        "        return float(ground_truth) + self.add\n"
        "def scored(data_source, solution_str, ground_truth, extra_info, factor=1):\n"
        "    return float(ground_truth) * factor\n",
    )

    async def score(custom: dict[str, Any]) -> list[float]:
        agent = build_agent(custom, {"target": f"{__name__}:plain"} if custom is None else {"target": "no:no"}, 4)
        columns = {"response_text": ["x", "y"], "data_source": ["d", "d"], "ground_truth": ["3", "3.1"]}
        agent.submit(1, Batch([3, 3], columns))
        rewards = await agent.collect(1)
        await agent.close()
        return rewards["score"].tolist()

    mine = {"path": path, "name": "Mine", "reward_kwargs": {"add": 5}}
    assert asyncio.run(score(mine)) == pytest.approx([8, 8.1])
    scored = {"path": path, "name": "scored", "reward_kwargs": {"factor": 2}}
    assert asyncio.run(score(scored)) == pytest.approx([6, 6.2])


def test_the_default_reward() -> None:
    agent = build_agent({"path": None}, {"target": "dataflow.rewards.judge:Judge", "kwargs": {"url": "http://h:1"}}, 3)
    assert agent.concurrency == 3
    with pytest.raises(ConfigError, match=r"judge:Jury' cannot be found"):
        build_agent(None, {"target": "dataflow.rewards.judge:Jury"})


def test_a_users_file_that_cannot_be(tmp_path: Path) -> None:
    good = write(
        tmp_path / "good.py",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
        "class Empty: pass\n"
        "class Sized:\n    def __init__(self, size): pass\n    def compute_score(self): pass\n"
        "number = 3\n",
    )
    assert load_reward(good).__name__ == "compute_score"
    wrong = [
        ((str(tmp_path / "none.py"),), "there is no such file"),
        ((good, "compute_scor"), "has no 'compute_scor'; did you mean 'compute_score'?"),
        ((good, "zzz"), "has no 'zzz'; it defines Empty, Sized, compute_score"),
        ((good, "number"), "'number' is a int; give a function or a class"),
        ((good, "Empty"), "class 'Empty' has no method compute_score"),
        ((good, "Sized"), "'Sized' cannot be called with nothing (missing a required argument: 'size')"),
        ((good, "compute_score", {"factor": 2}), "unexpected keyword argument 'factor'"),
        ((write(tmp_path / "a.py", "import no_such_module\n"),), "No module named 'no_such_module' (a.py:1)"),
        ((write(tmp_path / "b.py", "def f(:\n"),), "SyntaxError"),
        ((write(tmp_path / "c.py", "import sys\nsys.exit(1)\n"),), "SystemExit: 1 (c.py:2)"),
        ((write(tmp_path / "d.txt", ""),), "it is no Python file"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ConfigError) as error:
            load_reward(*arguments)  # type: ignore[arg-type]
        assert message in str(error.value)
        assert str(error.value).startswith(f"custom_reward_function.path={arguments[0]}: ")
        assert "\n" not in str(error.value)
