"""metrics.jsonl and TensorBoard, and the names and sums of a step's timings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow.errors import ConfigError, RunError
from dataflow.planning.rewards import Validation
from dataflow.planning.workload import grpo
from dataflow.running.reporting.run_ids import FILE
from dataflow.running.reporting.tracking import CUT, METRICS, Tracker, read_metrics, step_metrics, write_summary
from dataflow.timeline.causes.attribution import exposed_waits
from dataflow.timeline.spans import Span, Trace


def lines(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_on_disk_before_the_next(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "run")
    tracker.log(1, {"actor/loss": 0.5, "n": np.int64(3), "x": np.float32(0.25), "bad": float("nan")})
    assert lines(tmp_path / "run") == [{"step": 1, "actor/loss": 0.5, "n": 3, "x": 0.25, "bad": None}]
    tracker.log(2, {})
    assert len(lines(tmp_path / "run")) == 2
    tracker.close()
    tracker.close()
    with pytest.raises(ValueError, match="closed"):
        tracker.log(3, {})


def test_a_resumed_run_continues_where_it_was(tmp_path: Path) -> None:
    for step in (1, 2):
        with Tracker(tmp_path) as tracker:
            tracker.log(step, {"a": step})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_rows_are_cut_off_once_though_a_process_is_killed_between_the_two_files(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{}")  # a service has ids
    with Tracker(tmp_path) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"timing_s/step": step / 3, "bad": float("nan")})
    for _ in range(2):
        before = (tmp_path / METRICS).read_bytes()
        for kept in (before, None):  # the first process is killed before it replaces metrics.jsonl
            Tracker(tmp_path, upto=1).close()
            if kept is not None:
                (tmp_path / METRICS).write_bytes(kept)
            assert [row["number"] for row in read_metrics(tmp_path / CUT)][:2] == [1, 2]
        with Tracker(tmp_path, upto=1) as tracker:
            tracker.log(2, {"timing_s/step": 0.1})
    assert [(row["number"], row["step"]) for row in read_metrics(tmp_path / CUT)] == [(1, 2), (2, 3), (3, 2)]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_summary_is_written_in_one_go(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"wall_s": 1.5, "accuracy_after": float("nan"), "rewards": {"scored": np.int64(3)}})
    assert json.loads(path.read_text()) == {"wall_s": 1.5, "accuracy_after": None, "rewards": {"scored": 3}}
    with pytest.raises(TypeError):
        write_summary(path, {"bad": object()})
    assert json.loads(path.read_text())["wall_s"] == 1.5
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_tensorboard_gets_the_numbers_and_nobody_hears_of_it(tmp_path: Path) -> None:
    code = (
        "import sys; from dataflow.running.reporting.tracking import Tracker;"
        "t = Tracker(sys.argv[1], ['tensorboard'], 'dataflow', 'run', {'steps': 2});"
        "t.log(1, {'actor/loss': 0.5, 'note': 'text', 'bad': float('nan')}); t.log(2, {'actor/loss': 0.25});"
        "t.close()"
    )
    env = {k: v for k, v in os.environ.items() if k != "TENSORBOARD_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True, text=True, timeout=110, check=True, cwd=tmp_path, env=env,
    )  # fmt: skip
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["run"]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/loss")] == [(1, 0.5), (2, 0.25)]
    assert events.Tags()["scalars"] == ["actor/loss"]
    assert lines(tmp_path / "run")[0]["note"] == "text"


def test_an_event_file_on_a_full_disk_is_an_error_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def full(path: Path, mode: str = "r", **options: Any) -> Any:
        return opened(Path("/dev/full") if "tfevents" in path.name else path, mode, **options)

    monkeypatch.setattr(Path, "open", full)
    with Tracker(tmp_path, ["tensorboard"]) as tracker:
        for attempt in (lambda: tracker.log(1, {"a": 1.0}), tracker.close):
            with pytest.raises(RunError, match=r"^metrics of the run .* cannot be written: No space left on device"):
                attempt()
    assert [line["step"] for line in lines(tmp_path)] == [1]


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_an_unknown_or_missing_backend_is_said_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", "mine")
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        Tracker(tmp_path, ["tensorbord"])
    monkeypatch.setitem(sys.modules, "clearml", None)
    with pytest.raises(ConfigError, match="clearml"):
        Tracker(tmp_path, ["clearml"])
    assert os.environ["TENSORBOARD_DIR"] == "mine"
    assert list(tmp_path.iterdir()) == []


def run() -> Trace:
    """Two steps on-policy in two parts, with a write to disk at the end of the first."""
    trace = Trace(meta={"job": {"pipeline": grpo(validation=Validation(every=1)).facts()}})
    at = 1.0
    for step in (1, 2):
        trace.add(
            Span("rollout", step, 0, 1, "gpu", at, at + 2),
            Span("reward_collect", step, 0, 2, "reward", at + 2, at + 4, {}, f"rollout[{step}]"),
            Span("reward_collect", step, 1, 2, "reward", at + 2, at + 6.5, {}, f"rollout[{step}]"),
            Span("old_log_prob", step, 0, 1, "gpu", at + 2, at + 3),
            Span("ref_log_prob", step, 0, 1, "gpu", at + 3, at + 3.5),
            Span("advantage", step, 0, 2, "controller", at + 4, at + 4.25, {}, f"reward_collect[{step}.1]"),
            Span("advantage", step, 1, 2, "controller", at + 6.5, at + 6.75, {}, f"reward_collect[{step}.2]"),
            Span("actor_update", step, 0, 2, "gpu", at + 4.25, at + 5.25, {}, f"advantage[{step}.1]"),
            Span("actor_update", step, 1, 2, "gpu", at + 6.75, at + 7.75, {}, f"advantage[{step}.2]"),
            Span("sync_weights", step, 0, 1, "gpu", at + 7.75, at + 8, {}, f"actor_update[{step}.2]"),
        )
        if step == 1:
            trace.add(
                Span("save", 1, 0, 1, "io", at + 8, at + 8.5, {}, "sync_weights[1]"),
                Span("load", 1, 0, 1, "io", 0, 1),
                Span("val_rollout", 1, 0, 1, "gpu", at + 8, at + 8.25, {"optional": True}),
            )
        at += 8.5
    return trace


def test_a_steps_timings_go_by_verls_names() -> None:
    assert step_metrics(run(), 2) == {
        "timing_s/gen": 2,
        "timing_s/reward_collect": 4.5,
        "timing_s/old_log_prob": 1,
        "timing_s/ref": 0.5,
        "timing_s/adv": 0.5,
        "timing_s/update_actor": 2,
        "timing_s/sync_weights": 0.25,
        "timing_s/reward": 0.5 + 1.25,
        "timing_s/step": 8,
        "overlap/exposed_wait_s": 2.25,
        "overlap/gpu_busy_frac": 1 - 2.25 / 8,
    }


def test_the_first_step_holds_the_start_and_what_follows_its_sync() -> None:
    metrics = step_metrics(run(), 1)
    assert metrics["timing_s/step"] == 9.5
    assert metrics["timing_s/testing"] == 0.25
    assert metrics["timing_s/save"] == 0.5
    assert metrics["overlap/exposed_wait_s"] == 1 + 2.25 + 0.25


def test_steps_tile_the_run() -> None:
    trace = run()
    both = [step_metrics(trace, step) for step in (1, 2)]
    assert sum(m["timing_s/step"] for m in both) == trace.wall
    waited = sum(w.end - w.begin for w in exposed_waits(trace))
    assert sum(m["overlap/exposed_wait_s"] for m in both) == waited


def test_no_stage_hides_the_time_of_another_whatever_they_are_called() -> None:
    def stage(name: str, role: str | None = None) -> dict[str, Any]:
        return {"name": name, "on": "gpu", "reads": [], "writes": [], "role": role}

    stages = [stage("draw", "samples"), stage("again", "samples"), stage("train", "trains"), stage("more", "trains")]
    stages += [stage("update_actor", "syncs"), stage("step"), stage("gen"), stage("reward/mine"), stage("save")]
    trace = Trace(meta={"job": {"pipeline": {"stages": stages, "inputs": []}}})
    for at, each in enumerate(stages):
        trace.add(Span(each["name"], 1, 0, 1, "gpu", float(at), at + 0.5))
    assert {name: value for name, value in step_metrics(trace, 1).items() if name.startswith("timing_s/")} == {
        "timing_s/gen": 1.0,
        "timing_s/update_actor": 1.0,
        "timing_s/stage/update_actor": 0.5,
        "timing_s/stage/step": 0.5,
        "timing_s/stage/gen": 0.5,
        "timing_s/stage/reward/mine": 0.5,
        "timing_s/save": 0.5,
        "timing_s/reward": 0.0,
        "timing_s/step": 8.5,
    }


def test_a_step_that_did_not_run_has_no_timings() -> None:
    assert step_metrics(run(), 3) == {}
    assert step_metrics(Trace(), 1) == {}
