"""A process whose event loop does not run is ended, with the stacks of its threads behind the reason."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dataflow.system.frozen import DEATH_REASON, frozen_exit

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
import asyncio, re, sys, threading, time
from dataflow.system.frozen import frozen_exit

def backtrack():
    re.match(r"(a+)+$", "a" * 60 + "b")

def block():
    time.sleep(100)

async def main():
    inner = frozen_exit(0.5, "a function", "some.key", "do not")
    outer = frozen_exit(0.5, "a function", "some.key", "do not")
    outer.start(); inner.start()
    await asyncio.sleep(1.2)  # longer than the limit
    inner.close()
    if sys.argv[1] == "backtracks":
        threading.Thread(target=backtrack, name="user", daemon=True).start()
        await asyncio.sleep(100)
    elif sys.argv[1] == "blocks":
        block()
    outer.close()
    time.sleep(1.2)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "function"), [("backtracks", "backtrack"), ("blocks", "block"), ("ends", None)])
def test_a_frozen_process_ends_with_all_stacks(how: str, function: str | None, tmp_path: Path) -> None:
    path = tmp_path / "why"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), DEATH_REASON: str(path)}
    ended = subprocess.run([sys.executable, "-c", PROGRAM, how], timeout=50, env=environment)
    assert ended.returncode == (0 if function is None else 1)
    if function is None:
        assert not path.exists()
        return
    why, _, stacks = path.read_text().partition("\n")
    assert why == (
        "a function kept Python's lock, or blocked the event loop, for 0.5 s, in which nothing else ran (some.key); "
        "the log has the stacks; do not."
    )
    assert stacks.startswith("Timeout (0:00:00.500000)!")
    assert f"in {function}\n" in stacks
    assert "in main\n" in stacks or "in run_once\n" in stacks or "in _run_once\n" in stacks


def test_without_a_freeze_the_file_has_the_reason_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert frozen_exit(1.0, "a function", "some.key", "do not") is None, "the run's own process"
    monkeypatch.setenv(DEATH_REASON, str(tmp_path / "why"))
    assert frozen_exit(0, "a function", "some.key", "do not") is None

    async def body() -> str:
        watch = frozen_exit(30.0, "a function", "some.key", "do not")
        assert watch is not None
        watch.start()
        try:
            return (tmp_path / "why").read_text()
        finally:
            watch.close()

    assert len(asyncio.run(body()).splitlines()) == 1
    assert not (tmp_path / "why").exists()
