"""Runs `dataflow timeline RUN --follow` in a process of its own, and reads from it as a browser does."""

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

TIMEOUT_S = 40.0


class Followed:
    """A server that follows a run.

    Args:
        run: directory of the run.
        more: further arguments of the command.

    Attributes:
        url: of the page.
        process: of the server.
    """

    def __init__(self, run: Path, *more: str) -> None:
        follow = command("dataflow", "timeline", str(run), "--follow", *more)
        self.process = subprocess.Popen(follow, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        # A server that does not start is killed, so that reading its output cannot block forever.
        alarm = threading.Timer(TIMEOUT_S, self.process.kill)
        alarm.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        alarm.cancel()
        if not line.startswith("timeline: http"):
            _out, errors = self.process.communicate(timeout=TIMEOUT_S)
            raise AssertionError(f"the server did not start: {line}{errors}")
        self.url = line.split()[1]

    def page(self) -> str:
        """Returns the current page."""
        connection = self._request("/")
        try:
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    @contextmanager
    def events(self) -> Iterator[Iterator[int]]:
        """Yields an iterator over the versions of the page that the server announces."""
        connection = self._request("/events")
        try:
            response = connection.getresponse()
            assert response.headers["Content-Type"] == "text/event-stream"
            yield (int(line.partition(b":")[2]) for line in response if line.startswith(b"data:"))
        finally:
            connection.close()

    def _request(self, path: str) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT_S)
        connection.request("GET", path)
        return connection

    def end(self, sign: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Signals the server to end; returns its exit code and its stderr."""
        if self.process.poll() is None:
            self.process.send_signal(sign)
        try:
            _out, errors = self.process.communicate(timeout=TIMEOUT_S)
        finally:
            self.process.kill()
        return self.process.returncode, errors


@contextmanager
def followed(run: Path, *more: str) -> Iterator[Followed]:
    """Follows a run for the duration of the block."""
    server = Followed(run, *more)
    try:
        yield server
    finally:
        server.end()
