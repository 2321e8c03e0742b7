"""Which network interface gloo and NCCL use."""

from __future__ import annotations

import os
from collections import namedtuple

import psutil
import pytest

from dataflow.system.loopback import stay_on

Address = namedtuple("Address", "address")
CARDS = {
    "lo": [Address("127.0.0.1"), Address("::1")],
    "eth0": [Address("10.0.0.7")],
    "ib0": [Address("192.168.5.7"), Address("fe80::1%ib0")],
}


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: CARDS)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that it is removed at the end
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("address", "name"), [("10.0.0.7", "eth0"), ("192.168.5.7", "ib0"), ("127.0.0.1", "lo")])
def test_they_use_the_interface_of_the_node(address: str, name: str) -> None:
    stay_on(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == name


def test_the_choice_of_the_user_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    stay_on("10.0.0.7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth9"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0"


def test_an_address_of_no_interface_leaves_the_choice_to_them() -> None:
    stay_on("203.0.113.9")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
