"""What a test's code logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from loguru import logger


@contextmanager
def logged(level: str = "WARNING") -> Iterator[list[str]]:
    """Collects the messages of the block: its warnings and errors, or those from another level on."""
    messages: list[str] = []
    handler = logger.add(lambda line: messages.append(line.record["message"]), level=level)
    try:
        yield messages
    finally:
        logger.remove(handler)
