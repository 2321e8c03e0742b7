"""The Ray cluster of a single run: on loopback, protected by a token, without unused services."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dataflow.cluster import local as ray_local
from dataflow.cluster.local import LocalRay
from dataflow.cluster.programs import idle_agent
from dataflow.errors import RunError
from dataflow.executors.ray import RayExecutor
from dataflow.graph import Pipeline
from tests.rigs.listening import Listener, check, listeners
from tests.rigs.processes import below, command, environment, left

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
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayExecutor]:
    """An executor with a running Ray, started in a directory that is on no path."""
    here = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("here"))
    BEFORE.update(listeners(psutil.Process()))
    executor = RayExecutor(num_cpus=1)
    try:
        asyncio.run(executor.open(Pipeline([], inputs=[])))
        yield executor
    finally:
        asyncio.run(executor.close())
        os.chdir(here)


def token_path() -> Path:
    """Returns the file with the token, as Ray's processes know it."""
    (gcs,) = [process for process in below() if any("gcs_server" in word for word in command(process)[:1])]
    return Path(environment(gcs)["RAY_AUTH_TOKEN_PATH"])


def gcs() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def ask(**environment: str) -> subprocess.CompletedProcess[str]:
    """Queries the run's Ray from a process with these environment variables."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return subprocess.run(
        [sys.executable, "-c", ASK, gcs()], env=given | environment, capture_output=True, text=True, timeout=60
    )


def test_it_listens_on_loopback_alone(executor: RayExecutor) -> None:
    found = [each for each in listeners(psutil.Process()) if each not in BEFORE]
    # This process is pytest: it stands for the command.
    check([each._replace(process="dataflow run") if "pytest" in each.process else each for each in found], 4)


def test_it_starts_what_a_run_uses_and_no_more(executor: RayExecutor) -> None:
    commands = [" ".join(command(p)) for p in below()]
    for name in ("gcs_server", "raylet/raylet", "RuntimeEnvAgent"):
        assert any(name in command for command in commands), name
    for name in ("/monitor.py", "/log_monitor.py", "/dashboard.py", "/dashboard/agent.py", "ray::DashboardAgent"):
        assert not any(name in command for command in commands), name


def test_its_workers_give_way_to_other_programs_no_more_than_the_run_itself(executor: RayExecutor) -> None:
    import ray

    asked = ray.remote(num_cpus=0)(lambda: os.nice(0)).remote()
    assert ray.get(asked, timeout=60) == os.nice(0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Ray's own dashboard agent runs")
def test_a_small_process_stands_for_the_dashboards_agent_and_ends_with_ray(executor: RayExecutor) -> None:
    (agent,) = (p for p in below() if any(word.endswith("idle_agent.py") for word in command(p)))
    assert Path(agent.parent().exe()).name == "raylet"
    assert agent.memory_info().rss < 30e6
    assert not agent.net_connections()
    assert agent.num_threads() == 1


def test_the_stand_in_of_an_agent_ends_without_a_raylet(tmp_path: Path) -> None:
    path = Path(idle_agent.__file__)
    ended = subprocess.run([sys.executable, "-I", "-S", path, tmp_path], env={"RAY_NODE_ID": "a"}, timeout=30)
    assert ended.returncode == 0
    assert not list(tmp_path.iterdir())


def test_it_answers_only_who_has_the_token(executor: RayExecutor, tmp_path: Path) -> None:
    path = token_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path)).returncode == 0
    for without in (ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="1" * 64), ask(RAY_AUTH_MODE="disabled")):
        assert without.returncode == 1
        assert "nauthenticated" in without.stderr or "nauthorized" in without.stderr


def test_the_token_is_in_no_environment_command_or_log(executor: RayExecutor) -> None:
    import ray

    token = token_path().read_text()
    assert len(token) == 64
    for process in [psutil.Process(), *below()]:
        assert token not in " ".join([*command(process), *environment(process).values()])
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    files = [file for file in session.rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if token.encode() in file.read_bytes()]


def test_workers_and_their_processes_do_not_import_from_the_working_directory(executor: RayExecutor) -> None:
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


@pytest.mark.parametrize("end", ["close", "shutdown"])
def test_a_second_one_has_another_token_and_nothing_is_left_of_the_first(
    executor: RayExecutor, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Last: it ends the module's. ``ray.shutdown`` ends this Ray as one that ``ray.init`` has started."""
    import ray

    first = token_path().read_text() if ray.is_initialized() else ""  # the case before has closed it
    asyncio.run(executor.close())
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of a cluster that this run does not join")
    before, others = dict(os.environ), below()
    local = LocalRay(1)
    local.open(logging_level="ERROR", log_to_driver=False, configure_logging=False)
    try:
        assert ray.get(ray.remote(num_cpus=0)(lambda: 1).remote(), timeout=60) == 1
        path = local.token_path
        assert Path(path).read_text() != first
        started = [p for p in below() if p not in others and "ray" in " ".join(command(p))]
        if end == "shutdown":
            ray.shutdown()
            assert not Path(path).exists()
    finally:
        local.close()
    local.close()  # no harm
    assert not Path(path).exists()
    assert dict(os.environ) == before
    assert not left(started, timeout=10)


def test_one_that_does_not_start_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(ray_local, "_start_node", broken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    local = LocalRay(1)
    with pytest.raises(RunError, match=r"Ray does not start on this machine: no space left on device; see"):
        local.open()
    assert not list(tmp_path.iterdir()), "the token is removed"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError(), "on this machine: AssertionError; see Ray's logs in /elsewhere/ray/session_latest/logs."),
        (
            OSError("AF_UNIX path length cannot exceed 107 bytes."),
            "107 bytes; set RAY_TMPDIR=/tmp, whose path is short",
        ),
    ],
)
def test_one_that_does_not_start_says_why_and_where_to_look(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(ray_local, "_start_node", broken)
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    with pytest.raises(RunError) as caught:
        LocalRay(1).open()
    assert said in str(caught.value)
