"""One server of a reward model: its command line, its process, its log.

Servers of both engines speak vLLM's protocol: GET /health, POST /classify, /pooling and /v1/chat/completions. Each is
started by a guard (:mod:`dataflow.system.guard`), which ends it when the run's process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dataflow.system.address import family_of
from dataflow.system.children import command
from dataflow.system.guard import GRACE_S, LEFT_S
from dataflow.system.health import HANG_S, answers, hangs
from dataflow.system.loopback import ADDRESS
from dataflow.system.secrets import redact

CLOSE_S = GRACE_S + LEFT_S + 1.0
"""Seconds that a server may take to end."""
_CHECK_S = (0.05, 0.5)
"""Seconds between two checks of a server that starts, at first and at most."""
_TAIL = 1 << 18
"""Bytes at the end of a log in which a reason is looked for."""
_ERROR = re.compile(r"\b(?:\w+\.)*(?:\w*(?:Error|Exception|Exit)|error): (?=\S)")
_SECOND = re.compile(r"initialization failed|See root cause|Engine loop is not running|died unexpectedly")
"""Errors that follow from another one."""
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*)?")


def server_command(
    name: str,
    port: int,
    *,
    path: str,
    kind: str,
    engine: str,
    device: str,
    dtype: str,
    host: str = ADDRESS,
    tensor_parallel: int = 1,
    gpu_memory: float = 0.9,
    max_num_seqs: int = 64,
    max_model_len: int | None = None,
    template: str | None = None,
    sleeps: bool = False,
    engine_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """Returns the command line of a server.

    Args:
        name: of the model in requests.
        port: on which it listens.
        device: ``cpu`` or ``cuda``.
        host: address on which it listens.
        sleeps: whether it must be able to free its GPU's memory.
        path, kind, engine, dtype, tensor_parallel, gpu_memory, max_num_seqs, max_model_len, template, engine_kwargs:
            see :class:`~dataflow.config.served.ServedModelConfig`.
    """
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    options: dict[str, Any] = {
        "model": path,
        "served-model-name": name,
        "host": host,
        "port": port,
        "dtype": dtype,
        "max-model-len": max_model_len,
        "max-num-seqs": max_num_seqs,
        "chat-template": template,
    }
    given = {key.replace("_", "-"): value for key, value in (engine_kwargs or {}).items()}
    if engine == "hf":
        options |= {"kind": kind, "device": device}
        return command("dataflow.rewards.models.hf.server", *flags(options | given))
    options |= {
        "runner": None if kind == "chat" else "pooling",
        "tensor-parallel-size": tensor_parallel if tensor_parallel > 1 else None,
        "uvicorn-log-level": "warning",
    }
    if device == "cpu":
        options["enforce-eager"] = True
    else:
        options["gpu-memory-utilization"] = gpu_memory
        options["enable-sleep-mode"] = sleeps or None
    return command("vllm.entrypoints.openai.api_server", *flags(options | given))


def flags(options: Mapping[str, Any]) -> list[str]:
    """Returns options as words of a command line: true and false as --x and --no-x, null left out, others as JSON.

    >>> flags({"runner": "pooling", "enforce-eager": True, "async-scheduling": False, "seed": None, "x": {"a": 1}})
    ['--runner', 'pooling', '--enforce-eager', '--no-async-scheduling', '--x', '{"a": 1}']
    """
    words: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def server_environment(device: str, threads: int = 1, sleeps: bool = False) -> dict[str, str]:
    """Returns the environment variables of a server; those that the user has set stay as they are.

    Args:
        device: ``cpu`` or ``cuda``.
        threads: CPU threads of a server on a CPU.
        sleeps: whether it must be able to free its GPU's memory.
    """
    own = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": ADDRESS,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        own |= {"OMP_NUM_THREADS": str(threads), "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # no worker beside the engine's process that imports vLLM again
    elif sleeps:
        own |= {"VLLM_SERVER_DEV_MODE": "1"}  # offers /sleep and /wake_up, and pages that change the server
    return {**own, **os.environ}


class Port:
    """A free port that no other process gets while this object is open.

    Its socket is bound and does not listen, so that a server that sets SO_REUSEADDR, as all do, may listen there,
    and another one after it.

    Args:
        address: of this machine.
    """

    def __init__(self, address: str = ADDRESS) -> None:
        self._socket = socket.socket(family_of(address), socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Gives the port back."""
        self._socket.close()


