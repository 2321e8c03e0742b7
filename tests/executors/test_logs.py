"""Warnings of an actor's process are sent with the next report of a task and logged by the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loguru import logger

from dataflow.executors.ray.logs import KeptLines, log_lines


@pytest.fixture
def kept() -> Iterator[KeptLines]:
    lines = KeptLines()
    number = logger.add(lines, level="WARNING")
    yield lines
    logger.remove(number)


def test_warnings_are_taken_once_and_without_secrets(kept: KeptLines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "plain-a7c19e-key")
    logger.info("all is well")
    logger.warning("failed with {}", "{braces} plain-a7c19e-key")
    logger.error("worse")
    assert kept.take() == (("WARNING", "failed with {braces} ***"), ("ERROR", "worse"))
    assert kept.take() == ()


def test_of_very_many_the_first_are_kept_and_the_others_counted(kept: KeptLines) -> None:
    for number in range(1_000):
        logger.warning("number {}", number)
    lines = kept.take()
    assert lines[0] == ("WARNING", "number 0")
    assert lines[-1] == ("WARNING", f"{1_000 - len(lines) + 1} further warnings are in Ray's logs.")
    assert kept.take() == ()


def test_they_are_logged_as_they_are() -> None:
    said: list[str] = []
    number = logger.add(said.append, format="{level} {message}")
    try:
        log_lines([("WARNING", "of {braces}"), ("ERROR", "worse")])
    finally:
        logger.remove(number)
    assert [line.strip() for line in said] == ["WARNING of {braces}", "ERROR worse"]
