"""Worker processes: their answers, how they die, and that none is left. The processes are real."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataflow.errors import ConfigError
from dataflow.rewards import gsm8k
from dataflow.rewards.functions import build_reward, load_reward
from dataflow.rewards.processes import Pool, Recipe, WorkerDied, WorkerError
from dataflow.usercode.load import describe
from tests.rigs.processes import below, left

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]

REWARD = '''
import os, re, signal, subprocess, sys, threading, time

class Busy(Exception):
    """Comes over whole: one argument, facts of its own."""

class Odd(Exception):
    retry_after = 2.5
    def __init__(self, message, code):
        super().__init__(message)
        self.fatal, self.code = True, code

def facts(): return {"score": 1.0, "pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"],
                     "main": threading.current_thread() is threading.main_thread()}

def say(text): print(text, flush=True)

def compute_score(data_source, solution_str, ground_truth, extra_info=None, add=0):
    """Does what its text says."""
    if solution_str == "facts":
        return facts()
    if solution_str == "busy":
        error = Busy("try later")
        error.retry = True
        raise error
    if solution_str == "odd":
        raise Odd("odd", 7)
    if solution_str == "stop":
        raise StopIteration
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "die":
        os._exit(5)
    if solution_str == "unsendable":
        return {"score": 1.0, "why": lambda: 0}
    if solution_str == "alarm":
        def rung(*_): raise TimeoutError("rung")
        signal.signal(signal.SIGALRM, rung)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(60)
    if solution_str in ("hang", "regex", "child"):
        child = subprocess.Popen(["sleep", "600"]) if solution_str == "child" else None
        with open(extra_info["pids"], "w") as out:
            out.write(" ".join(map(str, [os.getpid()] + ([child.pid] if child else []))))
        if solution_str == "regex":
            re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter's lock
        time.sleep(600)
    return float(ground_truth) + add

class Model:
    def __init__(self, scale, reward_router_address=None):
        self.scale, self.pid, self.router = scale, os.getpid(), reward_router_address
    def compute_score(self, data_source, solution_str, ground_truth, extra_info):
        return {"score": float(ground_truth) * self.scale, "here": self.pid == os.getpid(), "router": self.router}

ready = Model(4)
'''


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    return str(file)


@pytest.fixture
def waiting(tmp_path: Path) -> Callable[[], Coroutine[Any, Any, list[int]]]:
    """A fifo that user code writes its pids into; a reader waits until the code is running."""
    os.mkfifo(tmp_path / "pids")

    async def read() -> list[int]:
        text = await asyncio.to_thread((tmp_path / "pids").read_text)
        return [int(pid) for pid in text.split()]

    return read


def recipe(path: str, name: str = "compute_score", context: Any = None, **kwargs: Any) -> Recipe:
    return Recipe.of(build_reward(load_reward(path, name, kwargs), kwargs, context))


def ask(text: str = "", truth: Any = "3", **extra: Any) -> dict[str, Any]:
    return {"data_source": "d", "solution_str": text, "ground_truth": truth, "extra_info": extra}


def run(pool: Pool, body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await body()

    try:
        return asyncio.run(bounded())
    finally:
        pool.close()


def test_calls_are_answered_in_other_processes(path: str) -> None:
    pool = Pool(recipe(path), 2)

    async def body() -> tuple[list[float], list[dict[str, Any]]]:
        scores = await asyncio.gather(*(pool.call(ask(truth=truth)) for truth in range(40)))
        return scores, [await pool.call(ask("facts")) for _ in range(4)]

    scores, facts = run(pool, body)
    assert scores == [float(truth) for truth in range(40)]
    assert os.getpid() not in {each["pid"] for each in facts}
    # In the main thread user code may set alarms.
    assert all(each["main"] and each["threads"] == "1" for each in facts)
    assert not pool.counts


def test_each_form_of_reward_is_built_again(path: str) -> None:
    def score(name: str, context: Any = None, **kwargs: Any) -> Any:
        pool = Pool(recipe(path, name, context, **kwargs), 1)
        return run(pool, lambda: pool.call(ask()))

    assert score("compute_score", add=2) == 5
    made = {"score": 6.0, "here": True, "router": "h:1"}
    assert score("Model", {"reward_router_address": "h:1"}, scale=2) == made
    assert score("ready") == {"score": 12.0, "here": True, "router": None}
    pool = Pool(Recipe.of(gsm8k.compute_score), 1)
    assert run(pool, lambda: pool.call({**ask("#### 3"), "data_source": "openai/gsm8k"})) == 1


def test_errors_come_back_as_they_were(path: str) -> None:
    pool = Pool(recipe(path), 1)

    async def errors(*texts: str) -> list[Any]:
        return await asyncio.gather(*(pool.call(ask(text)) for text in texts), return_exceptions=True)

    texts = ("busy", "odd", "stop", "exit", "unsendable", "alarm")
    busy, odd, stop, left, unsendable, alarm = run(pool, partial(errors, *texts))
    assert type(busy).__name__ == "Busy"
    assert busy.retry
    line = REWARD[: REWARD.index("raise error")].count("\n") + 1
    assert describe(busy) == f"Busy: try later (reward.py:{line})"
    assert f'reward.py", line {line}, in compute_score' in busy.__notes__[0]
    # What cannot be sent keeps what the agent obeys.
    assert isinstance(odd, WorkerError)
    assert (odd.fatal, odd.retry_after) == (True, 2.5)  # type: ignore[attr-defined]
    assert describe(odd).startswith("WorkerError: Odd: odd (reward.py:")
    assert "StopIteration" in str(stop)
    assert "SystemExit: 3" in str(left)
    assert "it returned a dict, which cannot be sent" in str(unsendable)
    assert isinstance(alarm, TimeoutError)
    assert not pool.counts


def test_a_killed_worker_takes_its_own_call_with_it(path: str, waiting: Any, tmp_path: Path) -> None:
    pool = Pool(recipe(path), 2)

    async def body() -> None:
        hangs = asyncio.ensure_future(pool.call(ask("child", pids=str(tmp_path / "pids"))))
        worker, child = await waiting()
        scores = [asyncio.ensure_future(pool.call(ask(truth=truth))) for truth in range(20)]
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"was ended by signal 9 during a call") as caught:
            await hangs
        assert caught.value.retry
        assert await asyncio.gather(*scores) == [float(truth) for truth in range(20)]
        assert not left([worker, child], timeout=10)  # and what it had started

    run(pool, body)
    assert pool.counts == {"died": 1}


def test_a_call_given_up_is_stopped(path: str, waiting: Any, tmp_path: Path) -> None:
    pool = Pool(recipe(path), 1)

    async def body() -> None:
        stuck = asyncio.ensure_future(pool.call(ask("regex", pids=str(tmp_path / "pids"))))
        pids = await waiting()
        # Waits behind it, and is given up before its turn.
        unwanted = asyncio.ensure_future(pool.call(ask("die")))
        await asyncio.sleep(0)
        unwanted.cancel()
        stuck.cancel()
        ended = await asyncio.gather(stuck, unwanted, return_exceptions=True)
        assert [type(each) for each in ended] == [asyncio.CancelledError] * 2
        assert await pool.call(ask()) == 3
        assert not left(pids, timeout=10)

    run(pool, body)
    assert pool.counts == {"killed": 1}


def test_a_call_given_up_before_a_worker_is_ready_kills_none(path: str, waiting: Any, tmp_path: Path) -> None:
    good = recipe(path)
    pids = tmp_path / "pids"
    with open(path, "a") as file:
        file.write(f"open({str(pids)!r}, 'w').write(str(os.getpid()))\nopen({str(pids)!r}).read()\n")
    pool = Pool(good, 1)

    async def body() -> None:
        early = asyncio.ensure_future(pool.call(ask()))
        (loading,) = await waiting()
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
        later = asyncio.ensure_future(pool.call(ask("facts")))
        await asyncio.to_thread(pids.write_text, "")
        assert (await later)["pid"] == loading

    run(pool, body)
    assert not pool.counts


def test_closing(path: str, waiting: Any, tmp_path: Path) -> None:
    pool = Pool(recipe(path), 1)

    async def body() -> None:
        stuck = asyncio.ensure_future(pool.call(ask("hang", pids=str(tmp_path / "pids"))))
        (pid,) = await waiting()
        queued = asyncio.ensure_future(pool.call(ask()))
        await asyncio.sleep(0)
        await asyncio.to_thread(pool.close)
        ended = await asyncio.gather(stuck, queued, return_exceptions=True)
        assert all("was closed" in str(error) for error in ended)
        with pytest.raises(WorkerError, match="closed before this call"):
            await pool.call(ask())
        assert not left([pid], timeout=10)

    run(pool, body)


def test_a_file_that_fails_in_the_worker_stops_the_run(path: str) -> None:
    pool = Pool(recipe(path), 1)
    Path(path).write_text("import no_such_module")

    async def body() -> None:
        with pytest.raises(ConfigError, match=r"No module named 'no_such_module' \(reward.py:1\)") as caught:
            await pool.call(ask())
        assert caught.value.fatal  # type: ignore[attr-defined]

    run(pool, body)


MAIN = """
import asyncio, sys
from dataflow.rewards.functions import build_reward, load_reward
from dataflow.rewards.processes import Pool, Recipe

