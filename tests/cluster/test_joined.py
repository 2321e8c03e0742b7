"""Joining a cluster: the address of it, before Ray is asked."""

from __future__ import annotations

import socket

import pytest

from dataflow.cluster.joined import JoinedRay
from dataflow.errors import ConfigError

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("fd00::1:6379", r"an IPv6 address needs brackets, as in \[fd00::1\]:80; give auto, host:port or ray://"),
        ("10.0.0.1:six", "it is not host:port; give auto, host:port or ray://"),
    ],
)
def test_an_address_that_names_no_port_is_refused(address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^ray\.address={address}: {why}"):
        JoinedRay(address).open()


def test_a_cluster_is_asked_at_its_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(place: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(place)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(ConfigError, match=r"ray\.address=\[fd00::1\]:6379: no Ray cluster answers there"):
        JoinedRay("[fd00::1]:6379").open()
    assert asked == [("fd00::1", 6379)]
