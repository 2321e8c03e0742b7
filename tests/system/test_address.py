"""Addresses: hosts with ports."""

from __future__ import annotations

import pytest

from dataflow.system.address import host_port, is_address


@pytest.mark.parametrize("host", ["fd00::1", "::1", "10.0.0.1", "node-7.lab"])
def test_a_host_and_its_port_make_an_address(host: str) -> None:
    assert is_address(f"http://{host_port(host, 8000)}/v1")


@pytest.mark.parametrize("text", ["fd00::1:80", "::1"])
def test_an_address_of_ipv6_needs_brackets(text: str) -> None:
    assert not is_address(f"http://{text}/v1")
