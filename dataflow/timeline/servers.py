"""The endpoints that a run's reward requests went to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataflow.timeline.spans import Mark, Trace


@dataclass(frozen=True)
class Server:
    """One endpoint.

    Attributes:
        name: its address.
        agent: whose requests it had, the first one of several.
        marks: its requests.
    """

    name: str
    agent: str
    marks: Sequence[Mark]


def servers_of(trace: Trace) -> list[Server]:
    """Returns the endpoints that had requests, by first request; none where the reward object does not name them."""
    marks: dict[str, list[Mark]] = {}
    for mark in trace.marks:
        if isinstance(url := mark.args.get("endpoint"), str):
            marks.setdefault(url, []).append(mark)
    return [Server(url.partition("://")[2] or url, own[0].resource, own) for url, own in marks.items()]
