"""The servers that a run's reward requests went to: their requests, and when they were out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataflow.timeline.agents import agents_of
from dataflow.timeline.spans import Mark, Trace


@dataclass(frozen=True)
class Server:
    """One server.

    Attributes:
        name: its address.
        agent: whose requests it had, the first one of several.
        marks: its requests.
        outages: (begin, end) of the times in which it got no requests since it did not answer, in seconds.
    """

    name: str
    agent: str
    marks: Sequence[Mark]
    outages: Sequence[tuple[float, float]]


def servers_of(trace: Trace) -> list[Server]:
    """Returns the servers that had requests or were out, by first request.

    Traces of agents that do not choose among servers do not name any.
    """
    marks: dict[str, list[Mark]] = {}
    for mark in trace.marks:
        if isinstance(url := mark.args.get("endpoint"), str):
            marks.setdefault(url, []).append(mark)
    outages = _outages(trace)
    found = []
    for url in dict.fromkeys([*marks, *outages]):
        own = marks.get(url, [])
        agent = own[0].resource if own else next(iter(agents_of(trace)), "")
        found.append(Server(url.partition("://")[2] or url, agent, own, outages.get(url, [])))
    return found


def _outages(trace: Trace) -> dict[str, list[tuple[float, float]]]:
    """Returns the times in which a server's limit was 0, by address; to the end of the run if it did not come back."""
    agents = tuple(f"{agent} limit " for agent in agents_of(trace))
    found: dict[str, list[tuple[float, float]]] = {}
    out: dict[str, float] = {}
    for level in sorted(trace.levels, key=lambda level: level.at):
        url = next((level.name.removeprefix(of) for of in agents if level.name.startswith(of)), None)
        if url is None:
            continue
        if level.value == 0:
            out.setdefault(url, level.at)
        elif url in out:
            found.setdefault(url, []).append((out.pop(url), level.at))
    for url, begin in out.items():
        found.setdefault(url, []).append((begin, max(begin, trace.end)))
    return found
