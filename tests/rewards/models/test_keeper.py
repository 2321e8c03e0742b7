"""The servers of a reward model: started side by side, restarted at their address, ended whatever happens."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataflow.errors import RunError
from dataflow.rewards.models.hf import server as hf_server
from dataflow.rewards.models.keeper import ModelServers
from dataflow.rewards.models.server import Port, reason_in, server_command, server_environment
from dataflow.rewards.models.site import LocalSite
from dataflow.system.address import host_port
from tests.rigs.addresses import OTHERS
from tests.rigs.model_server import fake_command
from tests.rigs.processes import below, left, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

READY_S = 60.0
ROOT = Path(__file__).parents[3]
# Starts servers and waits for its own death; prints the ids of their processes.
RUN = """
import os, sys, threading
from pathlib import Path
import psutil
from dataflow.rewards.models.keeper import ModelServers
from dataflow.rewards.models.site import LocalSite
command = lambda port: [*sys.argv[2:], "--port", str(port), "--stubborn"]
with ModelServers("rm", [LocalSite(command, os.environ)], logs=Path(sys.argv[1]), start_s=60.0, restarts=3,
                  on_lost=print) as running:
    running.ready.result(60)
    print(*[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
    threading.Event().wait()
"""


def servers(
    logs: Path, *more: str, replicas: int = 1, restarts: int = 3, on_lost: Any = print, **options: Any
) -> ModelServers:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return ModelServers(
        "rm",
        [LocalSite(lambda port: fake_command(port, *more), environment) for _ in range(replicas)],
        logs=logs,
        restarts=restarts,
        on_lost=on_lost,
        **{"start_s": READY_S, **options},
    )


@pytest.fixture
def losses() -> queue.Queue[RunError]:
    return queue.Queue()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=READY_S) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def server_of(guard: int) -> psutil.Process:
    """Returns the server's own process, the guard's first child."""
    return psutil.Process(guard).children()[0]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def pair(logs: Path) -> Iterator[ModelServers]:
    with servers(logs, replicas=2, restarts=9) as running:
        running.ready.result(READY_S)
        yield running


def restarted(running: ModelServers, number: int, end: Any) -> None:
    """Ends a server; waits until another one answers at its address."""
    before = running.pids[number]
    end(before)
    assert until(lambda: running.pids[number] != before, READY_S)
    assert until(lambda: healthy(running.urls[number]), READY_S)


def test_servers_have_addresses_and_logs_of_their_own(pair: ModelServers, logs: Path) -> None:
    assert len(set(pair.urls)) == 2
    assert all(healthy(url) for url in pair.urls)
    assert sorted(log.name for log in logs.iterdir()) == ["rm-0.log", "rm-1.log"]
    assert all('"url"' in log.read_text() for log in logs.iterdir())


@pytest.mark.parametrize("what", ["server", "guard"])
def test_a_server_that_is_killed_comes_back_at_its_address(what: str, pair: ModelServers, warned: list[str]) -> None:
    other, urls, count = pair.pids[0], list(pair.urls), pair.restarted
    old = server_of(pair.pids[1]).pid

    def end(guard: int) -> None:
        os.kill(old if what == "server" else guard, signal.SIGKILL)

    restarted(pair, 1, end)
    assert left([old], timeout=10) == []
    assert (pair.urls, pair.restarted, pair.pids[0]) == (urls, count + 1, other)
    assert warned == [
        f"reward model 'rm': server 1 ended (killed, or out of memory): restart {count + 1} of 9; "
        "requests in flight there are sent again."
    ]


def test_a_server_whose_log_was_removed_comes_back(pair: ModelServers, logs: Path, warned: list[str]) -> None:
    (logs / "rm-1.log").unlink()
    restarted(pair, 1, lambda guard: server_of(guard).terminate())
    assert "its log cannot be read: No such file or directory" in warned[0]
    assert (logs / "rm-1.log").exists()


def test_a_server_that_dies_asleep_starts_when_its_model_wakes(tmp_path: Path, warned: list[str]) -> None:
    flag = tmp_path / "rm.asleep"
    flag.touch()
    with servers(tmp_path, flag=flag) as running:
        assert not flag.exists(), "it is that of an earlier process"
        running.ready.result(READY_S)
        flag.touch()
        before = running.pids[0]
        dead = server_of(before)
        dead.kill()
        assert left([dead], timeout=READY_S) == []
        assert not until(lambda: running.pids[0] != before, 0.5), "a new server has been started"
        flag.unlink()
        assert until(lambda: running.pids[0] != before, READY_S)
    assert warned[0].endswith("; it starts when its model wakes.")


def test_closed_asleep_nothing_waits(tmp_path: Path) -> None:
    flag = tmp_path / "rm.asleep"
    with servers(tmp_path, flag=flag) as running:
        running.ready.result(READY_S)
        flag.touch()
        server_of(running.pids[0]).kill()


def test_a_server_that_is_killed_while_it_starts_is_started_again(tmp_path: Path, warned: list[str]) -> None:
    with servers(tmp_path, "--never", start_s=READY_S) as running:
        before = running.pids[0]
        os.killpg(before, signal.SIGKILL)
        assert until(lambda: running.pids[0] != before, READY_S)
        assert not running.ready.done()
    assert "restart 1 of 3" in warned[0]


def test_a_server_that_hangs_is_restarted(tmp_path: Path, losses: queue.Queue[RunError]) -> None:
    with servers(tmp_path, restarts=0, hang_s=1.0, on_lost=losses.put) as running:
        running.ready.result(READY_S)
        hung = server_of(running.pids[0])
        hung.suspend()
        said = str(losses.get(timeout=READY_S))
        assert "server 0 ended (no answer to GET /health within 1 s), after 0 restarts" in said
        assert left([hung], timeout=5) == []


def test_after_too_many_restarts_a_sentence(tmp_path: Path, losses: queue.Queue[RunError]) -> None:
    with servers(tmp_path, restarts=0, on_lost=losses.put) as running:
        running.ready.result(READY_S)
        server_of(running.pids[0]).kill()
        said = str(losses.get(timeout=READY_S))
    assert said == (
        "reward model 'rm': server 0 ended (killed, or out of memory), after 0 restarts "
        f"(reward.models.rm.restarts=0); see {tmp_path / 'rm-0.log'}."
    )


def test_without_a_restart_the_others_go_on(tmp_path: Path, losses: queue.Queue[RunError], warned: list[str]) -> None:
    with servers(tmp_path, replicas=2, restarts=0, on_lost=losses.put) as running:
        running.ready.result(READY_S)
        server_of(running.pids[0]).kill()
        assert until(lambda: warned and warned[-1].endswith("; the run goes on with 1 of its servers."), READY_S)
        assert losses.empty()
        assert healthy(running.urls[1])
        server_of(running.pids[1]).kill()
        assert "server 1 ended (killed" in str(losses.get(timeout=READY_S))


def test_a_start_that_fails_names_the_first_cause(tmp_path: Path, losses: queue.Queue[RunError]) -> None:
    (tmp_path / "rm-0.log").write_text("ValueError: of an earlier run\n")
    with servers(tmp_path, "--fails", "no classification head", on_lost=losses.put) as running:
        with pytest.raises(RunError) as error:
            running.ready.result(READY_S)
        assert losses.get(timeout=READY_S) is error.value
    assert str(error.value) == (
        f"reward model 'rm': server 0 did not start (ValueError: no classification head); see {tmp_path / 'rm-0.log'}."
    )


def test_a_restart_that_fails_is_one_more(tmp_path: Path, losses: queue.Queue[RunError]) -> None:
    sign = tmp_path / "fail"
    with servers(tmp_path, "--fails", "gone", "--once", str(sign), restarts=2, on_lost=losses.put) as running:
        running.ready.result(READY_S)
        sign.touch()
        server_of(running.pids[0]).kill()
        said = str(losses.get(timeout=READY_S))
    assert "server 0 ended (ValueError: gone), after 2 restarts" in said


def test_a_server_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    with (
        servers(tmp_path, "--never", start_s=0.5) as running,
        pytest.raises(RunError, match=r"no answer to GET /health within 0\.5 s"),
    ):
        running.ready.result(READY_S)
    assert left([*running.pids], timeout=10) == []


def test_closed_before_it_is_ready_nothing_is_left(tmp_path: Path) -> None:
    before = set(below())
    with servers(tmp_path, "--never", replicas=2) as running:
        started = set(below()) - before
    assert len(started) >= 2
    assert left(started, timeout=10) == []
    assert not running.ready.done()


def test_a_server_that_ignores_sigterm_ends_with_its_children(tmp_path: Path) -> None:
    with servers(tmp_path, "--stubborn") as running:
        running.ready.result(READY_S)
        there = below(psutil.Process(running.pids[0]))
        assert len(there) == 2
    assert left(there, timeout=1) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_servers_end_with_the_process_that_started_them(number: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, "-c", RUN, str(tmp_path), *fake_command(0)[:3]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 3
        process.send_signal(number)
        process.wait(READY_S)
        assert left(pids, timeout=5) == []


def test_a_port_is_kept_between_two_servers() -> None:
    port = Port()
    for _server in range(2):
        with socket.create_server(("127.0.0.1", port.number)) as listening:
            socket.create_connection(("127.0.0.1", port.number), timeout=5).close()
            assert listening.getsockname()[1] == port.number
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.number), timeout=5)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port.number))
    port.close()


@pytest.mark.parametrize("address", OTHERS)
def test_a_server_listens_for_other_machines_where_it_is_told(address: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    site = LocalSite(lambda port: fake_command(port, "--host", address), environment, address)
    with ModelServers("rm", [site], logs=tmp_path, start_s=READY_S, restarts=0, on_lost=print) as running:
        running.ready.result(READY_S)
        assert running.urls == [f"http://{host_port(address, site.port)}"]
        assert healthy(running.urls[0])
        assert not healthy(f"http://127.0.0.1:{site.port}")


def test_the_command_line_of_vllm_has_the_keys_of_the_model() -> None:
    words = server_command(
        "rm",
        8000,
        path="dir",
        kind="classify",
        engine="vllm",
        device="cuda",
        dtype="auto",
        tensor_parallel=2,
        gpu_memory=0.4,
        max_model_len=512,
        template="t.jinja",
        sleeps=True,
        engine_kwargs={"enforce_eager": True, "max_num_seqs": 3, "structured_outputs_config": {"backend": "xgrammar"}},
    )
    assert words[1:4] == ["-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert " ".join(words[4:]) == (
        "--model dir --served-model-name rm --host 127.0.0.1 --port 8000 --dtype auto --max-model-len 512 "
        "--max-num-seqs 3 --chat-template t.jinja --runner pooling --tensor-parallel-size 2 "
        "--uvicorn-log-level warning --gpu-memory-utilization 0.4 --enable-sleep-mode --enforce-eager "
        '--structured-outputs-config {"backend": "xgrammar"}'
    )


def test_the_command_line_of_transformers_is_one_that_its_server_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = server_command(
        "rm",
        8000,
        path="nowhere",
        kind="pooling",
        engine="hf",
        device="cpu",
        dtype="auto",
        max_model_len=512,
        engine_kwargs={"threads": 2, "max_batch_tokens": 4096},
    )
    assert words[1:4] == ["-P", "-m", "dataflow.rewards.models.hf.server"]
    assert words[-8:-4] == ["--kind", "pooling", "--device", "cpu"]
    assert words[-4:] == ["--threads", "2", "--max-batch-tokens", "4096"]
    words[words.index("--port") + 1] = "0"
    assert hf_server.main(words[4:]) == 2  # of the model, not of an option
    assert "nowhere does not exist" in capsys.readouterr().err


def test_a_chat_model_on_a_cpu_is_served_in_float32_without_compilation() -> None:
    words = server_command("j", 1, path="d", kind="chat", engine="vllm", device="cpu", dtype="auto")
    assert "--runner" not in words
    assert words[words.index("--dtype") + 1] == "float32"
    assert "--enforce-eager" in words
    environment = server_environment("cpu", threads=3)
    assert environment["TORCH_COMPILE_DISABLE"] == "1"
    assert environment["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "3")


def test_the_reason_is_the_first_cause_in_the_part_of_the_log_since_the_start(tmp_path: Path) -> None:
    log = tmp_path / "rm-0.log"
    old = "ValueError: old\n"
    log.write_text(
        f"{old}(EngineCore pid=7) ERROR 11-23 20:00:00 [core.py:9] torch.OutOfMemoryError: CUDA out of memory.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\nbye\n"
    )
    assert reason_in(log, len(old)) == "torch.OutOfMemoryError: CUDA out of memory"
    log.write_text("usage: ...\napi_server.py: error: unrecognized arguments: --x\n")
    assert reason_in(log) == "api_server.py: error: unrecognized arguments: --x"
    log.write_text("loading\n\n")
    assert reason_in(log) == "loading"
    assert reason_in(log, 9) == ""
