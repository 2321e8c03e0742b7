"""The rules of the Trace Event format, as a check: what Perfetto and Chrome take without a warning, nothing else.

Written from the format's own document, not from what the writer does.
"""

from __future__ import annotations

import math
from typing import Any

REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "b": {"name", "cat", "pid", "tid", "ts", "id", "args"},
    "e": {"name", "cat", "pid", "tid", "ts", "id"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "cat", "pid", "ts", "s"},
}
"""Phases that are written, and the fields that each must have."""


def check(events: Any) -> None:
    """Raises AssertionError where a list of events breaks a rule of the format."""
    assert isinstance(events, list)
    tracks: dict[int, str] = {}
    slices: dict[int, list[tuple[float, float]]] = {}
    requests: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        assert event.keys() >= REQUIRED[event["ph"]], event
        for key in ("ts", "dur"):
            assert math.isfinite(event.get(key, 0)), event
            assert event.get(key, 0) >= 0, event
        if event["ph"] == "C":
            assert event["args"], event
            assert all(math.isfinite(value) for value in event["args"].values()), event
        elif event["ph"] == "X":
            slices.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "be":
            int(event["id"], 16)  # a viewer reads it as a hexadecimal number
            requests.setdefault(event["id"], []).append(event)
        elif event["name"] == "thread_name":
            assert event["tid"] not in tracks, event
            tracks[event["tid"]] = event["args"]["name"]
    assert len(set(tracks.values())) == len(tracks), "a track has a name of its own"
    assert slices.keys() <= tracks.keys()
    for found in slices.values():  # those of a track nest or are apart
        outer: list[tuple[float, float]] = []
        for begin, end in sorted(found, key=lambda s: (s[0], -s[1])):
            while outer and outer[-1][1] <= begin:
                outer.pop()
            assert not outer or end <= outer[-1][1], (begin, end, outer[-1])
            outer.append((begin, end))
    for first, last in requests.values():
        assert (first["ph"], last["ph"], first["name"]) == ("b", "e", last["name"])
        assert first["ts"] <= last["ts"], (first, last)
