"""The servers of reward models: what is started, what start and end report, and that nothing outlives a run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataflow.config.served import ServedModelConfig
from dataflow.errors import RunError
from dataflow.rewards.models.server import Sleeper, server_environment
from dataflow.running.services.served_models import serve_command
from dataflow.system.serving import Child, Port, reason_in
from tests.rigs.processes import left
from tests.rigs.stand_in_server import COMMAND

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def test_the_command_of_a_judge_that_shares_its_gpus() -> None:
    more: dict[str, Any] = {"tensor_parallel": 2, "gpu_memory": 0.3, "engine_kwargs": {"seed": 1, "dtype": "float16"}}
    model = ServedModelConfig(path="/m", kind="chat", placement="colocated", **more)
    words = " ".join(serve_command("j", model, "cuda"))
    assert "--runner" not in words
    for part in ("--dtype float16 ", "--tensor-parallel-size 2 ", "--gpu-memory-utilization 0.3 ", "--seed 1"):
        assert part in words
    assert "--enable-sleep-mode" in words
    assert server_environment("cuda", sleeps=True)["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in server_environment("cuda")
    assert server_environment("cpu", 3)["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "3")


def test_the_reason_is_the_first_error_of_the_last_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "ValueError: of an earlier start\n"
        "(EngineCore pid=7) ERROR 01-01 10:00:00 [core.py:1] ValueError: no room.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert reason_in(log, offset=10).endswith("[core.py:1] ValueError: no room")
    log.write_text("bye\n\n")
    assert reason_in(log) == "bye"
    log.write_text("")
    assert reason_in(log) == ""


def child(tmp_path: Path, *words: str, start_s: float = 30.0) -> tuple[Child, Port]:
    port = Port()
    return Child([*COMMAND, *words], port, tmp_path / "servers" / "log", None, start_s, "model 'rm'"), port


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataflow.system.serving.CLOSE_S", 0.5)
    server, _port = child(tmp_path, "--stubborn")
    server.start()
    server.wait_ready()
    server.close()
    assert server.reason() == "killed, or out of memory"


def test_one_that_never_answers_is_a_sentence(tmp_path: Path) -> None:
    server, _port = child(tmp_path, "--never", start_s=0.5)
    server.start()
    said = r"^model 'rm' did not start \(no answer to GET /health in 0.5 s\); see .*log\.$"
    taken = [os.dup(0) for _ in range(1100)]
    with pytest.raises(RunError, match=said):
        server.wait_ready()
    for descriptor in taken:
        os.close(descriptor)
    server.close()


STARTS = """
import os, sys
from pathlib import Path
from dataflow.system.serving import Child, Port
server = Child(sys.argv[3:], Port(number=int(sys.argv[1])), Path(sys.argv[2]), None, 30.0, "rm")
server.start()
server.wait_ready()
print("ready", flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    port = Port()
    words = [sys.executable, "-c", STARTS, str(port.number), str(tmp_path / "log"), *COMMAND]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    assert process.returncode == -signal.SIGKILL
    found = [p for p in psutil.process_iter(["cmdline"]) if str(port.number) in (p.info["cmdline"] or [])]
    assert left(found, timeout=10) == []
    port.close()


def test_a_server_that_cannot_sleep_says_so(tmp_path: Path) -> None:
    server, port = child(tmp_path)
    server.start()
    server.wait_ready()

    async def body() -> None:
        async with Sleeper("reward model 'rm'", (port.url,), 5.0).awake():
            raise AssertionError

    with pytest.raises(RunError, match=r"reward model 'rm': server http://\S+ does not wake up .*placement=own\."):
        asyncio.run(body())
    server.close()
