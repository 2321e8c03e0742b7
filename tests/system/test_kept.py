"""A server that is started again when it dies: whatever goes wrong is reported, never lost with the thread."""

from __future__ import annotations

import queue
import threading

import pytest

from dataflow.errors import RunError
from dataflow.system.kept import KeptServer

pytestmark = pytest.mark.timeout(30)


class Dying:
    """A process that ends at once."""

    pid = 1

    def wait(self) -> None: ...

    def close(self) -> None: ...


def kept(deaths: list[Dying], on_start: list[BaseException | None], on_death: BaseException | None = None) -> str:
    """Lets a server die, which is started as ``on_start`` says; returns what is reported."""
    losses: queue.Queue[RunError] = queue.Queue()

    def start() -> Dying:
        if (error := on_start.pop(0)) is not None:
            raise error
        deaths.append(Dying())
        return deaths[-1]

    def died(_process: Dying) -> None:
        if on_death is not None:
            raise on_death

    server = KeptServer("keeper of rm-0", start, died, losses.put)
    server.open()
    said = str(losses.get(timeout=20))
    server.close()
    return said


def test_a_process_that_dies_is_started_again_until_it_cannot_be() -> None:
    deaths: list[Dying] = []
    said = kept(deaths, [None, None, None, RunError("no more.")])
    assert said == "no more."
    assert len(deaths) == 3


@pytest.mark.parametrize("where", ["start", "death"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("odd"), MemoryError()])
def test_any_other_error_is_reported_too(where: str, error: Exception) -> None:
    said = kept([], [None, error if where == "start" else None], error if where == "death" else None)
    assert said.startswith(f"keeper of rm-0: the server cannot be restarted ({type(error).__name__}: ")
    assert said.endswith("resume the run.")


@pytest.mark.parametrize("where", ["wait", "close"])
def test_an_error_of_the_process_itself_is_reported(where: str) -> None:
    class Odd(Dying):
        closed = 0

        def wait(self) -> None:
            if where == "wait":
                raise OSError("no answer")

        def close(self) -> None:
            self.closed += 1
            if where == "close" and self.closed == 1:
                raise OSError("no answer")

    losses: queue.Queue[RunError] = queue.Queue()
    server = KeptServer("keeper of rm-0", Odd, lambda _process: None, losses.put)
    server.open()
    assert "the server cannot be restarted (OSError: no answer)" in str(losses.get(timeout=20))
    server.close()


def test_a_process_without_a_keeper_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Dying):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = KeptServer("keeper of rm-0", Counted, lambda _process: None, print)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError):
        server.open()
    assert server.process.closed == 1
