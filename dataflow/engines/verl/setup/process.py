"""Prepares a process to train with verl: imports verl quietly, and joins the process group."""

from __future__ import annotations

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

from dataflow.system.loopback import ADDRESS, NODE_ADDRESS, is_loopback, stay_on

if TYPE_CHECKING:
    from verl.workers.engine_workers import TrainingWorker


def import_worker(device: str) -> type[TrainingWorker]:
    """Imports verl's TrainingWorker, for the CPU with the platform shim, and without vLLM.

    verl would import vLLM for an optional weight transport, which takes seconds and changes the process's threads and
    garbage collector. verl works without vLLM as well.
    """
    absent = "vllm" not in sys.modules
    if absent:
        sys.modules["vllm"] = None  # type: ignore[assignment]
    try:
        if device == "cpu":
            from dataflow.engines.verl.setup import cpu as verl_cpu

            verl_cpu.install()
        from verl.workers.engine_workers import TrainingWorker
    finally:
        if absent:
            del sys.modules["vllm"]
    return TrainingWorker


def join(device: str) -> bool:
    """Joins the process group that the environment describes; returns False if the process is in one already."""
    if dist.is_initialized():
        return False
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if alone:
        # verl's worker reads all of them, although a single process connects to no other.
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": "0",
        }.items():
            os.environ.setdefault(name, value)
    own = os.environ.get(NODE_ADDRESS, os.environ["MASTER_ADDR"])
    known = NODE_ADDRESS in os.environ or is_loopback(own)
    if known:
        stay_on(own)
    backend = "gloo"
    if device == "cuda":
        # Ray shows each worker only its own GPU; elsewhere the local rank picks one.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif known and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):  # torchrun provides a store
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=_store(rank, world), rank=rank, world_size=world)
    else:
        dist.init_process_group(backend)
    return True


def _store(rank: int, world: int) -> dist.Store:
    """Returns the store where the ranks meet; torch's own would listen on every interface."""
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
    handlers, level = root.handlers[:], root.level
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
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
        if bars:
            transformers_logging.enable_progress_bar()
