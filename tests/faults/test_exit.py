"""The interpreter ends with requests in flight: it ends in time, and no process survives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.rewards.test_ledger import totals_in
from tests.rigs.processes import left, marked

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(90)]

DEADLINE_S = 30.0
"""Seconds; an interpreter that waits for a stuck thread waits for ever."""
KINDS = ("sync", "later", "remote")
"""What is in flight: a thread, a coroutine, another process."""

PROGRAM = """
import asyncio, sys
from pathlib import Path
from dataflow.batch import Batch
from dataflow.errors import RewardFailed
from dataflow.rewards.ledger import Ledger
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.functions import build_reward, load_reward
from dataflow.rewards.managers import build_manager

HERE, ENDING, *KINDS = sys.argv[1:]

def samples():
    rows = [(g, i) for g in range(4) for i in range(2)]
    return Batch([g for g, _ in rows], {
        "response_text": [f"{g}.{i}" for g, i in rows],
        "data_source": ["d"] * 8, "ground_truth": ["1"] * 8, "extra_info": [{}] * 8,
    })

def agent_of(kind):
    kwargs = {"stuck": f"{HERE}/{kind}"}
    name = "sync" if kind == "remote" else kind
    reward = build_reward(load_reward(HERE + "/reward.py", name, kwargs), kwargs)
    if kind == "remote":
        reward = build_manager("remote", reward, workers=2)
    retry = Retry(timeout_s=None, deadline_s=None)
    return RewardAgent(reward, limits=Limits(8), retry=retry, ledger=Ledger(f"{HERE}/{kind}.db"))

async def main():
    agents = {kind: agent_of(kind) for kind in KINDS}
    for agent in agents.values():
        agent.submit(1, samples())
    # The first group is answered, the others never are. When a call has begun that never ends, the fifo says so.
    for kind, agent in agents.items():
        scores = await agent.collect(1, 1)
        assert scores.ids == (0,), scores.ids
        await asyncio.to_thread(Path(f"{HERE}/{kind}").read_text)
    collects = [asyncio.create_task(agent.collect(1)) for agent in agents.values()]
    if ENDING == "wait":  # for a signal, which may come within the milliseconds of a commit
        for agent in agents.values():
            await asyncio.to_thread(agent.ledger.flush)
    print("in flight", flush=True)
    if ENDING == "close":
        await asyncio.gather(*(agent.close() for agent in agents.values()))
        print({str(end) for end in await asyncio.gather(*collects, return_exceptions=True)}, flush=True)
    elif ENDING == "exit":
        sys.exit(3)
    elif ENDING == "wait":
        await asyncio.wait(collects)

if __name__ == "__main__":
    asyncio.run(main())
"""

REWARD = """
import asyncio, time

def note(text, stuck):
    # The fifo has one reader, which reads once: the other calls must not wait for another.
    if text == "1.0":
        with open(stuck, "w") as fifo:
            fifo.write("x")

def sync(data_source, solution_str, ground_truth, extra_info, stuck):
    if solution_str.startswith("0."):
        return 1.0
    note(solution_str, stuck)
    while True:
        time.sleep(600)

async def later(data_source, solution_str, ground_truth, extra_info, stuck):
    if solution_str.startswith("0."):
        return 1.0
    await asyncio.to_thread(note, solution_str, stuck)
    await asyncio.Event().wait()

async def stubborn(data_source, solution_str, ground_truth, extra_info, stuck):
    if solution_str.startswith("0."):
        return 1.0
    await asyncio.to_thread(note, solution_str, stuck)
    for _ in range(2):  # close cancels it, then the end of the loop does
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass
"""


def start(tmp_path: Path, ending: str, *more: str) -> tuple[subprocess.Popen[str], str]:
    """Starts the program and returns when it has requests in flight; all its processes bear the mark."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "reward.py").write_text(REWARD)
    for kind in (*KINDS, *more):
        os.mkfifo(tmp_path / kind)
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path), ending, *KINDS, *more],
        env={**os.environ, "FAULTS_MARK": mark, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in flight\n", process.communicate()
    return process, mark


def ends(process: subprocess.Popen[str], mark: str) -> tuple[int, str, str]:
    """Returns exit code, output and errors of a program that ends in time and leaves nothing behind."""
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"it did not end within {DEADLINE_S:g} s: {process.communicate()}")
    assert not left(marked("FAULTS_MARK", mark), timeout=10), "a process outlived the interpreter"
    return process.returncode, out, err


def check_ledgers(tmp_path: Path) -> None:
    """What was answered is on disk."""
    for kind in KINDS:
        assert totals_in(tmp_path / f"{kind}.db")[:2] == (8, 2), kind


def test_it_ends_while_requests_are_in_flight(tmp_path: Path) -> None:
    returncode, _out, err = ends(*start(tmp_path, "exit"))
    assert returncode == 3, err
    assert "Fatal Python error" not in err
    check_ledgers(tmp_path)


def test_closed_it_ends_though_a_coroutine_will_not_be_cancelled(tmp_path: Path) -> None:
    returncode, out, err = ends(*start(tmp_path, "close", "stubborn"))
    assert (returncode, out) == (0, "{'step 1: the reward agent was closed.'}\n"), err
    check_ledgers(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_it_is_stopped_while_requests_are_in_flight(tmp_path: Path, number: signal.Signals) -> None:
    process, mark = start(tmp_path, "wait")
    process.send_signal(number)
    returncode, _out, err = ends(process, mark)
    assert returncode == -number, err
    check_ledgers(tmp_path)
