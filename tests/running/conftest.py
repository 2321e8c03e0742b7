"""Fixtures of the tests of runs and of their files."""

from __future__ import annotations

import os

import pytest

from dataflow.running.reporting import pages


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out waiting for the disk: only a crash of the machine loses what a process wrote."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(autouse=True)
def _pages_where_they_are_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws no pages of a finished run but in modules marked ``draws``: they take longer than tiny steps."""
    if request.node.get_closest_marker("draws") is None:
        monkeypatch.setattr(pages, "draw_run", lambda directory: None)
