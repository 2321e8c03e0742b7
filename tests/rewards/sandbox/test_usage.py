"""What a program uses: its time."""

from __future__ import annotations

import os

import pytest

from dataflow.rewards.sandbox.jail import usage

OPTIONS = {"timeout": 2.0, "latest": 20.0}


@pytest.mark.parametrize(
    ("spent", "used", "waited", "late"),
    [
        (2.1, 0.1, 0.0, True),  # it sleeps
        (2.1, 0.1, 1.9, False),  # it had a core for a tenth of a second
        (2.1, 0.1, 0.05, True),
        (9.0, 1.9, 7.1, False),
        (9.0, 2.0, 7.1, True),  # with threads that wait for each other's core
        (20.1, 0.1, 20.0, True),
    ],
)
def test_seconds_in_which_others_had_the_cores_do_not_count(
    monkeypatch: pytest.MonkeyPatch, spent: float, used: float, waited: float, late: bool
) -> None:
    ticks = round(used * os.sysconf("SC_CLK_TCK"))
    monkeypatch.setattr(usage, "descendants", lambda _alone: [1, 2])
    monkeypatch.setattr(usage, "stat", lambda pid: [b"0"] * 11 + [b"%d" % (ticks if pid == 1 else 0)] + [b"0"] * 11)
    monkeypatch.setattr(usage, "waited", lambda _pids: waited)
    assert usage.late(OPTIONS, True, spent) is late


def test_what_a_process_has_waited_for_a_core_is_measured_or_zero() -> None:
    assert usage.waited([os.getpid()]) >= usage.waited([]) == 0
    assert usage.waited([2**22 + 1]) == 0  # there is none of this number
