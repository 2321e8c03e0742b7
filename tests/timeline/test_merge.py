"""Profiles merged with a run's trace: one clock, separate processes, and one sentence for an invalid file."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from dataflow.cli import main
from dataflow.errors import DataError
from dataflow.timeline import perfetto
from dataflow.timeline.merge import merge
from dataflow.timeline.spans import Mark, Span, Trace
from dataflow.timeline.writer import PID
from tests.timeline.traces.trace_format import check

STARTED = 1_790_000_000.25


def run(started: float = STARTED, **meta: Any) -> Trace:
    """A run of two steps, 2.5 s long."""
    trace = Trace(meta={"policy": "both", "resources": {"gpu": 1}, "status": "finished", "started": started, **meta})
    trace.add(
        Span("rollout", 1, 0, 1, "gpu", 0.5, 1.0),
        Span("reward_collect", 1, 0, 1, "reward", 1.0, 1.5, {}, "rollout[1]"),
        Span("actor_update", 1, 0, 1, "gpu", 1.5, 2.5, {}, "reward_collect[1]"),
        Mark("reward", "reward", 1.0, 1.4, {"step": 1, "group": 0}),
    )
    return trace


def ray_timeline(at: float = STARTED + 1.0) -> list[dict[str, Any]]:
    """As ``ray timeline`` writes it: unix time in microseconds, a process a node, a track a worker."""
    return [
        {"cat": "task::run", "name": "run", "pid": 0, "tid": 0, "ts": at * 1e6, "dur": 250_000.0,
         "cname": "generic_work", "args": {"task_id": "c8ef", "actor_id": None}, "ph": "X"},
        {"cat": "task:execute", "name": "task:execute", "pid": 0, "tid": 1, "ts": at * 1e6 + 100.0, "dur": -0.25,
         "cname": "rail_animation", "args": {"task_id": "c8ef"}, "ph": "X"},
        {"name": "process_name", "args": {"name": "Node 10.0.0.4"}, "pid": 0, "tid": None, "ph": "M"},
        {"name": "thread_name", "args": {"name": "worker:01ab"}, "pid": 0, "tid": 0, "ph": "M"},
    ]  # fmt: skip


def torch_trace(at: float = STARTED + 0.5, base: int = 1_780_000_000_000_000_000) -> dict[str, Any]:
    """As kineto writes it: microseconds from ``baseTimeNanoseconds``, text for some processes, flows by number."""
    ts = at * 1e6 - base / 1e3
    events = [
        {"ph": "M", "name": "process_name", "ts": ts, "pid": 4711, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_sort_index", "ts": ts, "pid": "Spans", "tid": 0, "args": {"sort_index": 5}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 4711, "tid": 4711, "ts": ts, "dur": 1000.5, "args": {}},
        {"ph": "s", "id": 1, "pid": 4711, "tid": 4711, "ts": ts, "cat": "ac2g", "name": "ac2g"},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": ts + 500, "dur": 20, "args": {}},
        {"ph": "f", "id": 1, "pid": 0, "tid": 7, "ts": ts + 500, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "ts": ts,
         "dur": 2000, "args": {"Op count": float("nan")}},
    ]  # fmt: skip
    return {"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": events}


def save(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def merged(trace: Trace, tmp_path: Path, *profiles: Path) -> list[dict[str, Any]]:
    assert merge(trace, profiles, tmp_path / "merged.json") == str(tmp_path / "merged.json")
    events = json.loads((tmp_path / "merged.json").read_text())
    assert isinstance(events, list)
    assert all(e["ts"] >= 0 for e in events if "ts" in e)
    assert all(e.get("dur", 0) >= 0 for e in events)
    check([e for e in events if e["pid"] == PID])
    back = perfetto.read(tmp_path / "merged.json")
    assert (back.spans, back.marks) == (trace.spans, trace.marks)
    return events


def named(events: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found = [e for e in events if e["name"] == name and e["ph"] == "X"]
    assert len(found) == 1
    return found[0]


def test_all_lie_on_one_clock_and_processes_keep_apart(tmp_path: Path) -> None:
    ray = save(tmp_path / "ray.json", ray_timeline())
    first = save(tmp_path / "rank0.pt.trace.json", torch_trace())
    second = save(tmp_path / "rank1.pt.trace.json", torch_trace(STARTED + 1.5, base=0))
    events = merged(run(), tmp_path, ray, first, second)
    zero = named(events, "rollout 1")["ts"]
    assert zero == 500_000
    assert named(events, "run")["ts"] == pytest.approx(1_000_000, abs=0.5)
    assert named(events, "run")["dur"] == 250_000.0
    assert named(events, "task:execute")["dur"] == 0
    products = [e for e in events if e["name"] == "aten::mm"]
    assert [e["ts"] for e in products] == pytest.approx([500_000, 1_500_000], abs=0.5)
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert processes.keys() == {
        "both", "ray: Node 10.0.0.4", "rank0: python", "rank0: Spans", "rank0: 0", "rank1: python", "rank1: Spans",
        "rank1: 0",
    }  # fmt: skip
    assert len(set(processes.values())) == 8
    assert all(isinstance(e["pid"], int) and isinstance(e.get("tid", 0), int) for e in events)
    # Perfetto names tracks by their number alone.
    tracks = [(e["tid"], e["pid"]) for e in events if e["name"] == "thread_name"]
    assert len({tid for tid, _ in tracks}) == len(tracks)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"worker:01ab", "PyTorch Profiler", "7"}
    # The arrows of one rank do not end in another's kernels.
    flows = {e["id"]: e["pid"] for e in events if e["ph"] == "s" and e["cat"] == "ac2g"}
    assert len(flows) == 2
    assert flows.keys() == {e["id"] for e in events if e["ph"] == "f" and e["cat"] == "ac2g"}
    assert "NaN" not in (tmp_path / "merged.json").read_text()


def test_what_began_before_the_run_moves_all_of_it(tmp_path: Path) -> None:
    ray = save(tmp_path / "ray.json", ray_timeline(STARTED - 12.0))
    events = merged(run(), tmp_path, ray)
    assert named(events, "run")["ts"] == pytest.approx(0, abs=1)
    assert named(events, "rollout 1")["ts"] - named(events, "run")["ts"] == pytest.approx(12_500_000, abs=1)


@pytest.mark.heavy
def test_a_real_profile_of_torch_lies_where_it_was_taken(tmp_path: Path) -> None:
    import torch

    started = time.time() - 10
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        begin = time.time() - started
        with torch.profiler.record_function("the marked part"):
            _ = torch.ones(64, 64) @ torch.ones(64, 64)
            time.sleep(0.05)
        end = time.time() - started
    profiler.export_chrome_trace(str(tmp_path / "torch.json.gz"))
    trace = Trace([Span("actor_update", 1, 0, 1, "gpu", begin, end)], meta={"started": started})
    events = merged(trace, tmp_path, tmp_path / "torch.json.gz")
    ours, theirs = named(events, "actor_update 1"), named(events, "the marked part")
    assert theirs["pid"] != ours["pid"]
    # Between the two readings of the clock, however long the machine stands still there. The profiler takes its times
    # from the processor's counter, which it sets by the clock only now and then; hence the margin.
    assert ours["ts"] - 20_000 <= theirs["ts"]
    assert theirs["ts"] + theirs["dur"] <= ours["ts"] + ours["dur"] + 20_000
    assert theirs["dur"] >= 30_000, "it slept for 50 ms"
    assert any(e["name"] == "aten::mm" for e in events)


def test_the_command_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    perfetto.write(run(), tmp_path / "run" / "trace.json")
    with gzip.open(tmp_path / "torch.json.gz", "wt") as file:
        json.dump(torch_trace(), file)
    ray = save(tmp_path / "ray.json", ray_timeline())
    out = str(tmp_path / "merged.json")
    assert (
        main(["timeline", str(tmp_path / "run"), "--merge", str(tmp_path / "torch.json.gz"), str(ray), "-o", out]) == 0
    )
    assert capsys.readouterr().out.strip() == out
    assert main(["timeline", out]) == 0
    assert "both: 1 step" in capsys.readouterr().out


WRONG: list[tuple[bytes, str]] = [
    (b"", "is not JSON"),
    (b"[1, 2", "is not JSON"),
    (b"\x1f\x8b\x08\x00", "is not JSON"),
    (b"{}", "holds no list of trace events"),
    (b"[1]", "holds no list of trace events"),
    (b"[]", "holds no event"),
    (b'[{"ph": "X", "ts": 5, "dur": 1}]', "has no absolute time"),
    (b'[{"ph": "X", "ts": "now"}]', "has a broken event (ts is 'now')"),
    (b'[{"ph": "X"}]', "has a broken event (ts is None)"),
    (b'{"baseTimeNanoseconds": "x", "traceEvents": [{"ph": "i", "ts": 1}]}', "has 'x' as the time of its zero"),
    (json.dumps(ray_timeline(STARTED + 3600)).encode(), "begins 3598 s after its end; give one that was taken"),
    (json.dumps(ray_timeline(STARTED - 7200)).encode(), "ends 7200 s before the run began"),
]


@pytest.mark.parametrize(("content", "says"), WRONG)
def test_what_is_no_profile_of_the_run_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, says: str
) -> None:
    perfetto.write(run(), tmp_path / "trace.json")
    (tmp_path / "profile.json").write_bytes(content)
    arguments = ["timeline", str(tmp_path), "--merge", str(tmp_path / "profile.json"), "-o", str(tmp_path / "out.json")]
    assert main(arguments) == 2
    err = capsys.readouterr().err.strip()
    assert says in err
    assert "profile.json" in err
    assert "\n" not in err
    assert not (tmp_path / "out.json").exists()


def test_files_that_are_missing_cut_or_cannot_be_made_are_said(tmp_path: Path) -> None:
    ray = save(tmp_path / "ray.json", ray_timeline())
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(ray.read_bytes())[:-10])
    for profile, says in (
        (tmp_path / "none.json", "No such file"),
        (tmp_path / "cut.json.gz", "not a complete gzip file"),
    ):
        with pytest.raises(DataError, match=says):
            merge(run(), [profile], tmp_path / "merged.json")
    with pytest.raises(DataError, match="there is no directory"):
        merge(run(), [ray], tmp_path / "none" / "merged.json")
    for out in (None, tmp_path / "merged.png"):
        with pytest.raises(DataError, match=r"give it the name of a \.json file"):
            merge(run(), [ray], out)


def test_a_run_that_does_not_say_when_it_began_is_refused(tmp_path: Path) -> None:
    trace = run()
    trace.meta["started"] = None
    with pytest.raises(DataError, match="lacks its start time"):
        merge(trace, [save(tmp_path / "ray.json", ray_timeline())], tmp_path / "merged.json")
