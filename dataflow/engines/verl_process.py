"""What a process does before it trains with verl: import it without its noise, join the other ranks."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from verl.workers.engine_workers import TrainingWorker


def import_worker(device: str) -> type[TrainingWorker]:
    """Imports verl's TrainingWorker, on the CPU behind the platform shim, and vLLM never.

    verl tries an optional weight transport that imports vLLM, which costs seconds and changes the process's
    threads and garbage collector. An absent vLLM is a case that verl provides for.
    """
    absent = "vllm" not in sys.modules
    if absent:
        sys.modules["vllm"] = None  # type: ignore[assignment]
    try:
        if device == "cpu":
            from dataflow.engines import verl_cpu

            verl_cpu.install()
        from verl.workers.engine_workers import TrainingWorker
    finally:
        if absent:
            del sys.modules["vllm"]
    return TrainingWorker


def join(device: str) -> bool:
    """Joins the process group that the environment names; returns False where the process is in one."""
    if dist.is_initialized():
        return False
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if alone:
        # verl's worker reads all of them, though one process meets nobody at that address.
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }.items():
            os.environ.setdefault(name, value)
    backend = "gloo"
    if device == "cuda":
        # Ray shows each worker only its own GPU; elsewhere the local rank picks one.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    return True


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps off the terminal what verl prints while it is imported and built, and drops its log handler."""
    from transformers.utils import logging as transformers_logging

    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
