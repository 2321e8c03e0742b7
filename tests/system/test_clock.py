"""The system's clock is set during a run: durations stay the same, and no time runs backwards."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataflow.system import clock
from dataflow.system.http import wait_asked

DAY = 86_400.0
JUMPS = pytest.mark.parametrize("jump_s", [-DAY, None], ids=["backwards", "to and fro"])
LONG = 3_600.0
"""No test takes this long, and every jump is longer."""


@pytest.fixture
def jump(jump_s: float | None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sets the system's clock, once it is called: by a day, or by a day to and fro at each reading."""
    real = time.time

    def offsets() -> Iterator[float]:
        while True:
            yield from (DAY, -DAY) if jump_s is None else (jump_s,)

    def jump() -> None:
        some = offsets()
        monkeypatch.setattr(time, "time", lambda: real() + next(some))

    return jump


@JUMPS
def test_the_clock_goes_on_evenly(jump: Callable[[], None]) -> None:
    before = clock.now()
    assert abs(before - time.time()) < LONG, "it is unix time"
    jump()
    times = [before, *(clock.now() for _ in range(9))]
    assert times == sorted(times)
    assert times[-1] - before < LONG


@JUMPS
def test_a_date_in_retry_after_counts_from_the_servers_clock(jump: Callable[[], None]) -> None:
    at = time.time()
    date, later = email.utils.formatdate(at, usegmt=True), email.utils.formatdate(at + 60, usegmt=True)
    jump()
    assert wait_asked(later, date) == 60
    assert wait_asked(date, later) == 0


STAMPS = {"system/clock.py", "rewards/ledger.py", "system/http.py", "rewards/judge/server.py"}
"""Files that read the system's clock: one to anchor ours, the others for a stamp or another machine's date."""


def test_no_other_file_reads_the_systems_clock() -> None:
    package = Path(clock.__file__).parents[1]
    reads = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.(now|utcnow|today)\b|from time import .*\btime\b")
    found = {str(f.relative_to(package)) for f in package.rglob("*.py") if reads.search(f.read_text())}
    assert found <= STAMPS, "durations come from dataflow.system.clock, the loop's clock or perf_counter"
