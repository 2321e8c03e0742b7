"""metrics.jsonl and the dashboards, read back from W&B's offline files, TensorBoard's and MLflow's local store."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow.errors import ConfigError
from dataflow.running.reporting.tracking import IDS, METRICS, Tracker, check_backends, read_metrics

ROOT = Path(__file__).parents[3]
EVALUATION, LOSS = "val-core/gsm8k/reward/mean@1", "actor/loss"
PROCESS = """
import json, os, signal, sys
from dataflow.running.reporting.tracking import Tracker

directory, upto, end, rows = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
backends = ["tensorboard", "wandb", "mlflow", "file"]
tracker = Tracker(directory, backends, "tests", "run", {"steps": 4 if upto is None else 6}, upto=upto)
for step, metrics in rows:
    tracker.log(step, metrics)
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
tracker.close()
"""
Found = Counter[tuple[str, int, float]]
"""How often a name has a value at a step."""


def test_each_step_is_on_disk_before_the_next(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "run")
    tracker.log(1, {"actor/loss": 0.5, "n": np.int64(3), "x": np.float32(0.25), "bad": float("nan")})
    assert list(read_metrics(tmp_path / "run" / METRICS)) == [
        {"step": 1, "actor/loss": 0.5, "n": 3, "x": 0.25, "bad": None}
    ]
    tracker.close()
    tracker.close()
    with pytest.raises(ValueError, match="closed"):
        tracker.log(3, {})


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint_but_for_damaged_ones(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        for step in (1, 2, 3, 1):
            tracker.log(step, {"a": step})
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'\xff\xfe\n{"step": 2, "b')
    with Tracker(tmp_path, upto=2) as tracker:
        tracker.log(3, {"a": 30})
    rows = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [(row["step"], row["a"]) for row in rows] == [(1, 1), (2, 2), (1, 1), (3, 30)]


def test_a_package_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "clearml" else object())
    check_backends(["tensorboard", "wandb"])
    with pytest.raises(ConfigError, match="'clearml' needs the package clearml, which is not installed; run pip"):
        check_backends(["clearml"])


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_a_backend_that_cannot_be_opened_is_said_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.setitem(sys.modules, "clearml", None)
    with pytest.raises(ConfigError, match=r"tracking.backends=\['clearml'\]: cannot be opened \(.*clearml"):
        Tracker(tmp_path, ["clearml"])
    assert os.environ["WANDB_RUN_ID"] == "mine"
    assert "VERL_FILE_LOGGER_PATH" not in os.environ
    assert list(tmp_path.iterdir()) == []


def process(place: Path, rows: Sequence[tuple[int, dict[str, float]]], upto: int | None = None, end: str = "") -> str:
    """Logs rows in a process of its own, which a run in W&B and MLflow ends with; returns its standard output."""
    places = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(place)}
    places |= {"MLFLOW_TRACKING_URI": f"file://{place}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(place / "run"), json.dumps(upto), end, json.dumps(rows)],
        capture_output=True, text=True, timeout=110, cwd=place, env={**os.environ, **places, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stderr
    return done.stdout


def records(data: bytes) -> Iterator[Any]:
    """Yields the records of a .wandb file: LevelDB's log format behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _crc, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(whole)
            whole = b""


def in_wandb(place: Path) -> tuple[set[str], Found]:
    """Returns the ids of the runs, and what they have on the axis of steps."""
    ids, found = set(), Found()
    for file in sorted(place.glob("wandb/offline-run-*/*.wandb")):
        for record in records(file.read_bytes()):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                row = {of.key or "/".join(of.nested_key): json.loads(of.value_json) for of in record.history.item}
                step = row["training/global_step"]
                found.update((name, step, row[name]) for name in (EVALUATION, LOSS) if name in row)
    return ids, found


def in_tensorboard(place: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place / "run" / "tensorboard"))
    events.Reload()
    return Counter((name, e.step, e.value) for name in (EVALUATION, LOSS) for e in events.Scalars(name))


def in_mlflow(place: Path) -> Found:
    found = Found()
    (run,) = (place / "mlruns").glob("*/*/metrics")
    for name in (EVALUATION, LOSS):
        for line in (run / name.replace("@", "_at_")).read_text().splitlines():
            _time, value, step = line.split()
            found[name, int(step), float(value)] += 1
    return found


def in_verls_file(place: Path) -> Found:
    rows = map(json.loads, (place / "run" / "verl.jsonl").read_text().splitlines())
    return Counter((name, row["step"], value) for row in rows for name, value in row["data"].items())


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_run_that_was_killed_and_resumed_is_one_run_in_every_dashboard(tmp_path: Path) -> None:
    # The evaluations of steps 1 and 2 end after later steps. Killed after step 3; the checkpoint is of step 2.
    first = [(0, {EVALUATION: 0.0}), (1, {LOSS: 1.0}), (2, {LOSS: 2.0}), (1, {EVALUATION: 0.125}), (3, {LOSS: 3.0})]
    assert "Saving tensorboard" not in process(tmp_path, first, end="kill")
    again = [(2, {EVALUATION: 0.25}), (3, {LOSS: 30.0}), (4, {LOSS: 4.0, "note": "text"})]  # type: ignore[dict-item]
    process(tmp_path, again, upto=2)

    before = [(EVALUATION, 0, 0.0), (LOSS, 1, 1.0), (LOSS, 2, 2.0), (EVALUATION, 1, 0.125)]
    after = [(EVALUATION, 2, 0.25), (LOSS, 3, 30.0), (LOSS, 4, 4.0)]
    assert in_tensorboard(tmp_path) == in_verls_file(tmp_path) == Counter(before + after)
    # Services cannot cut anything off; MLflow draws the newest value of a step.
    assert in_mlflow(tmp_path) == Counter([*before, (LOSS, 3, 3.0), *after])
    ids, found = in_wandb(tmp_path)
    assert ids == {json.loads((tmp_path / "run" / IDS).read_text())["WANDB_RUN_ID"]}
    assert found >= Counter(after), "of the rows before the kill, wandb has those that it had written"
