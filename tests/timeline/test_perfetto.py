"""The trace file: valid for Perfetto, read back without loss, and readable after it was cut off."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.errors import DataError
from dataflow.timeline import perfetto
from dataflow.timeline.spans import Level, Mark, Span, Trace
from tests.timeline.traces.trace_format import check

times = st.floats(0, 1e5, allow_nan=False)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
own = ("stage", "step", "part", "parts", "resource", "waited_for", "begin_s", "end_s")
args = st.dictionaries(st.text().filter(lambda name: name not in own), plain, max_size=3)
resources = st.sampled_from(["gpu", "reward", "controller", "io"])


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    spans = st.builds(
        lambda begin, seconds, **own: Span(begin=begin, end=begin + seconds, **own),
        stage=st.text(max_size=8),
        step=st.integers(0, 99),
        part=st.integers(0, 3),
        parts=st.integers(1, 4),
        resource=resources,
        begin=times,
        seconds=times,
        args=args,
        waited_for=st.text(max_size=8),
    )
    marks = st.builds(Mark, name=st.text(max_size=8), resource=resources, begin=times, end=times, args=args)
    meta = draw(st.dictionaries(st.text(), plain, max_size=3))
    meta.pop("resources", None)
    levels = st.builds(
        Level, name=st.text(max_size=8), at=times, value=st.floats(allow_nan=False, allow_infinity=False)
    )
    few = [draw(st.lists(kind, max_size=6)) for kind in (spans, marks, levels)]
    return Trace(*few, meta)


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a file, which is JSON as it stands."""
    events = json.loads(path.read_text())
    assert isinstance(events, list)
    return events


def example() -> Trace:
    trace = Trace(meta={"policy": "both", "seed": 0, "resources": {"gpu": 1, "reward": None}, "started": 1.7e9})
    trace.add(
        Span("rollout", 1, 0, 1, "gpu", 0.1, 0.3, {"weights_version": 0, "samples": 256}),
        Span("reward_collect", 1, 0, 2, "reward", 0.3, 0.7, {}, "rollout[1]"),
        Span("reward_collect", 1, 1, 2, "reward", 0.3, 0.9, {}, "rollout[1]"),
        Span("actor_update", 1, 0, 2, "gpu", 0.7, 0.8, {}, "reward_collect[1.1]"),
        Mark("reward", "reward", 0.3, 0.7, {"step": 1, "group": 0, "sample": 1}),
        Mark("reward", "reward", 0.35, 0.9, {"step": 1, "group": 1, "sample": 0}),
        Level("reward limit", 0.5, 32.0),
    )
    return trace


def test_the_events_are_what_perfetto_reads(tmp_path: Path) -> None:
    perfetto.write(example(), tmp_path / "trace.json")
    events = load(tmp_path / "trace.json")
    check(events)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {names[e["tid"]]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert sorted(order, key=order.__getitem__) == ["gpu", "gpu waits", "reward", "reward 2"]
    spans = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("gpu", "rollout 1", 100_000, 200_000),
        ("reward", "reward_collect 1.1", 300_000, 400_000),
        ("reward 2", "reward_collect 1.2", 300_000, 600_000),
        ("gpu", "actor_update 1.1", 700_000, 100_000),
        ("gpu waits", "waits for rewards", 300_000, 400_000),
        ("gpu waits", "waits for rewards", 800_000, 100_000),
    ]
    rollout = next(e for e in events if e["name"] == "rollout 1")
    assert rollout["args"]["weights_version"] == 0
    assert rollout["args"]["samples"] == 256
    counters: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append((event["ts"], *event["args"].values()))
    assert counters == {
        "rewards in flight": [(300_000, 1), (350_000, 2), (700_000, 1), (900_000, 0)],
        "reward limit": [(500_000, 32.0)],
    }


# --- cut files, and what is none ----------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(traces(), st.data())
def test_any_trace_is_read_back_and_any_prefix_of_its_file_is_one_of_it(
    tmp_path: Path, trace: Trace, data: st.DataObject
) -> None:
    path = tmp_path / "trace.json"
    perfetto.write(trace, path)
    assert perfetto.read(path) == trace
    check(load(path))
    whole = path.read_bytes()
    first = whole.index(b",\n")
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)), "bytes")])
    if path.stat().st_size < first:
        with pytest.raises(DataError, match="was not written by dataflow"):
            perfetto.read(path)
        return
    back = perfetto.read(path)
    for some, all_of in ((back.spans, trace.spans), (back.marks, trace.marks), (back.levels, trace.levels)):
        assert some == all_of[: len(some)]
    assert back == trace or "cut" in back.meta
    assert {**back.meta, "cut": 0, "status": 0} == {**trace.meta, "cut": 0, "status": 0}


def test_what_is_missing_of_a_cut_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    perfetto.write(Trace(example().spans, meta={"status": "running"}), path)
    lines = path.read_text().split("\n")
    tasks = [i for i, line in enumerate(lines) if '"ph":"X","cat":"task"' in line]
    path.write_text("\n".join(lines[: tasks[2] + 1])[:-20])
    back = perfetto.read(path)
    assert len(back.spans) == 2
    assert back.meta["status"] == "cut off"
    assert back.meta["cut"] == (
        "cut off after 0.7 s: the run was killed, or is still running; its last task was reward_collect[1.1]"
    )
    path.write_text("\n".join(lines[: tasks[0]]))
    assert perfetto.read(path).meta["cut"].startswith("cut off before its first task had ended")
    # After the closing event there is nothing to read: waits and counters are derived again.
    path.write_text("\n".join(lines[:-4]))
    assert "cut" not in perfetto.read(path).meta


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff\xfe\x00", b"[3, null]", b'{"format": "other"}\n', b"step,loss\n1,2\n"]
)
def test_what_is_no_trace_is_said_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match="give the trace") as caught:
        perfetto.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_packed_trace_is_read_and_a_torn_one_said(tmp_path: Path) -> None:
    perfetto.write(example(), tmp_path / "trace.json")
    packed = gzip.compress((tmp_path / "trace.json").read_bytes())
    (tmp_path / "trace.json.gz").write_bytes(packed)
    assert perfetto.read(tmp_path / "trace.json.gz") == example()
    (tmp_path / "trace.json.gz").write_bytes(packed[:-20])
    for torn in (tmp_path / "trace.json.gz", tmp_path / "none.json", tmp_path):
        with pytest.raises(DataError, match=f"trace {torn} cannot be read"):
            perfetto.read(torn)
