"""metrics.jsonl and the dashboards, read back from TensorBoard's files and W&B's offline ones."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow.running.reporting.tracking import IDS, METRICS, Tracker, read_metrics

ROOT = Path(__file__).parents[3]
EVALUATION, LOSS = "val-core/gsm8k/reward/mean@1", "actor/loss"
PROCESS = """
import json, os, sys
from dataflow.running.reporting.tracking import Tracker

upto = json.loads(sys.argv[2])
tracker = Tracker(sys.argv[1], ["tensorboard", "wandb", "file"], "tests", "run", upto=upto)
for step, metrics in json.loads(sys.argv[3]):
    tracker.log(step, metrics)
if upto is None:
    os._exit(0)  # as after a kill, nothing is closed
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


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint_but_for_damaged_ones(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    for step in (1, 2, 3, 1):
        tracker.log(step, {"a": step})
    tracker.close()
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'\xff\xfe\n{"step": 2, "b')
    tracker = Tracker(tmp_path, upto=2)
    tracker.log(3, {"a": 30})
    tracker.close()
    rows = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [(row["step"], row["a"]) for row in rows] == [(1, 1), (2, 2), (1, 1), (3, 30)]


def process(place: Path, rows: Sequence[tuple[int, dict[str, float]]], upto: int | None = None) -> None:
    """Logs rows in a process of its own, which a run in W&B ends with."""
    places = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(place)}
    if upto is None:  # as a cloud may give it; the resumed run has it from its file
        places["WANDB_RUN_ID"] = "mine"
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(place / "run"), json.dumps(upto), json.dumps(rows)],
        capture_output=True, text=True, cwd=place, env={**os.environ, **places, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


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


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_run_that_was_killed_and_resumed_is_one_run_in_every_dashboard(tmp_path: Path) -> None:
    # The evaluations of steps 1 and 2 end after later steps. Killed after step 3; the checkpoint is of step 2.
    first = [(0, {EVALUATION: 0.0}), (1, {LOSS: 1.0}), (2, {LOSS: 2.0}), (1, {EVALUATION: 0.125}), (3, {LOSS: 3.0})]
    process(tmp_path, first)
    again = [(2, {EVALUATION: 0.25}), (3, {LOSS: 30.0}), (4, {LOSS: 4.0, "note": "text"})]  # type: ignore[dict-item]
    process(tmp_path, again, upto=2)

    before = [(EVALUATION, 0, 0.0), (LOSS, 1, 1.0), (LOSS, 2, 2.0), (EVALUATION, 1, 0.125)]
    after = [(EVALUATION, 2, 0.25), (LOSS, 3, 30.0), (LOSS, 4, 4.0)]
    assert in_tensorboard(tmp_path) == Counter(before + after)
    ids, found = in_wandb(tmp_path)
    assert ids == {json.loads((tmp_path / "run" / IDS).read_text())["WANDB_RUN_ID"]} == {"mine"}
    rows = [json.loads(line) for line in (tmp_path / "run" / "verl.jsonl").read_text().splitlines()]
    assert [(row["step"], *row["data"].values()) for row in rows] == [(step, of) for _, step, of in before + after]
    assert found >= Counter(after), "of the rows before the kill, wandb has those that it had written"
