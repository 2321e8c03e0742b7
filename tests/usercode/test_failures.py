"""Exceptions of user code: a Ctrl-C ends the run, an exit of user code does not, and messages can be written."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dataflow.usercode import failures
from dataflow.usercode.failures import UserExit, contained


async def exits(kind: type[BaseException]) -> None:
    raise kind("5")


def test_an_exit_of_a_task_is_an_error_of_it() -> None:
    with pytest.raises(UserExit, match=r"^SystemExit: 5$"):
        asyncio.run(contained(exits(SystemExit)))


def test_ctrl_c_is_not_contained() -> None:
    with pytest.raises(KeyboardInterrupt):
        contained(exits(KeyboardInterrupt)).send(None)


def test_an_interrupt_is_one_of_the_main_thread() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(failures.is_interrupt(KeyboardInterrupt())))
    thread.start()
    thread.join()
    found.append(failures.is_interrupt(KeyboardInterrupt()))
    assert (found, failures.is_interrupt(SystemExit())) == ([False, True], False)


def test_a_message_can_be_written_whatever_is_in_it() -> None:
    assert failures.message_of(OSError("no file caf\udce9.json")) == "no file caf\\udce9.json"
    assert failures.message_of(ValueError("a\n" * 5000)).endswith("... (10,000 characters)")
    assert len(failures.shortened("x" * 100_000)) < 41_000


def test_what_another_process_can_be_sent() -> None:
    class Local(Exception):
        pass

    class Two(Exception):
        def __init__(self, a: Any, b: Any) -> None:
            super().__init__(a)

    assert failures.pickled_error(ValueError(1)) is not None
    assert not any(map(failures.pickled_error, [Local(), Two(1, 2), StopIteration(), SystemExit()]))
