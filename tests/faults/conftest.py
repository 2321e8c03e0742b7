"""One misbehaving judge for all tests that do not kill it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.rig.server import FaultServer


@pytest.fixture(scope="session")
def one_server() -> Iterator[FaultServer]:
    with FaultServer() as running:
        yield running


@pytest.fixture
def server(one_server: FaultServer) -> Iterator[FaultServer]:
    """It behaves, until the test says otherwise."""
    one_server.behave()
    yield one_server
    one_server.behave()
