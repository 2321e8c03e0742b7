"""A process that user code forks does not continue as the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dataflow.usercode.forks import in_one_process


def _returns() -> None:
    os.fork()


def _raises() -> None:
    if os.fork() == 0:
        os.execv("/no/such/program", ["it"])


@pytest.mark.parametrize("fork", [_returns, _raises])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_only_the_first_process_leaves_the_block(tmp_path: Path, fork: Callable[[], None]) -> None:
    left = tmp_path / "left"
    with in_one_process():
        fork()
    with left.open("a") as file:  # by the child as well, if it came so far
        file.write(f"{os.getpid()}\n")
    _pid, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == 1
    assert left.read_text() == f"{os.getpid()}\n"
