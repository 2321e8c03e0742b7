"""A Ray of one run: it listens on loopback only, asks for a token, and consists of what a run uses.

``ray.init`` would listen on every interface, take the token from a file in the home directory that all runs share, and
start an autoscaler, a log monitor, a dashboard and an agent with an HTTP API. None of these can be left out there, so
the head node is built here from the class and the parameters that ``ray.init`` uses. They are private to Ray, whose
version is pinned; nothing else in the package touches them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from dataflow.errors import RunError
from dataflow.system.children import safe_path
from dataflow.system.loopback import ADDRESS
from dataflow.system.supervisor import report


class LocalRay:
    """The processes of a Ray that this process starts and ends.

    Args:
        num_cpus: that it offers.
    """

    def __init__(self, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self._node: Any = None
        self._token: Any = None

    @property
    def token_path(self) -> str:
        """The file that holds the token, while Ray is up."""
        return str(self._token.name)

    def open(self, **options: Any) -> None:
        """Starts Ray and connects this process to it.

        Args:
            options: further ones of ``ray.init``.

        Raises:
            RunError: it does not start.
        """
        import ray

        # Readable by this user alone. The processes get its path; the token itself is in no environment or command.
        self._token = tempfile.NamedTemporaryFile("w", prefix="dataflow-ray-token-")  # noqa: SIM115
        report(temporary=self._token.name)
        self._token.write(secrets.token_hex(32))
        self._token.flush()
        atexit.register(self.close)
        try:
            with _environment(self._token.name), safe_path():
                self._node = _start_node(self._num_cpus, self._ended)
                ray.init(address=self._node.gcs_address, **options)
                # As after ray.init(address="local"): every ray.shutdown() ends the node, also one in user code.
                ray._private.worker._global_node = self._node
        except Exception as error:
            self.close()
            raise RunError(
                f"Ray does not start on this machine: {str(error).rstrip('.')}; see Ray's logs in "
                "/tmp/ray/session_latest/logs."
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends Ray; may be called twice."""
        import ray

        if self._token is None:
            return
        ray.shutdown()
        if self._node is not None:  # nothing was connected to it
            self._node.kill_all_processes(check_alive=False, allow_graceful=True)
        self._ended()

    def _ended(self) -> None:
        """Forgets a Ray whose processes have ended."""
        atexit.unregister(self.close)
        self._node = None
        if self._token is not None:
            self._token.close()
            self._token = None
            _reread_settings()


@contextlib.contextmanager
def _environment(token_path: str) -> Iterator[None]:
    """Sets what Ray's processes inherit and this one reads, while they start."""
    from ray._private import ray_constants

    # The last is Ray's switch for one machine alone, the default on macOS: without it this process takes 127.0.0.1
    # for the address of its network interface. Ray reads it once, when it is imported.
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": None,
        "RAY_AUTH_TOKEN_PATH": token_path,
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
    """Has Ray look again how it authenticates: it read that when it was imported, or for the Ray before this one."""
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _start_node(num_cpus: int, on_end: Callable[[], None]) -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Head(Node):
        """A head node without the dashboard's server, which Ray starts even if no dashboard is wanted."""

        def __init__(self, parameters: RayParams) -> None:
            try:
                # spawn_reaper: the processes end with this one, however it ends.
                super().__init__(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)
            except BaseException:
                self.kill_all_processes(check_alive=False)
                raise

        def kill_all_processes(self, *args: Any, **options: Any) -> None:
            try:
                super().kill_all_processes(*args, **options)
            finally:
                on_end()

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
                _system_config={"enable_metrics_collection": False},
            )
        )


@contextlib.contextmanager
def _minimal() -> Iterator[None]:
    """Lets Ray find the dashboard's dependencies absent: its agent then starts without its HTTP and gRPC APIs.

    That is how a Ray without the extra ``default`` behaves.
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
