"""Programs that calls have started and that still run: none is left at the agent's end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataflow.batch import Batch
from dataflow.config.reward import RewardConfig
from dataflow.running.services.agent import build_agent
from dataflow.usercode.sentinel.leftovers import end_children
from tests.rigs.processes import left

pytestmark = pytest.mark.timeout(60)

REWARD = """
import os, subprocess

def compute_score(solution_str, **_):
    subprocess.run(["sh", "-c", "echo $$ > $0; sleep 1000; true", solution_str])
    return 1.0
"""


def test_the_child_of_a_call_whose_time_is_over_ends_with_the_agent(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    os.mkfifo(tmp_path / "pid")
    other = subprocess.Popen(["sleep", "1000"])
    time.sleep(0.05)  # the system tells begins in hundredths of a second
    rows: dict[str, Any] = {"data_source": ["d"], "response_text": [str(tmp_path / "pid")], "ground_truth": ["1"]}

    async def body() -> None:
        options = RewardConfig(timeout=0.5, tries=1, on_failure="score:0", max_failed_share=1)
        agent = build_agent({"path": str(tmp_path / "reward.py")}, {}, options)
        agent.submit(1, Batch([0], rows))
        pid = int(await asyncio.to_thread((tmp_path / "pid").read_text))
        child = psutil.Process(pid)
        started = child.children()
        async with asyncio.timeout(30):
            assert (await agent.collect(1))["score"].tolist() == [0.0]
            assert agent.stats()["abandoned"] == 1
            await agent.close()
        assert not left([child, *started], timeout=20)

    try:
        asyncio.run(body())
        assert other.poll() is None, "it was there before the call"
    finally:
        other.kill()
        other.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_those_that_are_needed_are_left_alone() -> None:
    others = [child.pid for child in psutil.Process().children()]
    kept, ended = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
    try:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.extend(end_children(30.0, but=[kept.pid, *others])))
        thread.start()
        thread.join(20)
        assert ended.wait(20) < 0
        assert ended.pid in found
        assert kept.poll() is None
    finally:
        kept.kill()
        kept.wait()
        ended.kill()
        ended.wait()
