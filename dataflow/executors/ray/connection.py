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
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from dataflow.errors import ConfigError, RunError
from dataflow.system.loopback import ADDRESS, RAY_ON_LOOPBACK, ray_stays_on_loopback
from dataflow.system.secrets import keep_secret
from dataflow.system.supervisor import VITAL, report

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


_begun: Future[None] | None = None
"""The start of a Ray for which nothing has waited yet."""


def begin_ray(num_cpus: int) -> None:
    """Begins to start a Ray on this machine with so many CPUs; :func:`start_ray` waits for it."""
    global _begun
    ray_stays_on_loopback()
    _import_ray()  # whole, before other code of this thread looks at it
    _begun = _in_thread(partial(_start, num_cpus))


def drop_ray() -> None:
    """Ends a Ray that was begun for a run that cannot start."""
    global _begun
    begun, _begun = _begun, None
    if begun is not None and begun.exception() is None:
        import ray

        report(ray="closing")
        ray.shutdown()


def start_ray(num_cpus: int) -> None:
    """Starts a Ray on this machine, with ``num_cpus`` unless it was begun before, and connects this process to it.

    ``ray.shutdown`` ends it. Raises a ConfigError if Ray was imported before: it would listen on every interface.
    """
    global _begun
    if _begun is None:
        begin_ray(num_cpus)
    begun, _begun = _begun, None
    assert begun is not None
    begun.result()


def _start(num_cpus: int) -> None:
    """Starts a Ray and reports its processes; raises as :func:`start_ray`."""
    # One token for all runs of a process, as Ray reads it once; other users cannot read this process's environment.
    os.environ.pop("RAY_AUTH_MODE", None)  # a new Ray requires a token unless this says otherwise
    keep_secret(os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32)))
    try:
        context = _init(
            "local", num_cpus=num_cpus, _node_ip_address=ADDRESS, include_dashboard=False, _system_config=_SYSTEM
        )
    except Exception as error:
        text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise RunError(
            f"Ray does not start on this machine: {text}; its logs are in /tmp/ray, or RAY_TMPDIR."
        ) from error
    import psutil
    import ray

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
    """Connects this process to the cluster at ``auto`` or ``host:port``."""
    try:
        place = urlsplit(f"//{address}")
        if place.path:  # a remote client's address, ray://HOST:PORT: it is on no node of the cluster
            raise ValueError("it is neither auto nor host:port")
        if place.port is not None:  # Ray itself retries for minutes
            socket.create_connection((place.hostname or "", place.port), timeout=5.0).close()
        _in_thread(partial(_init, address)).result(_JOIN_S)
    except (OSError, ValueError) as error:  # a time-out is an OSError
        raise ConfigError(
            f"ray.address={address}: no Ray cluster answers there ({str(error) or 'in time'}); start one with 'ray "
            "start --head', open its ports to this machine (docs/cluster.md), or leave ray.address out."
        ) from error
    except Exception as error:
        message = " ".join(str(error).split()).rstrip(".")[:300]
        raise ConfigError(
            f"ray.address={address}: this process cannot join the cluster ({message}); give all nodes the same Python "
            "environment, and this process their token (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH)."
        ) from error


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
    return _begun is None and ray is not None and bool(ray.is_initialized())


def own_address() -> str:
    """Returns the address by which other nodes of the cluster reach this one; Ray must be running."""
    import ray

    return str(ray.util.get_node_ip_address())


def _import_ray() -> Any:
    """Returns the module, after variables are set which it and its processes read."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Otherwise Ray prints a traceback for each value of a dead service that is not awaited.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    import ray

    return ray


def _init(address: str, **options: Any) -> Any:
    ray = _import_ray()
    logging.getLogger("ray").setLevel(logging.ERROR)  # its import sets another level
    options |= {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": False}
    try:
        return ray.init(address, **options)
    except BaseException:
        ray.shutdown()
        raise


def _in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Calls in a thread of its own: in the main one ``ray.init`` would replace the handler of SIGTERM.

    The thread stays until this process ends: the kernel ends the processes of a Ray with the thread that started them.
    """
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=run, name="ray", daemon=True).start()
    return made
