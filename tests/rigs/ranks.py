"""Ranks of a trainer, forked from one process that has imported verl, which takes each new process seconds.

Run as a script, it is that process.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

WAIT_S = 600.0  # on a busy machine; alone it takes a tenth


def alone() -> dict[str, str]:
    """The environment without what makes a process a rank."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ranks}


def free_ports(number: int) -> list[int]:
    """Returns ports that only who names them gets: the system gives others to programs that ask for any."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1_000):
        with socket.socket() as server, suppress(OSError):
            server.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == number:
            return found
    raise OSError("no ports are free")


class RankHost:
    """Runs ranks of modules with a function ``be_a_rank``; a context manager, which ends what still runs."""

    def __enter__(self) -> RankHost:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Arrow's allocator has a thread; a process with threads must not be forked.
            env=alone() | {"JE_ARROW_MALLOC_CONF": "background_thread:false"},
            text=True,
            start_new_session=True,
        )
        return self

    def run(self, module: str, jobs: list[tuple[str, Path]], world: int, out: Path) -> list[list[Any]]:
        """Runs each (job, path) on that many processes, one after another; returns results by rank and job."""
        import torch

        ports = map(str, free_ports(len(jobs)))
        words = [word for port, (name, path) in zip(ports, jobs, strict=True) for word in (port, name, str(path))]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([module, world, str(out), words]) + "\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], WAIT_S)[0], "the ranks do not end"
        codes = json.loads(self._process.stdout.readline() or "null")
        assert codes is not None, "the host of the ranks has ended: see its traceback on stderr"
        errors = [(out / f"{rank}.err").read_text() for rank in range(world)]
        assert codes == [0] * world, "\n".join(errors)
        return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(world)]

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def main() -> None:
    # What each rank would import: verl asks transformers for the classes of all models there are.
    from transformers import AutoModelForCausalLM

    from dataflow.engines.verl.process import import_worker

    import_worker("cpu")
    list(AutoModelForCausalLM._model_mapping.keys())
    sys.modules["tests"] = tests = ModuleType("tests")  # a library has installed a package of that name
    tests.__path__ = [str(Path(__file__).parents[1])]
    assert len(os.listdir("/proc/self/task")) == 1, "it has threads, so it must not be forked"
    for line in sys.stdin:
        module, world, out, words = json.loads(line)
        work = importlib.import_module(module).be_a_rank
        pids = []
        for rank in range(world):
            if not (pid := os.fork()):
                become(rank, world, out)
                work(f"{out}/{rank}.pt", *words)
                return  # as any process ends, with its threads and what it has registered for its exit
            pids.append(pid)
        codes: dict[int, int] = {}
        while len(codes) < world:
            pid, status = os.wait()
            if pid in pids:
                codes[pid] = os.waitstatus_to_exitcode(status)
            if codes.get(pid):  # the others would wait for it
                for other in set(pids).difference(codes):
                    os.kill(other, signal.SIGKILL)
        print(json.dumps([codes[pid] for pid in pids]), flush=True)


def become(rank: int, world: int, out: str) -> None:
    """Gives this process the environment of a rank, and a file for its errors."""
    with open(f"{out}/{rank}.err", "wb") as errors, open(os.devnull, "r+b") as nothing:
        for handle, file in enumerate((nothing, nothing, errors)):
            os.dup2(file.fileno(), handle)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in place.items()}


if __name__ == "__main__":
    main()
