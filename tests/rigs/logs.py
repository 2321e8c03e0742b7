"""What a test's code logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from loguru import logger


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collects the messages of the block's warnings and errors."""
    messages: list[str] = []
    handler = logger.add(lambda line: messages.append(line.record["message"]), level="WARNING")
    try:
        yield messages
    finally:
        logger.remove(handler)
