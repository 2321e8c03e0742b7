"""The Ray of a run: its own, on loopback and protected by a token, and a cluster that it joins."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dataflow.errors import ConfigError, RunError
from dataflow.executors.ray import connection
from dataflow.executors.ray.connection import begin_ray, drop_ray, join_ray, start_ray
from tests.rigs.listening import Listener, check, listeners
from tests.rigs.processes import below, command

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]

ASK = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, 5)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
BEFORE: set[Listener] = set()
"""What tests of other modules have left listening in this process."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[psutil.Process]]:
    """The second Ray of this process, started in a directory that is on no path; yields the processes before it."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        BEFORE.update(listeners(psutil.Process()))
        others = below()
        begin_ray(1)
        drop_ray()
        assert not ray.is_initialized()
        begin_ray(1)
        start_ray(1)
        yield others
        ray.shutdown()


def ask(**environment: str) -> subprocess.CompletedProcess[str]:
    """Queries the run's Ray from a process with these environment variables."""
    import ray

    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    asking = [sys.executable, "-c", ASK, str(ray.get_runtime_context().gcs_address)]
    return subprocess.run(asking, env=given | environment, capture_output=True, text=True, timeout=60)


def test_it_listens_on_loopback_alone(own: object) -> None:
    found = [each for each in listeners(psutil.Process()) if each not in BEFORE]
    # This process is pytest: it stands for the command.
    check([each._replace(process="dataflow run") if "pytest" in each.process else each for each in found], 4)


def test_it_answers_only_who_has_the_token_which_no_command_or_log_contains(own: object) -> None:
    token = os.environ["RAY_AUTH_TOKEN"]
    assert ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token).returncode == 0
    for without in (ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="1" * 64), ask(RAY_AUTH_MODE="disabled")):
        assert without.returncode == 1
        assert "nauthenticated" in without.stderr or "nauthorized" in without.stderr
    for process in [psutil.Process(), *below()]:
        assert token not in " ".join(command(process))
    session = Path(os.path.realpath("/tmp/ray/session_latest"))
    files = [file for file in session.rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if token.encode() in file.read_bytes()]


def test_it_leaves_nothing(own: list[psutil.Process]) -> None:
    """The last of those that use it, which it ends."""
    import ray

    assert ray.get(ray.remote(num_cpus=0)(lambda: os.nice(0)).remote(), timeout=60) == os.nice(0)
    started = [process for process in below() if process not in own]
    ray.shutdown()
    assert not psutil.wait_procs(started, timeout=10)[1]


IMPORTED = """
import os
os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
import ray
from dataflow.executors.ray.connection import start_ray
start_ray(1)
"""


def test_one_that_would_listen_on_other_interfaces_does_not_run() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))
        except OSError:
            pytest.skip("this machine has no other interface")
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=100)
    assert "ConfigError: this process had imported Ray (or verl, which does) without RAY_ENABLE_" in done.stderr


def test_one_that_does_not_start_says_why_and_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def broken(*_: object, **_options: object) -> None:
        raise OSError("AF_UNIX path length cannot exceed 107 bytes.")

    monkeypatch.setattr(ray, "init", broken)
    with pytest.raises(RunError, match=r"cannot exceed 107 bytes; its logs are in /tmp/ray, or RAY_TMPDIR"):
        start_ray(1)


def test_a_cluster_that_does_not_answer_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    for address in ("127.0.0.1:1", "10.0.0.1:six", "ray://127.0.0.1:10001"):
        with pytest.raises(ConfigError, match=rf"ray\.address={address}: no Ray cluster answers there"):
            join_ray(address)
    monkeypatch.setattr(connection, "_JOIN_S", 0.1)
    monkeypatch.setattr(ray, "init", lambda *_, **__: threading.Event().wait(5))
    with pytest.raises(ConfigError, match=r"ray\.address=auto: no Ray cluster answers there"):
        join_ray("auto")
