"""The Ray cluster of a single run: it listens on loopback only, requires a token, and starts what a run uses.

``ray.init`` would listen on every interface, read the token from a file in the home directory that all runs share, and
start an autoscaler, a log monitor, a dashboard and an agent with an HTTP API. It has no options to leave these out, so
the head node is built here from the class and the parameters that ``ray.init`` uses. They are private to Ray, whose
version is pinned; nothing else in the package uses them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dataflow.cluster.fork_server import ForkServer
from dataflow.cluster.programs import forked_worker, idle_agent
from dataflow.errors import RunError
from dataflow.system.children import safe_path
from dataflow.system.loopback import ADDRESS
from dataflow.system.secrets import keep_secret
from dataflow.system.supervisor import report

INLINE = 1 << 19
"""Largest value, in bytes, that travels in the messages of tasks, not through shared memory.

A task that reads it begins 1 to 4 ms earlier, as nothing waits for Ray's object store; from about a megabyte on, the
copies take longer than that.
"""

_SYSTEM = {
    "enable_metrics_collection": False,
    "max_direct_call_object_size": INLINE,
    # The history of tasks is for the dashboard. Recording it delays a task by up to 0.4 ms.
    "task_events_report_interval_ms": 0,
    # By default Ray's workers give way to all other programs (a niceness of 15), also to the process that plans for
    # policy=auto, which is to give way to them.
    "worker_niceness": 0,
}
"""Settings of all of Ray's processes."""
_AGENT = "--dashboard_agent_command="


_TOO_LONG = "AF_UNIX path length"
"""Ray's words for a temporary directory with a long path."""


class Daemons(dict[str, list[Any]]):
    """The processes of a node by Ray's names, such as ``gcs_server``.

    The supervisor learns of each one when it is started: Ray itself waits up to 30 s for one that dies at once.
    """

    def __setitem__(self, name: str, processes: list[Any]) -> None:
        super().__setitem__(name, processes)
        for started in processes:
            report(ray="started", daemon=[name, started.process.pid])


