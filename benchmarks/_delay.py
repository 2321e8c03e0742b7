"""A network with a delay between network namespaces, for kernels without ``sch_netem``.

    python benchmarks/_delay.py DELAY_MS NAMESPACE=ADDRESS...

gives each namespace a TUN device ``eth0`` with that address, prints ``up``, and carries each packet from one to the
other after the delay; it ends at the end of its standard input. It takes root, and ``/dev/net/tun``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

_TUN, _NO_INFO, _SET = 0x0001, 0x1000, 0x400454CA  # IFF_TUN, IFF_NO_PI, TUNSETIFF
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_PACKET_BYTES = 60_000
"""Of the largest packet: fewer, larger ones cost this process less."""
_QUEUE = 10_000
"""Packets that a device holds until this process reads them."""


def why_not() -> str:
    """Returns why this system has no such network; "" if it can."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun cannot be opened ({error.strerror}), which carries the packets of a network with a delay"
    return ""


class DelayedNetwork:
    """The process that carries the packets; a context manager.

    Args:
        delay_s: of each packet, one way.
        addresses: by the name of the namespace.
    """

    def __init__(self, delay_s: float, addresses: Mapping[str, str]) -> None:
        names = [f"{name}={address}" for name, address in addresses.items()]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(1000 * delay_s), *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> DelayedNetwork:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"up\n":
            self.__exit__()
            raise RuntimeError("the network with a delay does not start")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def device(namespace: str, address: str) -> int:
    """Makes the device of a namespace; returns its descriptor, which this process can use from its own."""
    library = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(Path("/run/netns", namespace), os.O_RDONLY)
    if library.setns(there, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), f"namespace {namespace} cannot be entered")
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _SET, struct.pack("16sH22x", b"eth0", _TUN | _NO_INFO))
    finally:
        library.setns(home, _NEW_NETWORK)
        os.close(home)
        os.close(there)
    for words in (
        ("addr", "add", f"{address}/24", "dev", "eth0"),
        ("link", "set", "eth0", "mtu", str(_PACKET_BYTES), "txqueuelen", str(_QUEUE), "up"),
    ):
        subprocess.run(["ip", "-n", namespace, *words], check=True)
    return tun


def carry(devices: Mapping[bytes, int], delay_s: float) -> None:
    """Carries packets until the end of standard input.

    Args:
        devices: by address, as packets have it.
        delay_s: of each packet.
    """
    held: deque[tuple[float, int, bytes]] = deque()  # in order of arrival, which is that of their times
    while True:
        left = None if not held else max(0.0, held[0][0] - time.monotonic())
        ready, _, _ = select.select([0, *devices.values()], [], [], left)
        if 0 in ready:
            return
        for source in ready:
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(source, 1 << 16):
                    target = devices.get(packet[16:20])  # of IPv6, and to others: none
                    if packet[0] >> 4 == 4 and target is not None:
                        held.append((time.monotonic() + delay_s, target, packet))
        while held and held[0][0] <= time.monotonic():
            _at, target, packet = held.popleft()
            with contextlib.suppress(OSError):  # its device is down: the packet is lost, as on any network
                os.write(target, packet)


def main(words: list[str]) -> None:
    delay_ms, *given = words
    addresses = dict(each.split("=") for each in given)
    devices = {ip_address(address).packed: device(name, address) for name, address in addresses.items()}
    print("up", flush=True)
    carry(devices, float(delay_ms) / 1000)


if __name__ == "__main__":
    main(sys.argv[1:])
