"""The Ray of a run: one that it starts on this machine, or a cluster that others have started and it joins.

A Ray of its own listens on loopback alone and requires a token. Only what ``ray.init`` documents is used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from loguru import logger

from dataflow.errors import ConfigError, RunError
from dataflow.system.address import host_and_port
from dataflow.system.children import safe_path, working_directory_imported
from dataflow.system.loopback import ADDRESS, RAY_ON_LOOPBACK, ray_stays_on_loopback
from dataflow.system.secrets import keep_secret
from dataflow.system.supervisor import VITAL, report
from dataflow.usercode.failures import causes_of

if TYPE_CHECKING:
    import psutil

_SYSTEM = {
    "enable_metrics_collection": False,
    # The history of tasks is for the dashboard. Recording it delays a task by up to 0.4 ms.
    "task_events_report_interval_ms": 0,
    # By default Ray's workers give way to all other programs (a niceness of 15), also to the process that plans for
    # policy=auto, which is to give way to them.
    "worker_niceness": 0,
}
"""Settings of all processes of a Ray of the run's own."""

_JOIN_S = 60.0
"""Seconds in which a cluster has to answer; Ray itself retries for minutes, or for ever if its token is another one."""

_token: Any = None


def start_ray(num_cpus: int) -> None:
    """Starts a Ray on this machine and connects this process to it; ``ray.shutdown`` ends it.

    Args:
        num_cpus: CPUs that it has.

    Raises:
        ConfigError: Ray was imported before, and would listen on every network interface.
        RunError: it does not start.
    """
    ray_stays_on_loopback()
    # Ray requires a token unless a variable says otherwise, and prefers one that is in the environment itself.
    os.environ.pop("RAY_AUTH_MODE", None)
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ["RAY_AUTH_TOKEN_PATH"] = _token_path()
    options = {"num_cpus": num_cpus, "_node_ip_address": ADDRESS, "include_dashboard": False, "_system_config": _SYSTEM}
    options |= _options()
    import psutil
    import ray

    try:
        with safe_path():
            context = _init_local(options)
    except Exception as error:
        text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        fix = "; set RAY_TMPDIR=/tmp, whose path is short" if "AF_UNIX path length" in text else ""
        temporary = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        raise RunError(
            f"Ray does not start on this machine: {text}{fix}; see the logs of its newest session in {temporary}/ray."
        ) from error
    if own_address() != ADDRESS:
        ray.shutdown()
        raise ConfigError(
            f"this process had imported Ray (or verl, which does) without {'='.join(RAY_ON_LOOPBACK)} in its "
            "environment, so that Ray would listen on every network interface; set that variable, or import Ray "
            "after the run has begun."
        )
    report(logs=os.path.join(context.address_info["session_dir"], "logs"))
    for child in psutil.Process().children():
        if (name := child.name()) in VITAL:
            report(ray="started", daemon=[name, child.pid])


def join_ray(address: str) -> None:
    """Connects this process to a cluster; ``ray.shutdown`` disconnects it.

    Args:
        address: ``auto``, ``host:port`` or ``ray://host:port``.

    Raises:
        ConfigError: it is not an address, no cluster answers, or it refuses this process.
    """
    place = _place(address)
    options = _options(address)
    import ray

    try:
        if place is not None:  # Ray itself retries for minutes
            socket.create_connection(place, timeout=5.0).close()
        _init(address, _JOIN_S, **options)
    except TimeoutError as error:  # it is still trying, and could not be shut down
        raise ConfigError(f"ray.address={address}: {_why(error)}") from error
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        ray.shutdown()
        raise ConfigError(f"ray.address={address}: {_why(error)}") from error


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """Keeps this process connected to a cluster; see :func:`join_ray`."""
    import ray

    join_ray(address)
    try:
        yield
    finally:
        ray.shutdown()


