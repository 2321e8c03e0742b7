"""The rules of the Trace Event format, as a check: what Perfetto and Chrome take without a warning, nothing else.

Written from the format's own document, not from what the writer does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
"""Kinds of metadata events: the argument that each must have, and its type."""

REQUIRED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float), "args": dict},
    "b": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "id": (str, int), "args": dict},
    "e": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "id": (str, int)},
    "C": {"name": str, "pid": int, "ts": (int, float), "args": dict},
}
"""Phases that are written, and the fields that each must have."""


def check(events: Any) -> None:
    """Raises AssertionError where a list of events breaks a rule of the format."""
    assert isinstance(events, list)
    for event in events:
        _check_fields(event)
    _check_names(events)
    _check_slices([e for e in events if e["ph"] == "X"])
    _check_async([e for e in events if e["ph"] in "be"])


def _check_fields(event: Any) -> None:
    assert isinstance(event, dict), event
    assert event.get("ph") in REQUIRED, event
    for key, kind in REQUIRED[event["ph"]].items():
        assert isinstance(event.get(key), kind), (key, event)
        assert not isinstance(event[key], bool), (key, event)
    for key in ("ts", "dur"):
        if key in event:
            assert math.isfinite(event[key]), event
            assert event[key] >= 0, event
    if isinstance(event.get("id"), str):
        int(event["id"], 16)  # a viewer reads it as a hexadecimal number
    if event["ph"] == "C":
        assert event["args"], event
        for value in event["args"].values():
            assert isinstance(value, int | float), event
            assert not isinstance(value, bool), event
            assert math.isfinite(value), event


def _check_names(events: Sequence[dict[str, Any]]) -> None:
    """Metadata is of known kinds; every track that is drawn on has one name, which no other of its process has."""
    tracks: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    for event in events:
        if event["ph"] != "M":
            continue
        assert event["name"] in METADATA, event
        key, kind = METADATA[event["name"]]
        assert isinstance(event["args"].get(key), kind), event
        if event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in tracks, event
            tracks[event["pid"], event["tid"]] = event["args"]["name"]
        if event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
    names = [(pid, name) for (pid, _), name in tracks.items()]
    assert len(set(names)) == len(names), names
    for event in events:
        assert event["pid"] in processes, event
        if event["ph"] not in "MC":
            assert (event["pid"], event["tid"]) in tracks, event


def _check_slices(events: Sequence[dict[str, Any]]) -> None:
    """Complete events of a track nest or are apart."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        found = slices.setdefault((event["pid"], event["tid"]), [])
        found.append((event["ts"], event["ts"] + event["dur"]))
    for found in slices.values():
        found.sort(key=lambda s: (s[0], -s[1]))
        outer: list[tuple[float, float]] = []
        for begin, end in found:
            while outer and outer[-1][1] <= begin:
                outer.pop()
            assert not outer or end <= outer[-1][1], (begin, end, outer[-1])
            outer.append((begin, end))


def _check_async(events: Sequence[dict[str, Any]]) -> None:
    """Each (category, id) begins once and ends once, later or then, under one name in one process."""
    begun: dict[tuple[str, Any], dict[str, Any]] = {}
    ended: dict[tuple[str, Any], dict[str, Any]] = {}
    for event in events:
        of = begun if event["ph"] == "b" else ended
        assert (event["cat"], event["id"]) not in of, event
        of[event["cat"], event["id"]] = event
    assert begun.keys() == ended.keys()
    for key, first in begun.items():
        last = ended[key]
        assert (first["name"], first["pid"]) == (last["name"], last["pid"]), (first, last)
        assert first["ts"] <= last["ts"], (first, last)
