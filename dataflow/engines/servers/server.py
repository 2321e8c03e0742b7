"""A server as the pool sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from dataflow.engines.servers.client import Client
from dataflow.engines.servers.protocol import DrawnSample, ServerProtocol
from dataflow.engines.sync_queue import Job

_BACKOFF_S, _LONGEST_S = 0.5, 10.0
FREE_FAILURES = 3
"""Failures in a row that are followed by a probe at once; after further ones the probe waits, longer each time."""


@dataclass(eq=False)
class Server:
    """One server.

    Attributes:
        client: its HTTP client.
        protocol: that it speaks; None before it was connected.
        up: whether it takes samples.
        failure: its last failure.
        assigned: jobs of its groups that wait for a slot of it.
        calls: requests in flight, by job.
        unconfirmed: samples that came since the version of its weights was last read.
        checked: those that came before, while the version is read.
        confirming: reads the version.
        failures: in a row.
        throttles: rejections for its load, in a row.
        pause: ends a pause that the server asked for; None if there is none.
        watch: brings it back into use; None while it is in use.
        quiet: fires if it answers nothing for a time.
    """

    client: Client
    protocol: ServerProtocol | None = None
    up: bool = False
    failure: str = "no answer"
    assigned: deque[Job] = field(default_factory=deque)
    calls: dict[Job, asyncio.Task[None]] = field(default_factory=dict)
    unconfirmed: list[tuple[Job, DrawnSample]] = field(default_factory=list)
    checked: list[tuple[Job, DrawnSample]] = field(default_factory=list)
    confirming: asyncio.Task[None] | None = None
    failures: int = 0
    throttles: int = 0
    pause: asyncio.TimerHandle | None = None
    watch: asyncio.Task[None] | None = None
    quiet: asyncio.TimerHandle | None = None

    @property
    def url(self) -> str:
        """Its address, without user name and password."""
        return self.client.url

    @property
    def load(self) -> int:
        """Samples that it has or that wait for it."""
        return len(self.assigned) + len(self.calls)

    @property
    def available(self) -> bool:
        """Whether a request may be sent to it now."""
        return self.up and self.pause is None

    def spoken(self) -> ServerProtocol:
        """Returns the protocol of a server that was connected."""
        assert self.protocol is not None
        return self.protocol

    def take_assigned(self) -> list[Job]:
        """Removes and returns the jobs that wait for a slot of it."""
        jobs = list(self.assigned)
        self.assigned.clear()
        return jobs

    def stop_timers(self) -> None:
        """Ends its pause and its watchdog without effect."""
        for timer in (self.pause, self.quiet):
            if timer is not None:
                timer.cancel()
        self.pause = self.quiet = None

    def wait_s(self, number: int) -> float:
        """Returns the seconds to wait after that many rejections or failures."""
        return 0.0 if number < 1 else min(_BACKOFF_S * 2.0 ** min(number - 1, 10), _LONGEST_S)
