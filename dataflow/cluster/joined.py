"""Joins a Ray cluster that others have started, and the settings of Ray that a run needs on every cluster."""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import Any

from dataflow.cluster.console import console_kept
from dataflow.errors import ConfigError
from dataflow.system.address import host_and_port
from dataflow.system.children import working_directory_imported
from dataflow.usercode.failures import causes_of


class JoinedRay:
    """A connection of this process to a cluster; a context manager.

    Args:
        address: ``auto``, ``host:port`` or ``ray://host:port``.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def open(self) -> None:
        """Connects.

        Raises:
            ConfigError: it is not an address, no cluster answers, or it refuses this process.
        """
        place = _place(self._address)
        options = connecting(self._address)
        import ray

        try:
            with console_kept():
                if place is not None:  # Ray itself retries for minutes
                    socket.create_connection(place, timeout=5.0).close()
                ray.init(address=self._address, **options)
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            ray.shutdown()
            raise ConfigError(f"ray.address={self._address}: {_why(error)}") from error

    def close(self) -> None:
        """Disconnects; may be called twice."""
        import ray

        ray.shutdown()

    def __enter__(self) -> JoinedRay:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def running() -> bool:
    """Returns whether this process is connected to a Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def own_address() -> str:
    """Returns the address by which other nodes of the cluster reach this one; Ray must be running."""
    import ray

    return str(ray.util.get_node_ip_address())


def connecting(address: str | None) -> dict[str, Any]:
    """Sets the environment variables of Ray that a run needs; returns the arguments of ``ray.init``.

    Args:
        address: of the cluster; None for a local one.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Otherwise Ray prints a traceback for each value of a dead service that is not awaited.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    logging.getLogger("ray").setLevel(logging.ERROR)
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
