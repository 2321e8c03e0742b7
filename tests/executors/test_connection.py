"""The Ray of a run: its own, on loopback and protected by a token, and a cluster that it joins."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dataflow.errors import ConfigError, RunError
from dataflow.executors.ray import connection
from dataflow.executors.ray.connection import join_ray, start_ray
from tests.rigs.listening import Listener, check, listeners
from tests.rigs.processes import below, command, environment

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
        start_ray(1)
        ray.shutdown()
        start_ray(1)
        yield others
        ray.shutdown()


def token_path() -> Path:
    """Returns the file with the token, as Ray's processes know it."""
    (gcs,) = [process for process in below() if any("gcs_server" in word for word in command(process)[:1])]
    return Path(environment(gcs)["RAY_AUTH_TOKEN_PATH"])


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


def test_it_answers_only_who_has_the_token_which_no_environment_command_or_log_contains(own: object) -> None:
    path = token_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path)).returncode == 0
    for without in (ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="1" * 64), ask(RAY_AUTH_MODE="disabled")):
        assert without.returncode == 1
        assert "nauthenticated" in without.stderr or "nauthorized" in without.stderr
    token = path.read_text()
    assert len(token) == 64
    for process in [psutil.Process(), *below()]:
        assert token not in " ".join([*command(process), *environment(process).values()])
    session = Path(os.path.realpath("/tmp/ray/session_latest"))
    files = [file for file in session.rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if token.encode() in file.read_bytes()]


def test_workers_and_their_processes_do_not_import_from_the_working_directory(own: object) -> None:
    import ray

    @ray.remote(num_cpus=0)
    def paths() -> list[str]:
        import subprocess

        # As multiprocessing starts a process, before that takes over this one's path.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        code = "import sys; print(*sys.path, '', sep='\\n', end='/')"
        child = subprocess.check_output([sys.executable, *flags, "-c", code], text=True, timeout=60)
        assert not child.startswith("\n"), "it looks for modules in the working directory first"
        return [*sys.path, *child.split("\n")[:-1]]

    assert os.getcwd() not in [os.path.realpath(path) for path in ray.get(paths.remote(), timeout=60)]


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
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    with pytest.raises(RunError) as caught:
        start_ray(1)
    assert str(caught.value).endswith(
        "107 bytes; set RAY_TMPDIR=/tmp, whose path is short; see the logs of its newest session in /elsewhere/ray."
    )


def test_one_that_was_not_up_in_time_is_started_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []
    shutil.copy(shutil.which("sleep") or "", tmp_path / "gcs_server")

    def slow(address: str, **_options: object) -> str:
        starts.append(address)
        if len(starts) == 1:
            subprocess.Popen([str(tmp_path / "gcs_server"), "60"])
            raise Exception("The current node timed out during startup.")
        return "up"

    monkeypatch.setattr(connection, "_init", slow)
    assert connection._init_local({}) == "up"
    assert starts == ["local", "local"]
    assert "gcs_server" not in [child.name() for child in psutil.Process().children()], "nothing watches a dead GCS"


def test_a_cluster_that_does_not_answer_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    with pytest.raises(ConfigError, match=r"ray\.address=127\.0\.0\.1:1: no Ray cluster answers there"):
        join_ray("127.0.0.1:1")
    with pytest.raises(
        ConfigError, match=r"ray\.address=10\.0\.0\.1:six: it is not host:port; give auto, host:port or"
    ):
        join_ray("10.0.0.1:six")
    monkeypatch.setattr(connection, "_JOIN_S", 0.1)
    monkeypatch.setattr(ray, "init", lambda *_, **__: threading.Event().wait(5))
    with pytest.raises(ConfigError, match=r"ray\.address=auto: no Ray cluster answers there"):
        join_ray("auto")