class ModelServer:
    """The process of one server.

    Args:
        words: command line.
        port: on which it will listen.
        log: file to which its output is appended.
        environment: all its variables.
        start_s: seconds that it may take to answer.
        on_ready: called by :meth:`wait` when it answers.
        hang_s: seconds without an answer after which it is ended.
        address: on which it will listen.

    Attributes:
        ready: whether it has answered.
        late: whether it was ended because it did not answer in time.
    """

    def __init__(
        self,
        words: Sequence[str],
        port: int,
        log: Path,
        environment: Mapping[str, str],
        start_s: float,
        on_ready: Callable[[], None],
        hang_s: float = HANG_S,
        address: str = ADDRESS,
    ) -> None:
        self.ready = self.late = False
        self._hang_s, self._address = hang_s, address
        self._port, self._log, self._start_s, self._on_ready = port, log, start_s, on_ready
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._offset = output.tell()
            # A session of its own: Ctrl-C reaches only the run, which ends the server after its last request.
            self._process = subprocess.Popen(
                command("dataflow.system.guard", str(os.getpid()), *words),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(environment),
            )

    @property
    def pid(self) -> int:
        """Id of the guard, and of its process group, in which the server is."""
        return self._process.pid

    def wait(self) -> None:
        """Waits until it answers, then until it has ended; ends it if it does not answer in time, or no more."""
        end = time.monotonic() + self._start_s
        pause_s, most_s = _CHECK_S
        while not self.ready:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(pause_s)
                return
            # There is no event to wait for: vLLM says nowhere else that it is ready.
            if answers(self._port, address=self._address):
                self.ready = True
                self._on_ready()
            elif time.monotonic() > end:
                self.late = True
                self.close()
                return
            pause_s = min(2 * pause_s, most_s)
        if hangs(self._process.pid, partial(answers, self._port, self._hang_s, address=self._address), self._hang_s):
            self.late = True
            self.close()
        self._process.wait()

    def close(self) -> None:
        """Ends it with all its processes and waits for them; may be called twice."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # ends the guard
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        # A guard that was killed or stopped has left the server behind; the group has its id until all have ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def killed(self) -> bool:
        """Whether a SIGKILL has ended it, such as that of a system without memory, so that a new one may live."""
        code = self._process.poll() or 0
        return not self.late and (code - 128 == signal.SIGKILL or code == -signal.SIGKILL)

    def reason(self) -> str:
        """Returns why it ended or did not start, from its log and its exit code."""
        if self.late:
            return f"no answer to GET /health within {self._hang_s if self.ready else self._start_s:g} s"
        if self.killed:
            return "killed, or out of memory"
        code = self._process.poll() or 0
        try:
            last_words = reason_in(self._log, self._offset)
        except OSError as error:  # the user has moved or removed it
            return f"exit code {code}; its log cannot be read: {error.strerror}"
        return last_words or f"exit code {code}, and nothing in its log"


def reason_in(log: Path, offset: int = 0) -> str:
    """Returns the last line of a log that names an error, or else its last line; "" if there is none.

    Args:
        log: the file.
        offset: where to begin, in bytes.
    """
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        # A log that is shorter than where it began was cut by the user's rotation: what it has now is new.
        file.seek(max(offset if offset <= size else 0, size - _TAIL))
        text = file.read().decode(errors="replace")
    lines = [line for line in (_PREFIX.sub("", line).strip() for line in text.splitlines()) if line]
    errors = [line for line in lines if _ERROR.search(line)]
    first = [line for line in errors if not _SECOND.search(line)]
    found = (first or errors or lines or [""])[-1]
    return redact(found)[:300].rstrip(".")
