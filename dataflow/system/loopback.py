"""Keeps the traffic between the processes of one machine on its loopback interface."""

from __future__ import annotations

import ipaddress
import os
import socket

ADDRESS = "127.0.0.1"
"""Where servers of a run listen."""


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address; of host names only ``localhost`` is."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def stay_on_loopback() -> None:
    """Makes gloo and NCCL listen on the loopback interface only, unless the user has chosen another."""
    names = {name for _index, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):  # Linux, macOS
        if name in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return