class LocalRay:
    """A Ray cluster that this process starts and ends.

    Args:
        num_cpus: CPUs of the cluster.
        server: of which its workers are copies; None starts each on its own.
    """

    def __init__(self, num_cpus: int, server: ForkServer | None = None) -> None:
        self._num_cpus = num_cpus
        self._server = server
        self._node: Any = None
        self._token: Any = None

    @property
    def token_path(self) -> str:
        """The path of the file with the token, while Ray is running."""
        return str(self._token.name)

    def open(self, **options: Any) -> None:
        """Starts Ray and connects this process to it.

        Args:
            options: further arguments of ``ray.init``.

        Raises:
            RunError: Ray does not start.
        """
        import ray

        # Readable by this user alone. Processes get its path; no environment or command contains the token itself.
        self._token = tempfile.NamedTemporaryFile("w", prefix="dataflow-ray-token-")  # noqa: SIM115
        report(temporary=self._token.name)
        keep_secret(token := secrets.token_hex(32))
        self._token.write(token)
        self._token.flush()
        atexit.register(self.close)
        try:
            variables = {} if self._server is None else self._server.environment
            with _environment(self._token.name, variables), safe_path():
                self._node = _start_node(self._num_cpus, self._ended, self._server is not None)
                ray.init(address=self._node.gcs_address, **options)
                # As after ray.init(address="local"), so that any ray.shutdown() ends the node, even one in user code.
                ray._private.worker._global_node = self._node
        except Exception as error:
            self.close()
            raise RunError(
                f"Ray does not start on this machine: {_reason(error)}; see Ray's logs in {_logs()}."
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stops Ray; may be called twice."""
        import ray

        if self._token is None:
            return
        ray.shutdown()
        if self._node is not None:  # this process never connected to it
            self._node.kill_all_processes(check_alive=False, allow_graceful=True)
        self._ended()

    def _ended(self) -> None:
        """Removes the token and the settings of a Ray whose processes have ended."""
        atexit.unregister(self.close)
        self._node = None
        if self._token is not None:
            self._token.close()
            self._token = None
            _reread_settings()


@contextlib.contextmanager
def _environment(token_path: str, variables: Mapping[str, str]) -> Iterator[None]:
    """Sets the environment that Ray's processes inherit, and that this one reads, while they start."""
    from ray._private import ray_constants

    # The last restricts Ray to one machine, the default on macOS: otherwise this process replaces 127.0.0.1 by the
    # address of its network interface. Ray reads it once, at import.
    settings: dict[str, str | None] = {
        **variables,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": None,
        "RAY_AUTH_TOKEN_PATH": token_path,
        "RAY_CLIENT_MODE": None,  # of a process that joins a cluster through Ray's client
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
    }
    before = {name: os.environ.get(name) for name in settings}
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    _set(settings)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        _reread_settings()
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _reread_settings() -> None:
    """Makes Ray read its authentication settings again, which it did at import or for an earlier cluster."""
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _start_node(num_cpus: int, on_end: Callable[[], None], copies: bool) -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Head(Node):
        """A head node without the dashboard's server, which Ray starts even without a dashboard."""

        def __init__(self, parameters: RayParams) -> None:
            try:
                # spawn_reaper: the processes end with this one, even if it is killed.
                super().__init__(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)
            except BaseException:
                self.kill_all_processes(check_alive=False)
                raise

        @property
        def all_processes(self) -> Daemons:
            return self._daemons

        @all_processes.setter
        def all_processes(self, processes: dict[str, list[Any]]) -> None:
            self._daemons = Daemons(processes)

        def start_head_processes(self) -> None:
            report(logs=self.get_logs_dir_path())
            super().start_head_processes()

        def kill_all_processes(self, *args: Any, **options: Any) -> None:
            report(ray="closing")
            try:
                super().kill_all_processes(*args, **options)
            finally:
                on_end()

        def start_raylet(self, *args: Any, **options: Any) -> None:
            with _idle_agent(self.get_session_dir_path()):
                super().start_raylet(*args, **options)

        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            """Starts nothing."""

    with _minimal():
        return Head(
            RayParams(
                num_cpus=num_cpus,
                node_ip_address=ADDRESS,
                include_dashboard=False,
                include_log_monitor=False,
                no_monitor=True,
                _system_config=_SYSTEM,
                **({"worker_path": forked_worker.__file__} if copies else {}),
            )
        )


@contextlib.contextmanager
def _idle_agent(session: str) -> Iterator[None]:
    """Replaces the dashboard's agent in the command of a raylet that is started meanwhile, on Linux."""
    from ray._private import services

    started = services.start_ray_process

    def start(command: list[str], *args: Any, **options: Any) -> Any:
        # Isolated and without packages, it takes a tenth of the time to begin.
        agent = shlex.join([sys.executable, "-I", "-S", idle_agent.__file__, session])
        words = [_AGENT + agent if word.startswith(_AGENT) else word for word in command]
        return started(words, *args, **options)

    if sys.platform == "linux":  # elsewhere a process cannot be ended with its parent
        services.start_ray_process = start
    try:
        yield
    finally:
        services.start_ray_process = started


@contextlib.contextmanager
def _minimal() -> Iterator[None]:
    """Hides the dashboard's dependencies, so that Ray's agent starts without its HTTP and gRPC APIs.

    Ray behaves like this if installed without its extra ``default``.
    """
    name = "ray.dashboard.optional_deps"
    before = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


def _reason(error: Exception) -> str:
    """Returns why Ray does not start, in one line, and the fix if it is known."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return f"{text}; set RAY_TMPDIR=/tmp, whose path is short" if _TOO_LONG in text else text


def _logs() -> str:
    return os.path.join(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "session_latest", "logs")