def running() -> bool:
    """Returns whether this process is connected to a Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def own_address() -> str:
    """Returns the address by which other nodes of the cluster reach this one; Ray must be running."""
    import ray

    return str(ray.util.get_node_ip_address())


def _init_local(options: dict[str, Any]) -> Any:
    """Starts Ray; once more if it was not up after the 30 s that it allows itself, as on a machine that is busy."""
    import psutil
    import ray

    before = set(psutil.Process().children())
    try:
        return _init("local", **options)
    except Exception as error:
        ray.shutdown()
        if "timed out during startup" not in str(error):
            raise
    logger.warning("Ray was not up after 30 s; starting it once more. Is the machine busy?")
    left = [child for child in set(psutil.Process().children()) - before if _is_rays(child)]
    for child in left:
        child.kill()
    psutil.wait_procs(left, timeout=10)  # else a dead GCS would be taken for that of the second start
    try:
        return _init("local", **options)
    except Exception:
        ray.shutdown()
        raise


def _is_rays(child: psutil.Process) -> bool:
    """Returns whether a child process is one of Ray's, also one that has ended."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return child.name() in VITAL or any("/ray/" in part for part in child.cmdline()[:3])
    return False


def _init(address: str, timeout_s: float | None = None, **options: Any) -> Any:
    """Calls ``ray.init`` in a thread of its own: in the main one it would replace the handler of SIGTERM.

    The thread stays until this process ends: the kernel ends the processes of a Ray with the thread that started them.
    """
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)  # its import sets another level
    started: Future[Any] = Future()

    def start() -> None:
        try:
            started.set_result(ray.init(address, **options))
        except BaseException as error:
            started.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=start, name="ray", daemon=True).start()
    return started.result(timeout_s)


def _token_path() -> str:
    """Returns the path of a file with a token that this user alone can read.

    One for all runs of a process, as Ray reads it once. Processes get its path: no environment and no command contains
    the token itself.
    """
    global _token
    if _token is None:
        _token = tempfile.NamedTemporaryFile("w", prefix="dataflow-ray-token-")  # noqa: SIM115
        keep_secret(token := secrets.token_hex(32))
        _token.write(token)
        _token.flush()
    report(temporary=_token.name)
    return str(_token.name)


def _options(address: str | None = None) -> dict[str, Any]:
    """Sets variables that a run needs in Ray's processes; returns the arguments of ``ray.init`` for every Ray."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Otherwise Ray prints a traceback for each value of a dead service that is not awaited.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": False}
    if "://" not in (address or ""):  # for a remote client, the server creates the job
        options["job_config"] = _job()
    return options


def _job() -> Any:
    """Returns Ray's job settings: workers import from the working directory only if this process does."""
    from ray.job_config import JobConfig

    # A submitted job brings its own working directory, which Ray unpacks.
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ or "RAY_RUNTIME_ENV_HOOK" in os.environ:
        return JobConfig()
    # Ray puts the driver's working directory first on the path of every worker, unless the driver is a remote client.
    return JobConfig(_client_job=True, _py_driver_sys_path=[os.getcwd()] if working_directory_imported() else [])


def _why(error: BaseException) -> str:
    """Returns why a cluster cannot be joined, with the fix."""
    from ray.exceptions import AuthenticationError

    if any(isinstance(each, AuthenticationError) or "InvalidAuthToken" in str(each) for each in causes_of(error)):
        return (
            "the cluster requires a token, and this process has none or another one; set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN_PATH to the file that its nodes use (~/.ray/auth_token)."
        )
    if isinstance(error, OSError | ValueError):
        return (
            "no Ray cluster answers there; start one with 'ray start --head', open its ports to this machine "
            "(docs/cluster.md), or leave ray.address out."
        )
    message = " ".join(str(error).split()).rstrip(".")[:300]  # other versions of Python or Ray
    return f"this process cannot join the cluster ({message}); give all its nodes the same Python environment."


def _place(address: str) -> tuple[str, int] | None:
    """Returns host and port of an address that names them, and is not that of a remote client.

    Raises:
        ConfigError: it does not name them rightly.
    """
    if ":" not in address or "/" in address:
        return None
    try:
        return host_and_port(address)
    except ValueError as error:
        raise ConfigError(f"ray.address={address}: {error}; give auto, host:port or ray://host:port.") from error
