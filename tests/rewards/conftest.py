"""Fixtures of the tests of rewards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loguru import logger


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What is logged from here on, each with its level."""
    lines: list[str] = []
    number = logger.add(lines.append, format="{level} {message}")
    yield lines
    logger.remove(number)
