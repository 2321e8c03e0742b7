"""A reward function that keeps Python's lock in the agent's process on Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.cli import main

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "gsm8k_grpo.py")
REWARD = """
import re, time
from pathlib import Path

import torch  # before the watch begins: the worker imports it anyway, and an import keeps the lock for seconds

HERE = Path(__file__).parent

def compute_score(solution_str, ground_truth, **_):
    asked, frozen, what = HERE / "asked", HERE / "frozen", f"{ground_truth} {solution_str!r}"
    with asked.open("a") as file:
        file.write(what + "\\n")
    if not frozen.exists() and len(asked.read_text().splitlines()) == 6:
        frozen.write_text(what)
        time.sleep(1)  # the ledger gets the answers before it
    if frozen.exists() and frozen.read_text() == what:
        re.match(r"(a+)+$", "a" * 60 + "b")
    return 1.0
"""


def test_an_agent_that_freezes_three_times_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    small = ("engine.rollout=hf", "data.prompts=8", "trainer.mini_batches=2", "engine.n=2", "engine.max_tokens=8")
    plain = ("steps=1", "val.every=0", "checkpoint.every=0", "checkpoint.export=false", "policy=baseline", "--quiet")
    reward = (f"custom_reward_function.path={tmp_path / 'reward.py'}", "reward.frozen_after=5", "reward.concurrency=1")
    assert main(["run", PIPELINE, *small, *plain, *reward, f"runs={tmp_path / 'runs'}", "executor=ray"]) == 1
    said = capsys.readouterr().err
    # The agent was rebuilt twice; each time the log has the stacks of all its threads.
    stacks = said.split("'reward' froze; its threads were at:\n")[1:]
    assert len(stacks) == 3
    for stack in stacks:
        assert "in compute_score\n" in stack
        assert "default_worker.py" in stack
    assert [f"restart {n} of 3" in said for n in (1, 2, 3)] == [True, True, False]
    (last,) = [line for line in said.splitlines() if line.startswith("StageFailed: ")]
    assert "'reward' froze 3 times; the last: a reward function kept Python's lock" in last
    assert last.endswith("run it in processes of its own with reward.manager=remote.")
    # What was answered is not asked again.
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[5:] == [(tmp_path / "frozen").read_text()] * 3
