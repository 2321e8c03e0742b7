"""`dataflow timeline RUN --follow` in a process of its own, and what it says to a browser."""

from __future__ import annotations

import http.client
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from dataflow.system.children import command

PATIENCE_S = 40.0


class Followed:
    """A server that follows a run.

    Attributes:
        url: where the page is.
        process: the server.
    """

    def __init__(self, run: Path, *more: str) -> None:
        follow = command("dataflow.cli", "timeline", str(run), "--follow", *more)
        self.process = subprocess.Popen(follow, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        # One that does not come up is killed, so that reading what it says cannot wait for ever.
        alarm = threading.Timer(PATIENCE_S, self.process.kill)
        alarm.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        alarm.cancel()
        if not line.startswith("timeline: http"):
            _out, said = self.process.communicate(timeout=PATIENCE_S)
            raise AssertionError(f"it did not come up: {line}{said}")
        self.url = line.split()[1]

    def page(self) -> str:
        """Returns the page as it is now."""
        connection = self._ask("/")
        try:
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    @contextmanager
    def events(self) -> Iterator[Iterator[int]]:
        """Gives the versions of the page, as a browser hears of them."""
        connection = self._ask("/events")
        try:
            response = connection.getresponse()
            assert response.headers["Content-Type"] == "text/event-stream"
            yield (int(line.partition(b":")[2]) for line in response if line.startswith(b"data:"))
        finally:
            connection.close()

    def _ask(self, path: str) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=PATIENCE_S)
        connection.request("GET", path)
        return connection

    def end(self, sign: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Tells it to end; returns its exit code and what it said to stderr."""
        if self.process.poll() is None:
            self.process.send_signal(sign)
        try:
            _out, said = self.process.communicate(timeout=PATIENCE_S)
        finally:
            self.process.kill()
        return self.process.returncode, said


@contextmanager
def followed(run: Path, *more: str) -> Iterator[Followed]:
    """Follows a run while the block is run."""
    server = Followed(run, *more)
    try:
        yield server
    finally:
        server.end()
