"""A tool that keeps Python's lock: another process names tool and sample, and ends the process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dataflow.tools.calls import ToolCaller
from dataflow.tools.formats import ToolCall
from dataflow.tools.toolbox import Toolbox
from dataflow.usercode.sentinel.sentinel import REWARDS, TOOLS, Sentinel

pytestmark = pytest.mark.timeout(60)

TOOL = '''
import re
from dataflow.tools.registry import tool

@tool()
def find(pattern: str) -> bool:
    """Finds a pattern."""
    return re.match(pattern, "a" * 60 + "b") is not None
'''
PROGRAM = """
import asyncio, sys
from dataflow.tools.formats import ToolCall
from dataflow.tools.toolbox import Toolbox

async def main():
    async with Toolbox(path=sys.argv[1], timeout=0.2, frozen_after=1).open() as caller:
        state = caller.state(None, ("val:2", 5, 1))
        print(await caller.answer(ToolCall("find", {"pattern": "(a+)+$"}), state))

asyncio.run(main())
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    file = tmp_path / "my_tools.py"
    file.write_text(TOOL)
    return file


@pytest.mark.slow
def test_a_tool_that_freezes_its_process_is_named_and_ended(tools: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tools)], capture_output=True, text=True, timeout=50, env=environment
    )
    assert ended.returncode == -signal.SIGKILL
    said = ended.stderr.strip()
    assert said.startswith("dataflow: sample 1 of group 5 of step val:2: 'find' (my_tools.py:8) has kept Python's lock")
    assert "(tools.frozen_after); the process was ended; call it in a process of its own" in said
    assert len(said.splitlines()) == 1


def test_calls_that_end_leave_no_process_behind(tools: Path) -> None:
    box = Toolbox(path=str(tools), frozen_after=30)

    async def body() -> tuple[list[str], list[psutil.Process]]:
        before = psutil.Process().children()
        # As in an inline run, whose process has a sentinel of the rewards, too.
        rewards = Sentinel(30, None, False, REWARDS)
        rewards.start(asyncio.get_running_loop())
        texts = []
        try:
            for _step in range(3):
                async with box.open() as caller:
                    state = caller.state(None, (1, 0, 0))
                    texts.append((await caller.answer(ToolCall("find", {"pattern": "a"}), state)).text)
        finally:
            rewards.close()
        return texts, [child for child in psutil.Process().children() if child not in before]

    texts, left = asyncio.run(body())
    assert texts == ["true"] * 3
    assert not left


@pytest.mark.parametrize(
    ("timeout", "frozen_after", "after_s"),
    [(10, None, 60), (90, None, 90), (None, None, 60), (10, 5, 5), (10, 0, None)],
)
def test_a_call_may_take_its_time_out_and_a_minute(
    timeout: float | None, frozen_after: float | None, after_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Sentinel | None] = []

    class Caller(ToolCaller):
        def __init__(self, *arguments: object) -> None:
            given.append(arguments[2])  # type: ignore[arg-type]

        async def close(self) -> None:
            """Nothing was started."""

    monkeypatch.setattr("dataflow.tools.toolbox.ToolCaller", Caller)

    async def body() -> None:
        async with Toolbox(names=("calculator",), timeout=timeout, frozen_after=frozen_after).open():
            pass

    asyncio.run(body())
    (sentinel,) = given
    assert (sentinel and (sentinel.after_s, sentinel.watched)) == (after_s and (after_s, TOOLS))
