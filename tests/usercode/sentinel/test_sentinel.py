"""Calls that freeze their process: a second process names the call and ends the process."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dataflow.batch import Batch
from dataflow.errors import RunError
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.ledger.frozen_calls import FrozenCalls
from dataflow.usercode.sentinel.sentinel import Sentinel
from tests.usercode.sentinel import frozen_calls

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(100)]

DEADLINE_S = 60.0
FREEZES = [
    "backtracks", "waits_in_c", "waits_in_c_behind_a_busy_loop", "backtracks_on_the_loop", "backtracks_in_a_task",
    "blocks_the_loop",
]  # fmt: skip
SIGNALS = [(signal.SIGINT, "blocks_the_loop"), (signal.SIGTERM, "backtracks")]
LOCK, LOOP = "has kept Python's lock for", "has blocked the event loop for"


class Program:
    """The program in a process of its own."""

    def __init__(self, function: str, directory: Path, after_s: str, supervised: bool = False) -> None:
        self.record = directory / f"{function}{after_s}.jsonl"
        self.run = directory / f"run{after_s}"
        more = [str(self.run)] if supervised else []
        command = [sys.executable, "-u", frozen_calls.__file__, function, str(self.record), after_s, *more]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], DEADLINE_S)[0], "it says nothing"
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str]:
        _out, said = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, said


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Program]]:
    """All of them side by side: each takes longer to start and to be found out than it computes."""
    directory = tmp_path_factory.mktemp("frozen")
    started = {function: Program(function, directory, "1.5") for function in [*FREEZES, "starts_a_program"]}
    started |= {sign.name: Program(function, directory, "") for sign, function in SIGNALS}
    supervised = tmp_path_factory.mktemp("supervised")
    started |= {f"supervised{after_s}": Program("backtracks", supervised, after_s, True) for after_s in ("1.5", "")}
    yield started
    for program in started.values():
        program.process.kill()
        program.process.wait()


@pytest.mark.parametrize("function", FREEZES)
def test_a_frozen_process_is_ended_and_the_sample_is_named(programs: dict[str, Program], function: str) -> None:
    program = programs[function]
    assert program.line() == "frozen"
    code, said = program.end()
    assert code == -signal.SIGKILL
    named = "backtracks_on_the_loop" if function == "backtracks_in_a_task" else function
    assert f"sample 1 of group 7 of step val:3: '{named}' (frozen_calls.py:" in said
    assert (LOOP if function == "blocks_the_loop" else LOCK) in said
    assert "reward.manager=remote" in said
    frozen = FrozenCalls(program.record)
    assert named in frozen.sample("val:3", 7, 1, b"12345678 of this request")
    assert not frozen.sample("val:3", 7, 0, b"87654321 of another")


def test_what_it_had_started_ends_with_it(programs: dict[str, Program]) -> None:
    program = programs["starts_a_program"]
    with suppress(ProcessLookupError):  # it may be over by now
        child = os.pidfd_open(int(program.line()))
        assert select.select([child], [], [], DEADLINE_S)[0], "the child has not ended"
        os.close(child)
    program.end()


@pytest.mark.parametrize(("sign", "function"), SIGNALS)
def test_a_signal_ends_a_run_that_is_frozen(programs: dict[str, Program], sign: signal.Signals, function: str) -> None:
    program = programs[sign.name]
    assert program.line() == "frozen"
    program.process.send_signal(sign)
    code, said = program.end()
    assert code == -signal.SIGKILL
    assert f"\ndataflow: interrupted by {sign.name}: '{function}'" in said
    assert not program.record.exists()


def test_a_frozen_run_fails_with_one_sentence(programs: dict[str, Program]) -> None:
    program = programs["supervised1.5"]
    assert program.line() == "frozen"
    code, said = program.end()
    assert code == 1
    assert said.startswith("RunError: sample 1 of group 7 of step val:3: 'backtracks' (frozen_calls.py:")
    assert LOCK in said
    assert said.endswith("; run it again.\n")
    assert len(said.splitlines()) == 1
    assert json.loads((program.run / "summary.json").read_text())["status"] == "failed"
    assert FrozenCalls(program.record).sample("val:3", 7, 1, b"12345678 of this request")


def test_a_signal_to_a_frozen_run_is_reported_in_one_sentence(programs: dict[str, Program]) -> None:
    program = programs["supervised"]
    assert program.line() == "frozen"
    program.process.send_signal(signal.SIGTERM)
    code, said = program.end()
    assert code == 128 + signal.SIGTERM
    assert said.startswith("\ninterrupted: 'backtracks' (frozen_calls.py:")
    assert "stopped after 0 of 7 steps" in said
    assert len(said.strip().splitlines()) == 1
    assert json.loads((program.run / "summary.json").read_text())["status"] == "interrupted"
    assert not program.record.exists()


def test_an_agent_whose_watcher_cannot_be_started_raises_and_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)

    async def body() -> None:
        agent = RewardAgent(lambda **_: 1.0, sentinel=Sentinel(5.0, None, inline=False))
        columns = {"data_source": ["d"], "ground_truth": ["1"], "response_text": ["1"]}
        with pytest.raises(RunError, match=r"No space left on device.*reward.frozen_after=0"):
            agent.submit(1, Batch([0], columns))
        await agent.close()

    asyncio.run(body())
