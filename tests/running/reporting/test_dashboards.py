"""Every row is in every dashboard, once: read back from W&B's offline files, TensorBoard's and MLflow's local store."""

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

import pytest

from dataflow.running.reporting.run_ids import FILE
from dataflow.running.reporting.tracking import CUT, METRICS

ROOT = Path(__file__).parents[3]
EVALUATION, LOSS = "val-core/gsm8k/reward/mean@1", "actor/loss"
PROCESS = """
import json, os, signal, sys
from dataflow.running.reporting.tracking import Tracker

directory, upto, end, rows = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
tracker = Tracker(directory, ["tensorboard", "wandb", "mlflow", "file"], "tests", "run", {"steps": 4}, upto=upto)
for step, metrics in rows:
    tracker.log(step, metrics)
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
tracker.close()
"""
Found = Counter[tuple[str, int, float]]
"""How often a name has a value at a step."""


def trained(step: int, value: float | None = None) -> tuple[int, dict[str, float]]:
    return step, {LOSS: float(step) if value is None else value}


def evaluated(step: int) -> tuple[int, dict[str, float]]:
    return step, {EVALUATION: step / 8}


def process(place: Path, rows: Sequence[tuple[int, dict[str, float]]], upto: int | None = None, end: str = "") -> None:
    """Logs rows in a process of its own, which a run in W&B and MLflow ends with."""
    places = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(place)}
    places |= {"MLFLOW_TRACKING_URI": f"file://{place}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(place / "run"), json.dumps(upto), end, json.dumps(rows)],
        capture_output=True, text=True, timeout=110, cwd=place, env={**os.environ, **places, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stderr


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


def in_wandb(place: Path) -> Found:
    found: Found = Counter()
    for file in sorted(place.glob("wandb/offline-run-*/*.wandb")):
        axes = {}
        for record in records(file.read_bytes()):
            if record.WhichOneof("record_type") == "metric":
                axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
            if record.WhichOneof("record_type") != "history":
                continue
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            assert axes == {"training/global_step": "", "*": "training/global_step"}
            found.update((name, row["training/global_step"], row[name]) for name in (EVALUATION, LOSS) if name in row)
    return found


def in_tensorboard(place: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place / "run" / "tensorboard"))
    events.Reload()
    return Counter((name, e.step, e.value) for name in (EVALUATION, LOSS) for e in events.Scalars(name))


def in_mlflow(place: Path) -> Found:
    found: Found = Counter()
    (run,) = (place / "mlruns").glob("*/*/metrics")
    for name in (EVALUATION, LOSS):
        for line in (run / name.replace("@", "_at_")).read_text().splitlines():
            _time, value, step = line.split()
            found[name, int(step), float(value)] += 1
    return found


def in_verls_file(place: Path) -> Found:
    rows = map(json.loads, (place / "run" / "verl.jsonl").read_text().splitlines())
    return Counter((name, row["step"], value) for row in rows for name, value in row["data"].items())


def in_metrics(place: Path) -> Found:
    rows = map(json.loads, (place / "run" / METRICS).read_text().splitlines())
    return Counter((name, row["step"], row[name]) for row in rows for name in row if name != "step")


SHOWN = (in_wandb, in_tensorboard, in_mlflow, in_verls_file)


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_an_evaluation_that_ends_after_later_steps_is_everywhere(tmp_path: Path) -> None:
    late = [trained(2), evaluated(1), trained(3), trained(4), evaluated(2), evaluated(3), evaluated(4)]
    process(tmp_path, [evaluated(0), trained(1), *late])
    expected = Counter([(EVALUATION, step, step / 8) for step in range(5)] + [(LOSS, n, n) for n in range(1, 5)])
    assert in_metrics(tmp_path) == expected
    for found in SHOWN:
        assert found(tmp_path) == expected, found


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_run_that_was_cut_and_resumed_has_each_row_once(tmp_path: Path) -> None:
    # Killed after step 3; the checkpoint is of step 2, whose evaluation had not ended.
    # wandb loses what it has not written.
    process(tmp_path, [evaluated(0), trained(1), trained(2), evaluated(1), trained(3)], end="kill")
    # Ends after step 5; the checkpoint is of step 4.
    again = [evaluated(2), trained(3), trained(4), evaluated(3), trained(5), evaluated(4), evaluated(5)]
    process(tmp_path, again, upto=2)
    # Step 5 is trained again, on other samples.
    process(tmp_path, [trained(5, 50.0), evaluated(5), trained(6), evaluated(6)], upto=4)

    rows = [(EVALUATION, step, step / 8) for step in range(7)] + [(LOSS, n, n) for n in (1, 2, 3, 4, 6)]
    assert (
        in_metrics(tmp_path) == in_tensorboard(tmp_path) == in_verls_file(tmp_path) == Counter([*rows, (LOSS, 5, 50)])
    )
    # Services cannot cut off what they have.
    assert in_mlflow(tmp_path) == Counter([*rows, (LOSS, 5, 5)])
    # wandb may have written some rows before the kill, which are then there twice.
    assert set(in_wandb(tmp_path)) == {*rows, (LOSS, 5, 5)}
    cut = [json.loads(line) for line in (tmp_path / "run" / CUT).read_text().splitlines()]
    assert [(row["number"], row["step"]) for row in cut] == [(4, 3), (9, 5), (11, 5)]
    assert json.loads((tmp_path / "run" / FILE).read_text())["wandb_rows"] == "16"
