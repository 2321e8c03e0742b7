"""The system's clock is set during a run: durations stay the same, and no time runs backwards."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from dataflow.system import clock


def test_it_is_unix_time_and_goes_on_evenly_when_the_systems_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = clock.now()
    assert abs(before - time.time()) < 3600
    monkeypatch.setattr(time, "time", lambda: before - 86_400)
    times = [before, *(clock.now() for _ in range(9))]
    assert times == sorted(times)
    assert times[-1] - before < 3600


STAMPS = {"system/clock.py", "rewards/ledger.py", "system/http.py", "rewards/judge/server.py"}
"""Files that read the system's clock: one to anchor ours, the others for a stamp or another machine's date."""


def test_no_other_file_reads_the_systems_clock() -> None:
    package = Path(clock.__file__).parents[1]
    reads = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.(now|utcnow|today)\b|from time import .*\btime\b")
    found = {str(f.relative_to(package)) for f in package.rglob("*.py") if reads.search(f.read_text())}
    assert found <= STAMPS, "durations come from dataflow.system.clock, the loop's clock or perf_counter"
