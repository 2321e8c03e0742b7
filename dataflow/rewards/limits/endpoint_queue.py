"""What a limiter requires of its queues, one for each endpoint, and of the items that wait in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dataflow.rewards.limits.limits import Limits


class Queued(Protocol):
    """An item of a queue. One with a smaller priority starts first; one that is not ``wanted`` any more is skipped.

    Attributes:
        endpoint: where it is sent; empty leaves the choice to the limiter, among the servers of ``Limits.pool``.
        tokens: estimate of what it uses.
        prefers: the server of the pool that takes it unless another is much emptier; empty for none.
        avoids: servers of the pool that take it only while all others are paused.
        second: whether a call for it runs already, at a server that it avoids: those never take it.
    """

    priority: tuple[int, int, int]
    endpoint: str
    tokens: int
    prefers: str
    avoids: tuple[str, ...]

    @property
    def second(self) -> bool: ...

    @property
    def wanted(self) -> bool: ...


class EndpointQueue(Protocol):
    """Items that wait for one endpoint, and the calls in flight there.

    Attributes:
        name: of the endpoint; empty for that of all items without one.
        limit: current limit of calls in flight; a float, since it grows by fractions.
        running: calls in flight.
        waited_s: seconds that items at the head waited for a rate limit.
        overloads: calls that ended since the service was overloaded.
        paused_until: end of its last pause, in seconds of ``clock.now()``; 0 without one.
    """

    name: str
    limit: float
    running: int
    waited_s: float
    overloads: int

    @property
    def paused_until(self) -> float: ...

    def push(self, item: Queued) -> None:
        """Adds an item."""

    def ready(self) -> Queued | None:
        """Returns the item that may start now, if any."""

    def pop(self) -> None:
        """Removes the item that :meth:`ready` returned, and counts it as running."""

    def end(self, begun: float, overloaded: bool, extra_tokens: int, error: BaseException | None) -> None:
        """Counts a call as ended.

        Args:
            begun: when it began, in seconds of ``clock.now()``.
            overloaded: whether it ended since the service was overloaded.
            extra_tokens: tokens it used beyond its estimate.
            error: its error, if it failed.
        """

    def pause(self, seconds: float) -> None:
        """Starts nothing for a while, as the server asked."""

    def resume(self) -> None:
        """Ends a pause."""

    def refresh(self) -> None:
        """Called when items or slots elsewhere have changed."""

    def waiting(self) -> int:
        """Returns the number of queued items that are wanted."""

    def take_changes(self) -> list[tuple[float, int]]:
        """Returns (seconds of ``clock.now()``, limit) of each change since the last call."""

    def close(self) -> None:
        """Releases timers, tasks and connections."""


QueueFactory = Callable[[str, Limits, Callable[[], None], Callable[[Exception], None]], EndpointQueue]
"""Makes the queue of an endpoint, from its name, its limits, and two callbacks: ``on_change`` when an item may have
become ready, ``on_bug`` when queued items can no longer start."""
