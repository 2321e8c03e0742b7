"""Signals that end a command: the first one counts, in every phase, and the old handlers are restored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from dataflow.system.stopping import SIGNALS, Stopping


@pytest.fixture
def stopping() -> Iterator[Stopping]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with Stopping() as installed:
        yield installed
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_the_first_signal_interrupts_and_further_ones_do_not(stopping: Stopping) -> None:
    number = signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        send(number)
    for further in SIGNALS:
        send(further)
    assert stopping.received == number
    assert stopping.exit_code == 128 + number


def test_deferred_a_signal_calls_what_is_set_once(stopping: Stopping) -> None:
    called: list[str] = []
    with stopping.deferred():
        stopping.calls(lambda: called.append("stop"))
        send(signal.SIGTERM)
        send(signal.SIGTERM)
    assert called == ["stop"]


def test_a_signal_that_came_before_is_not_forgotten(stopping: Stopping) -> None:
    called: list[str] = []
    with stopping.deferred():
        send(signal.SIGINT)  # while nothing can be cancelled
        stopping.calls(lambda: called.append("stop"))
    assert called == ["stop"]


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopping() as installed:
            send(signal.SIGHUP)
            assert installed.received is None
    finally:
        signal.signal(signal.SIGHUP, before)
