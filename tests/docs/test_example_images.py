"""The example of prompts with images, from its files to a trained model."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dataflow.data.pictures import opened
from dataflow.data.rows import load_rows
from dataflow.samples.files import read

ROOT = Path(__file__).parents[2]
MAKE = ROOT / "examples" / "images" / "make.py"


def test_its_pictures_show_as_many_squares_as_the_rows_say(tmp_path: Path) -> None:
    make = runpy.run_path(str(MAKE), run_name="example")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(make["rows"](4, 0)), tmp_path / "train.parquet")
    rows, labels = load_rows(tmp_path / "train.parquet")
    for row, label in zip(rows, labels, strict=True):
        (picture,) = opened(row["images"], label)
        step = make["SIDE"] // 3
        centres = [(at % 3 * step + step // 2, at // 3 * step + step // 2) for at in range(9)]
        coloured = sum(picture.getpixel(centre) != (255, 255, 255) for centre in centres)
        assert str(coloured) == row["reward_model"]["ground_truth"]


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_run_trains_on_them_and_exports_the_processor(tmp_path: Path) -> None:
    subprocess.run([sys.executable, MAKE, tmp_path / "shapes"], check=True, timeout=120, capture_output=True)
    shapes = tmp_path / "shapes"
    options = [f"model.path={shapes}/model", f"data.train={shapes}/train.parquet", f"data.val={shapes}/val.parquet"]
    options += ["executor=inline", "steps=2", "data.prompts=4", "engine.n=2", "engine.max_tokens=4", "val.every=0"]
    options += ["engine.rollout=hf"]  # as the other tests: vLLM takes as long to import as the run
    command = [sys.executable, "-m", "dataflow", "run", ROOT / "pipelines" / "gsm8k_grpo.py"]
    done = subprocess.run(
        [*command, *options, f"runs={tmp_path}", "name=seen"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (file,) = sorted((tmp_path / "seen" / "samples").glob("step_*2.parquet"))
    assert {row["prompt"] for row in read(file)} == {"<image>\nHow many squares are there? End with #### N."}
    assert (tmp_path / "seen" / "model" / "preprocessor_config.json").is_file()
