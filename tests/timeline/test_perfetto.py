"""The trace file: what Perfetto needs of it, and that nothing is lost on the way back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.errors import DataError
from dataflow.timeline import perfetto
from dataflow.timeline.spans import Level, Mark, Span, Trace

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
# Names of ours among a user's args are the hard case.
args = st.dictionaries(
    st.sampled_from(["stage", "+stage", "step", "begin_s", "resource", "samples"]) | st.text(),
    plain,
    max_size=3,
)
resources = st.sampled_from(["gpu", "reward", "controller", "io"])


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    spans = st.builds(
        Span,
        stage=st.text(max_size=8),
        step=st.integers(0, 99),
        part=st.integers(0, 3),
        parts=st.integers(1, 4),
        resource=resources,
        begin=times,
        end=times,
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


def example() -> Trace:
    trace = Trace(meta={"policy": "both", "seed": 0, "resources": {"gpu": 1, "reward": None}, "started": 1.7e9})
    trace.add(
        Span("rollout", 1, 0, 1, "gpu", 0.1, 0.3, {"weights_version": 0, "samples": 256}),
        Span("reward_collect", 1, 0, 2, "reward", 0.3, 0.7, {}, "rollout[1]"),
        Span("reward_collect", 1, 1, 2, "reward", 0.3, 0.9, {}, "rollout[1]"),
        Span("actor_update", 1, 0, 2, "gpu", 0.7, 0.8, {}, "reward_collect[1.1]"),
        Mark("reward", "reward", 0.3, 0.7, {"step": 1, "group": 0, "sample": 1}),
        Mark("reward", "reward", 0.35, 0.9, {"step": 1, "group": 1, "sample": 0}),
    )
    return trace


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(traces())
def test_nothing_is_lost_on_the_way_back(tmp_path: Path, trace: Trace) -> None:
    perfetto.write(trace, tmp_path / "trace.json")
    assert perfetto.read(tmp_path / "trace.json") == trace
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(traces())
def test_spans_of_a_track_never_overlap(tmp_path: Path, trace: Trace) -> None:
    perfetto.write(trace, tmp_path / "trace.json")
    tracks: dict[int, list[tuple[int, int]]] = {}
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            assert isinstance(event["ts"], int)
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(spans[i][1] <= spans[i + 1][0] for i in range(len(spans) - 1))


def test_the_events_are_what_perfetto_reads(tmp_path: Path) -> None:
    perfetto.write(example(), tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    events = data["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "b", "e", "C"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["gpu", "reward", "reward 2", "gpu waits"]
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
    opened = {e["id"]: e for e in events if e["ph"] == "b"}
    closed = {e["id"]: e for e in events if e["ph"] == "e"}
    assert opened.keys() == closed.keys()
    assert all((opened[i]["cat"], opened[i]["name"]) == (closed[i]["cat"], closed[i]["name"]) for i in opened)
    counter = [(e["ts"], e["args"]["requests"]) for e in events if e["ph"] == "C"]
    assert counter == [(300_000, 1), (350_000, 2), (700_000, 1), (900_000, 0)]


def test_numbers_that_json_lacks_are_written_so_that_perfetto_opens_the_file(tmp_path: Path) -> None:
    facts = {"loss": float("nan"), "n": np.int64(3), "x": np.float32(0.5), "shape": (1, 2), "path": tmp_path}
    trace = Trace([Span("update", np.int64(1), 0, 1, "gpu", np.float64(0), 1.0, facts)])  # type: ignore[arg-type]
    perfetto.write(trace, tmp_path / "trace.json")
    back = perfetto.read(tmp_path / "trace.json").spans[0]
    assert back.args == {"loss": None, "n": 3, "x": 0.5, "shape": [1, 2], "path": str(tmp_path)}
    assert back.step == 1


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    perfetto.write(example(), path)
    with pytest.raises(ValueError, match="NaN"):
        perfetto.write(Trace([Span("update", 1, 0, 1, "gpu", float("nan"), 1.0)]), path)
    assert perfetto.read(path) == example()
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def broken_event() -> str:
    event = {"ph": "X", "cat": "task", "args": {"stage": "rollout", "step": "one"}}
    other = {"format": "dataflow", "version": 1, "meta": {}}
    return json.dumps({"traceEvents": [event], "otherData": other})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{", "is not JSON"),
        (b'{"traceEvents": [', "is not JSON"),
        (b"\xff\xfe\x00", "is not text"),
        (b"[]", "not written by dataflow"),
        (b'{"traceEvents": []}', "not written by dataflow"),
        (
            b'{"traceEvents": {}, "otherData": {"format": "dataflow", "version": 1}}',
            "not written by dataflow",
        ),
        (
            b'{"traceEvents": [], "otherData": {"format": "dataflow", "version": 2, "meta": {}}}',
            "install a newer",
        ),
        (b'{"traceEvents": [], "otherData": {"format": "dataflow"}}', "of version None"),
        (
            b'{"traceEvents": [3], "otherData": {"format": "dataflow", "version": 1, "meta": {}}}',
            "broken event",
        ),
        (broken_event().encode(), "broken event"),
    ],
)
def test_what_is_no_trace_is_said_in_one_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        perfetto.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        perfetto.read(tmp_path / "none.json")
    with pytest.raises(DataError, match="directory"):
        perfetto.read(tmp_path)
