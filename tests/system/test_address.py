"""Addresses: hosts with ports."""

from __future__ import annotations

import pytest

from dataflow.system.address import host_and_port, host_port, is_address

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("host", ["fd00::1", "::1", "10.0.0.1", "node-7.lab"])
def test_a_host_and_its_port_are_read_as_they_are_written(host: str) -> None:
    text = host_port(host, 8000)
    assert host_and_port(text) == (host, 8000)
    assert is_address(f"http://{text}/v1")


@pytest.mark.parametrize("text", ["fd00::1:80", "::1", "[fd00::1]"])
def test_an_address_of_ipv6_needs_brackets(text: str) -> None:
    assert not is_address(f"http://{text}/v1") or text == "[fd00::1]"
    with pytest.raises(ValueError, match=r"an IPv6 address needs brackets, as in \[fd00::1\]:80"):
        host_and_port(text)


@pytest.mark.parametrize("text", ["h", "h:http", "h:123456"])
def test_what_is_no_host_with_a_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="it is not host:port"):
        host_and_port(text)
