"""What the processes of one machine say to each other stays on its loopback interface."""

from __future__ import annotations

import ipaddress
import os
import socket

ADDRESS = "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Whether an address is this machine's own; a host name other than ``localhost`` counts as another's."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def stay_on_loopback() -> None:
    """Has gloo and NCCL listen on the loopback interface alone; a user's choice of another stays."""
    names = {name for _index, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):  # Linux, macOS
        if name in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return
