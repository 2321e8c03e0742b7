"""Warnings of an actor's process are sent with the next report of a task and logged by the run."""

from __future__ import annotations

import pytest
from loguru import logger

from dataflow.executors.ray.logs import KeptLines, log_lines
from tests.rigs.logs import logged


def test_warnings_are_taken_once_counted_and_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "plain-a7c19e-key")
    kept = KeptLines()
    number = logger.add(kept, level="WARNING")
    try:
        logger.info("all is well")
        logger.warning("failed with {}", "{braces} plain-a7c19e-key")
        logger.error("worse")
        assert kept.take() == (("WARNING", "failed with {braces} ***"), ("ERROR", "worse"))
        assert kept.take() == ()
        for at in range(1_000):
            logger.warning("number {}", at)
    finally:
        logger.remove(number)
    lines = kept.take()
    assert lines[0] == ("WARNING", "number 0")
    assert lines[-1] == ("WARNING", f"{1_000 - len(lines) + 1} further warnings are in Ray's logs.")


def test_they_are_logged_as_they_are() -> None:
    with logged() as said:
        log_lines([("WARNING", "of {braces}"), ("ERROR", "worse")])
    assert said == ["of {braces}", "worse"]