async def main(path, text, pids):
    pool = Pool(Recipe.of(build_reward(load_reward(path))), 2)
    arguments = {"data_source": "d", "solution_str": text, "ground_truth": "3", "extra_info": {"pids": pids}}
    call = asyncio.ensure_future(pool.call(arguments))
    await pool.call({**arguments, "solution_str": ""})
    print("ready", flush=True)
    if sys.argv[4:]:
        with open(pids + ".go") as go:
            await asyncio.to_thread(go.read)
        exec(sys.argv[4])
    await call

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
"""


def started(tmp_path: Path, path: str, text: str, *then: str) -> tuple[Any, list[psutil.Process]]:
    """Returns a run that is at work, and every process under it."""
    (tmp_path / "main.py").write_text(MAIN)
    if then:
        os.mkfifo(tmp_path / "pids.go")
    arguments = [str(tmp_path / "main.py"), path, text, str(tmp_path / "pids"), *then]
    # A session of its own, as under a terminal: whatever ends the run does not come to its workers from there.
    run = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, start_new_session=True)
    assert run.stdout is not None
    assert run.stdout.readline() == b"ready\n"
    pids = (tmp_path / "pids").read_text().split()
    found = below(psutil.Process(run.pid))
    assert {int(pid) for pid in pids} <= {process.pid for process in found}
    return run, found


@pytest.mark.parametrize("text", ["regex", "child"])
def test_no_process_survives_a_killed_run(path: str, waiting: Any, tmp_path: Path, text: str) -> None:
    run, found = started(tmp_path, path, text)
    with run:
        run.kill()
    assert not left(found, timeout=10)


def test_no_process_survives_the_interpreters_exit(path: str, waiting: Any, tmp_path: Path) -> None:
    run, found = started(tmp_path, path, "regex", "sys.exit(4)")
    with run:
        (tmp_path / "pids.go").write_text("")
        assert run.wait(timeout=20) != 0
    assert not left(found, timeout=10)


def test_a_script_without_a_guard_is_an_error(path: str, tmp_path: Path) -> None:
    text = MAIN.replace('if __name__ == "__main__":', "if True:")
    (tmp_path / "main.py").write_text(text)
    arguments = [str(tmp_path / "main.py"), path, "", ""]
    run = subprocess.run([sys.executable, *arguments], capture_output=True, timeout=60, check=False)
    assert run.returncode == 1
    assert re.search(rb"WorkerDied: a worker process ended before it was ready", run.stderr)
