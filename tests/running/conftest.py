"""Fixtures of the tests of a run's files."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out waiting for the disk: only a crash of the machine loses what a process wrote."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
