"""The judge on loopback: its delays, its answers, its start and its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from dataflow.rewards.judge.judge import Judge, JudgeError
from dataflow.rewards.judge.server import start_judge

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(90)]

RIGHT = "It is 3 + 4 = 7.\n#### 7"
COMMAND = [sys.executable, "-m", "dataflow.rewards.judge.server", "--latency", "60"]


def test_it_ends_on_sigterm_even_while_it_delays() -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]

        async def body() -> None:
            judge = Judge(url)
            waiting = asyncio.ensure_future(judge.compute_score("d", RIGHT, "7"))
            done, _ = await asyncio.wait([waiting], timeout=0.3)
            assert not done
            os.kill(process.pid, signal.SIGTERM)
            with pytest.raises(JudgeError):
                await asyncio.wait_for(waiting, 10)
            await judge.close()

        asyncio.run(body())
        assert process.wait(timeout=10) == 0


def test_it_listens_for_agents_on_other_machines_only_where_it_is_told() -> None:
    async def body(url: str) -> float:
        judge = Judge(url)
        result = await judge.compute_score("d", RIGHT, "7")
        await judge.close()
        return float(result["score"])

    with start_judge("0", address="127.0.0.2") as away:
        assert urlsplit(away.url).hostname == "127.0.0.2"
        assert asyncio.run(body(away.url)) == 1
