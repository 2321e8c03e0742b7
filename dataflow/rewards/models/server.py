"""The servers of reward models: ``vllm serve``, and ``vllm-router`` in front of several, as child processes.

A :class:`ModelServer` is a service that the run's executor hosts like its others: on Ray in an actor, which has the
server's GPUs, and inline in the run's own process. The run's process has the routers.
"""

from __future__ import annotations

import asyncio
import json
import os
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
from dataflow.system.children import command
from dataflow.system.http import short
from dataflow.system.loopback import ADDRESS
from dataflow.system.serving import Child, Port

_AGAIN_S = 0.5
"""Seconds between two tries to reach a server: nothing says here when it listens again."""


def router_command(urls: Sequence[str], metrics_port: int, policy: str) -> list[str]:
    """Returns the command line of a router, without the address where it listens.

    It neither retries, which the agent does, nor counts failures: a server is left out while it does not answer
    ``GET /health``.
    """
    options = {
        "prometheus-port": metrics_port,
        "policy": policy if len(urls) > 1 else "round_robin",  # with one server, as Ray may place it, nothing else runs
        "health-check-interval-secs": 1,
        "health-failure-threshold": 1,
        "health-success-threshold": 1,
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
    """Returns the environment variables of a server; those that the user has set stay as they are."""
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


class ModelServer:
    """A server of a reward model, as a service of the run: started when it is built.

    Args:
        log: file to which its output is appended.
        port: on which it listens; None chooses one, at the address of this node of a cluster.
        threads: CPU threads of a server on a CPU.
        sleeps: whether it shares its GPUs; it then sleeps when it is built.
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
        address = ADDRESS
        if port is None:
            import ray

            address = ray.util.get_node_ip_address()
        variables = server_environment(device, threads, sleeps)
        self._child = Child(words, Port(address, port or 0), Path(log), variables, start_s, what)
        self._child.start()
        if sleeps:  # before trainer and engine take the memory of its GPUs: vLLM measures what is free
            self._child.wait_ready()
            _set_asleep(self._child.url, True, start_s, what)

    async def ready(self) -> str:
        """Waits until it answers; returns its URL. Raises as :meth:`Child.wait_ready` does."""
        await asyncio.to_thread(self._child.wait_ready)
        return self._child.url

    async def ended(self) -> str:
        """Waits until it has ended; returns why, as :meth:`Child.ended`."""
        return await self._child.ended()

    async def restart(self) -> None:
        """Starts it again, after its end."""
        await self._child.restart()

    async def close(self) -> None:
        """Ends it."""
        await asyncio.to_thread(self._child.close)


@dataclass(frozen=True)
class Sleeper:
    """The servers of a reward model that shares its GPUs with trainer and engine.

    A server may take ``limit_s`` seconds, a restart included.
    """

    what: str
    urls: tuple[str, ...]
    limit_s: float

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Loads the model onto its GPUs, and frees their memory at the end."""
        await asyncio.gather(*(self._set(url, False) for url in self.urls))
        yield
        await asyncio.gather(*(self._set(url, True) for url in self.urls))

    async def _set(self, url: str, asleep: bool) -> None:
        """Puts a server to sleep, or wakes it; one that does not listen may be starting again, and is awaited."""
        end = time.monotonic() + self.limit_s
        while True:
            try:
                return await asyncio.to_thread(_set_asleep, url, asleep, self.limit_s, self.what)
            except (OSError, HTTPException) as error:
                if time.monotonic() > end:
                    raise RunError(
                        f"{self.what}: server {root_of(url)} does not answer within {self.limit_s:g} s ({error}); see "
                        "its log in servers/ of the run."
                    ) from error
            await asyncio.sleep(_AGAIN_S)


def _set_asleep(url: str, asleep: bool, limit_s: float, what: str) -> None:
    root, answer = root_of(url), ""
    try:
        for method, call in (("POST", "sleep?level=1" if asleep else "wake_up"), ("GET", "is_sleeping")):
            request = urllib.request.Request(f"{root}/{call}", method=method)
            with urllib.request.urlopen(request, timeout=limit_s) as reply:
                answer = str(reply.read(1000), errors="replace")
    except urllib.error.HTTPError as error:
        answer = f"{error.filename} answered {error.code}: {short(str(error.read(1000), errors='replace'))}"
    if f'"is_sleeping":{str(asleep).lower()}' not in answer.replace(" ", ""):
        raise RunError(
            f"{what}: server {root} does not {'sleep' if asleep else 'wake up'} ({short(answer)}); see its log, give "
            "it less of the GPU's memory (gpu_memory), or give placement=own. A server elsewhere needs "
            "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1."
        )
