"""Addresses of this machine beside 127.0.0.1, as nodes of a cluster have them: of IPv4, and of IPv6 where it has it."""

from __future__ import annotations

import socket

import pytest


def _ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


IPV6 = pytest.param("::1", marks=pytest.mark.skipif(not _ipv6(), reason="this machine has no IPv6"))
OTHERS = ["127.0.0.2", IPV6]
