"""Exceptions of user code, whose methods run user code: what they raise is contained, but not a real Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dataflow.usercode import failures
from dataflow.usercode.failures import Contained, UserExit


class Raises(Exception):
    """An exception that raises another whenever it is read."""

    def __init__(self, other: type[BaseException]) -> None:
        super().__init__("unread")
        self.other = other

    def __str__(self) -> str:
        raise self.other

    def __reduce__(self) -> Any:
        raise self.other

    @property
    def __notes__(self) -> Any:
        raise self.other

    @property
    def __traceback__(self) -> Any:  # type: ignore[override]
        raise self.other


def raising(error: BaseException) -> Any:
    raise error


READS: dict[str, Callable[[Raises], Any]] = {
    "readable": failures.readable,
    "attempt": lambda error: failures.attempt(raising, error.other()),
    "message_of": failures.message_of,
    "can_be_traced": failures.can_be_traced,
    "attribute_of": lambda error: failures.attribute_of(error, "__notes__", "none"),
    "pickled_error": failures.pickled_error,
    "contained": lambda error: Contained(exits(error.other)).send(None),
    "contained on its way": lambda error: thrown(error.other),
}
FOUND = {
    "readable": "Raises, which cannot be read",
    "attempt": "(None, KeyboardInterrupt())",
    "message_of": "its __str__ raised KeyboardInterrupt",
    "can_be_traced": "False",
    "attribute_of": "none",
    "pickled_error": "None",
}


async def exits(kind: type[BaseException]) -> None:
    raise kind


async def pauses(kind: type[BaseException]) -> None:
    try:
        await asyncio.sleep(0)
    except ValueError as error:
        raise kind("5") from error


def thrown(kind: type[BaseException]) -> None:
    coroutine = Contained(pauses(kind))
    coroutine.send(None)
    coroutine.throw(ValueError("woken"))


@pytest.fixture
def handler() -> Iterator[Callable[[Any], object]]:
    """Installs a handler of SIGINT."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("reads", READS)
def test_a_real_interrupt_is_not_contained(reads: str, handler: Callable[[Any], object]) -> None:
    handler(signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        READS[reads](Raises(KeyboardInterrupt))


@pytest.mark.parametrize("reads", FOUND)
def test_an_interrupt_that_user_code_raises_is_contained(reads: str, handler: Callable[[Any], object]) -> None:
    handler(lambda _number, _frame: None)  # which raises none
    found = READS[reads](Raises(KeyboardInterrupt))
    assert (repr(found) if isinstance(found, tuple) else str(found)) == FOUND[reads]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_of_a_coroutine_is_an_error_of_it(kind: type[BaseException], handler: Callable[[Any], object]) -> None:
    handler(lambda _number, _frame: None)
    with pytest.raises(UserExit, match=f"^{kind.__name__}$"):
        Contained(exits(kind)).send(None)
    with pytest.raises(UserExit, match=f"^{kind.__name__}: 5$"):
        thrown(kind)


def test_an_error_whose_traceback_cannot_be_formatted_shows_its_frames() -> None:
    class Noted(Exception):
        @property
        def __notes__(self) -> Any:
            raise SystemExit

    _found, error = failures.attempt(raising, Noted("why"))
    assert error is not None
    assert not failures.can_be_traced(error)
    trace = failures.trace_of(error)
    assert "in raising\n    raise error\n" in trace
    assert trace.endswith("\nNoted: why\n")


def test_a_cancellation_is_ours_only_where_the_task_is_cancelled() -> None:
    assert not failures.is_ours(asyncio.CancelledError()), "no event loop runs"
    found: list[bool] = []

    async def task() -> None:
        found.append(failures.is_ours(asyncio.CancelledError()))  # user code raises it
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            found.append(failures.is_ours(error))

    async def cancelled() -> None:
        running = asyncio.ensure_future(task())
        await asyncio.sleep(0)
        running.cancel()
        await running

    asyncio.run(cancelled())
    assert found == [False, True]


def test_a_message_can_be_written_whatever_is_in_it() -> None:
    assert failures.message_of(OSError("no file caf\udce9.json")) == "no file caf\\udce9.json"
