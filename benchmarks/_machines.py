"""Several machines on this one: network namespaces with an address, shared memory and files of their own.

A machine is a network namespace behind a bridge, or on a network with a delay (:mod:`_delay`), and a mount namespace
with its own ``/dev/shm``, ``/tmp/ray`` and directories that its processes are to see empty. What is not hidden is a
disk that all machines share. It takes root.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from _delay import DelayedNetwork

PORT = 6379
_NETWORK = "10.231.7"
_HEALTH = '{"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}'


def why_not() -> str:
    """Returns why this system cannot have such machines; "" if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces take root, on Linux"
    if missing := [name for name in ("ip", "unshare", "nsenter", "mount") if shutil.which(name) is None]:
        return f"there is no command {missing[0]} (iproute2, util-linux)"
    name = f"dfprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this system allows no network namespaces (a container without CAP_SYS_ADMIN)"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Machine:
    """One machine.

    Args:
        number: from 0.
        bridge: that it is connected to, with which its names begin.
        wired: whether it is connected; else :class:`~_delay.DelayedNetwork` does that.
        hidden: directories that are empty on it.

    Attributes:
        address: of it.
        space: name of its namespace.
    """

    def __init__(self, number: int, bridge: str, wired: bool, hidden: Sequence[Path] = ()) -> None:
        self.address = f"{_NETWORK}.{number + 1}"
        self.space, self._wire = f"{bridge}m{number}", f"{bridge}w{number}"
        _ip("netns", "add", self.space)
        _ip("-n", self.space, "link", "set", "lo", "up")
        if wired:
            _ip("link", "add", self._wire, "type", "veth", "peer", "name", "eth0", "netns", self.space)
            _ip("link", "set", self._wire, "master", bridge, "up")
            _ip("-n", self.space, "addr", "add", f"{self.address}/24", "dev", "eth0")
            _ip("-n", self.space, "link", "set", "eth0", "up")
        Path("/tmp/ray").mkdir(exist_ok=True)
        places = ["/dev/shm", "/tmp/ray", *map(str, hidden)]
        mounts = "".join(f"mount -t tmpfs none '{place}' && " for place in places)
        script = f"{mounts} echo up && exec sleep infinity"
        self._holder = subprocess.Popen(
            ["ip", "netns", "exec", self.space, "unshare", "--mount", "sh", "-c", script], stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"up\n":
            raise RuntimeError(f"machine {number} does not start")

    def start(self, words: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """Starts a program on it."""
        inside = ["nsenter", "-t", str(self._holder.pid), "-m", "-n", *words]
        return subprocess.Popen(inside, text=True, **options)  # type: ignore[call-overload, no-any-return]

    def pids(self) -> list[int]:
        """Ids of its processes."""
        said = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True).stdout
        return [int(word) for word in said.split()]

    def unplug(self) -> None:
        """Cuts its network; its processes live on."""
        _ip("link", "set", self._wire, "down")

    def plug(self) -> None:
        """Connects its network again."""
        _ip("link", "set", self._wire, "up")

    def kill(self) -> None:
        """Ends all its processes at once, as if its power failed."""
        self._kill(keep=self._holder.pid)

    def _kill(self, keep: int) -> None:
        for _ in range(100):
            if not (pids := [pid for pid in self.pids() if pid != keep]):
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def close(self) -> None:
        """Ends it."""
        self._kill(keep=-1)
        self._holder.wait()
        subprocess.run(["ip", "netns", "del", self.space], capture_output=True)
        subprocess.run(["ip", "link", "del", self._wire], capture_output=True)


class Machines:
    """A Ray cluster of several machines, the first of which is its head; a context manager.

    Args:
        labels: of each machine.
        cpus: of each, for Ray.
        hidden: directories that are empty on all but the first machine.
        delay_s: of each packet between two of them, one way; such machines cannot be unplugged.
    """

    def __init__(
        self, labels: Sequence[Mapping[str, str]], cpus: int = 1, hidden: Sequence[Path] = (), delay_s: float = 0.0
    ) -> None:
        self._labels, self._cpus, self._hidden, self._delay_s = labels, cpus, hidden, delay_s
        self._bridge = f"df{os.getpid() % 100000}"
        self._stack = contextlib.ExitStack()
        self.machines: list[Machine] = []
        os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)  # of a Ray on loopback: other machines could not join
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        """Variables of the processes that join the cluster."""

    @property
    def address(self) -> str:
        """The address of the cluster."""
        return f"{self.machines[0].address}:{PORT}"

    def __enter__(self) -> Machines:
        with self._stack:
            _ip("link", "add", self._bridge, "type", "bridge")
            self._stack.callback(_ip, "link", "del", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number in range(len(self._labels)):
                machine = Machine(number, self._bridge, not self._delay_s, self._hidden if number else ())
                self._stack.callback(machine.close)
                self.machines.append(machine)
            if self._delay_s:
                addresses = {machine.space: machine.address for machine in self.machines}
                self._stack.enter_context(DelayedNetwork(self._delay_s, addresses))
            for number in range(len(self._labels)):
                self.join(number)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def join(self, number: int) -> None:
        """Starts Ray on a machine, again if it has lost all its processes."""
        machine, labels, head = self.machines[number], self._labels[number], number == 0
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={machine.address}"]
        words += [f"--num-cpus={self._cpus}", "--object-store-memory=150000000", "--disable-usage-stats"]
        if labels:
            words.append("--labels=" + ",".join(f"{name}={value}" for name, value in labels.items()))
        if head:
            words += ["--head", f"--port={PORT}", "--include-dashboard=false", f"--system-config={_HEALTH}"]
        else:
            words.append(f"--address={self.address}")
        started = machine.start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.environment)
        said, _ = started.communicate(timeout=120)
        if started.returncode:
            raise RuntimeError(f"Ray does not start on {machine.address}: {said}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
