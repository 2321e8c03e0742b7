"""Runs whose prompts have images."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from dataflow.cli import main
from dataflow.models.tiny_vision import write_tiny_vision
from tests.running.test_resume import PIPELINE, REWARD, SMALL

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

MAKE = Path(__file__).parents[2] / "examples" / "images" / "make.py"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, ...]:
    rows = runpy.run_path(str(MAKE), run_name="example")["rows"]
    for name, count in (("train", 24), ("val", 4)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(count, 0)), tmp_path / f"{name}.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    data = (f"data.{name}={tmp_path / name}.parquet" for name in ("train", "val"))
    model, reward = write_tiny_vision(tmp_path / "model"), tmp_path / "reward.py"
    plain = ("checkpoint.export=false", "val.every=0", "trainer.lr=1e-3", "trainer.warmup_steps=0")
    own = (f"model.path={model}", f"custom_reward_function.path={reward}", f"runs={tmp_path / 'runs'}")
    return (*(key for key in SMALL if not key.startswith("checkpoint.")), *plain, *data, *own)


def run(keys: tuple[str, ...], name: str, *more: str) -> dict[str, Any]:
    """Runs in this process; returns the run's summary."""
    assert main(["run", PIPELINE, *keys, *more, f"name={name}", "--quiet"]) == 0
    runs = next(Path(key.partition("=")[2]) for key in keys if key.startswith("runs="))
    return dict(json.loads((runs / name / "summary.json").read_text()))


def test_what_the_pictures_show_decides_what_the_model_learns(keys: tuple[str, ...], tmp_path: Path) -> None:
    whole = run(keys, "whole", "steps=2", "checkpoint.every=0")
    rows = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    for row in rows:
        row["images"] = rows[0]["images"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert run(keys, "alike", "steps=2", "checkpoint.every=0")["weights_sha256"] != whole["weights_sha256"]
