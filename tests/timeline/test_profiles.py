"""Profiles of a run beside its trace: found, merged, and named by the text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dataflow.timeline.profiles import merge_profiles, profile_lines, profiles_of
from dataflow.timeline.spans import Span, Trace

STARTED = 1.7e9


def profiled(begin: float = 1.0) -> Trace:
    args = {"profile": "actor_update-2.json.gz", "operators": "aten::mm 61%, aten::add 9%"}
    spans = [Span("rollout", 1, 0, 1, "gpu", 0.0, 1.0), Span("actor_update", 2, 0, 1, "gpu", begin, begin + 0.5, args)]
    return Trace(spans, meta={"started": STARTED})


def write(run: Path, name: str, at: float) -> None:
    (run / "profile").mkdir(exist_ok=True)
    event = {"ph": "X", "name": "aten::mm", "pid": 7, "tid": 7, "ts": at * 1e6, "dur": 10}
    text = json.dumps({"baseTimeNanoseconds": int(STARTED * 1e9), "traceEvents": [event]})
    (run / "profile" / name).write_bytes(gzip.compress(text.encode()))


def test_a_run_without_profiles_has_none(tmp_path: Path) -> None:
    assert profiles_of(tmp_path) == []
    assert merge_profiles(tmp_path, profiled()) is None
    assert profile_lines(Trace([Span("rollout", 1, 0, 1, "gpu", 0.0, 1.0)])) == []


def test_they_are_merged_on_the_clock_of_the_run(tmp_path: Path) -> None:
    write(tmp_path, "actor_update-2.json.gz", 1.25)
    (tmp_path / "profile" / ".rollout-2.json.gz").write_bytes(b"half")  # of a process that was killed
    assert [path.name for path in profiles_of(tmp_path)] == ["actor_update-2.json.gz"]
    assert profiles_of(tmp_path / "trace.json") == profiles_of(tmp_path)
    merged = merge_profiles(tmp_path, profiled())
    assert merged == tmp_path / "profile" / "merged.json"
    (mine,) = [event for event in json.loads(merged.read_text()) if event.get("name") == "aten::mm"]
    assert mine["ts"] == pytest.approx(1.25e6)


def test_a_broken_profile_costs_the_merged_file_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rollout-2.json.gz").write_bytes(b"half")
    assert merge_profiles(tmp_path, profiled()) is None


def test_the_text_names_the_operators_of_each_task() -> None:
    assert profile_lines(profiled()) == [
        "profiled (profile/merged.json has all of it, for Perfetto):",
        "  actor_update[2]   0.50 s  aten::mm 61%, aten::add 9%",
    ]
