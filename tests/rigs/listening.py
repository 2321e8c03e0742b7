"""Which processes of a run listen where, and the table in SECURITY.md."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil

SECURITY = Path(__file__).parents[2] / "SECURITY.md"


class Listener(NamedTuple):
    """A socket that takes connections, or datagrams from anybody."""

    process: str
    address: str
    port: int

    @property
    def loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listeners(root: psutil.Process) -> list[Listener]:
    """Returns the listening sockets of a process and all that it has started."""
    found = []
    for process in [root, *root.children(recursive=True)]:
        try:
            name = named(process.cmdline())
            sockets = process.net_connections("inet")
        except psutil.Error:
            continue  # it has just ended
        for each in sockets:
            stream = each.status == psutil.CONN_LISTEN
            if stream or (each.type.name == "SOCK_DGRAM" and each.laddr and not each.raddr):
                found.append(Listener(name, each.laddr.ip, each.laddr.port))
    return found


def named(command: list[str]) -> str:
    """Returns the name by which SECURITY.md knows a process."""
    text = " ".join(command)
    for name in ("gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent"):
        if Path(text.split()[0]).name == name if text else False:
            return name
    for name in ("dashboard.py", "monitor.py"):
        if any(word.endswith(f"/{name}") for word in command):
            return name
    if text.startswith("ray::"):
        return "ray::*"
    if "dataflow.rewards.judge.server" in text:
        return "judge_server"
    return "dataflow run" if "run" in command else text


def table() -> dict[str, int]:
    """Returns how many ports each process opens at most, as the table of SECURITY.md says."""
    rows = re.findall(r"^\| `([^`]+)` \| (\d+) \|", SECURITY.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: int(ports) for name, ports in rows}


def check(found: list[Listener], pids: int = 1) -> None:
    """Asserts that sockets are on loopback, and that the table names them all.

    Args:
        found: of one process each, or of up to ``pids`` that have one name.
        pids: processes of one name.
    """
    assert not [each for each in found if not each.loopback]
    rows = table()
    for name, ports in Counter(each.process for each in found).items():
        assert name in rows, f"SECURITY.md does not name {name}"
        assert ports <= rows[name] * (pids if name == "ray::*" else 1), (name, ports)
