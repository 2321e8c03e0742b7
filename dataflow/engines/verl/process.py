"""Prepares a process to train with verl: imports verl quietly, and joins the process group."""

from __future__ import annotations

import functools
import io
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dataflow.system.loopback import ADDRESS, NODE_ADDRESS, stay_on

if TYPE_CHECKING:
    from verl.workers.engine_workers import TrainingWorker

_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESS, "MASTER_PORT": "0"}
"""The environment of a single rank; verl's worker reads all of it."""


@functools.cache
def import_worker(device: str) -> type[TrainingWorker]:
    """Imports verl's TrainingWorker and registers the engines that it lacks.

    verl would import vLLM for an optional weight transport, which takes seconds and changes the process's threads and
    garbage collector; it works without.
    """
    if device == "cpu":
        from dataflow.engines.verl.cpu import install

        install()
    absent = "vllm" not in sys.modules
    if absent:
        sys.modules["vllm"] = None  # type: ignore[assignment]
    try:
        from verl.workers.engine_workers import TrainingWorker

        import dataflow.engines.verl.engines  # noqa: F401 (registers them)
    finally:
        if absent:
            del sys.modules["vllm"]
    return TrainingWorker


def join(device: str) -> bool:
    """Joins the process group that the environment describes; returns False if the process is in one already."""
    if dist.is_initialized():
        return False
    for name, value in _ALONE.items():
        os.environ.setdefault(name, value)
    stay_on(os.environ.get(NODE_ADDRESS, os.environ["MASTER_ADDR"]))
    backend = "gloo"
    if device == "cuda":
        # Ray shows each worker only its own GPU; elsewhere the local rank picks one.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=_store(rank, world), rank=rank, world_size=world)
    return True


def _store(rank: int, world: int) -> dist.Store:
    """Returns the store where the ranks meet; torch's own would listen on every interface."""
    if world == 1:
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        return dist.TCPStore(address, port, world, timeout=dist.default_pg_timeout)
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    fd = socket.create_server((address, port), family=family).detach()  # owned by the store from here on
    return dist.TCPStore(address, port, world, True, dist.default_pg_timeout, master_listen_fd=fd)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses verl's output while it is imported and built, and drops its log handler."""
    from transformers.utils import logging as transformers_logging

    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    root = logging.getLogger()
    handlers, level, verbosity = root.handlers[:], root.level, transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # it reports that a critic's head is new
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
