"""Running a pipeline from Python: made there or in a file, in a notebook, without what it does not need."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dataflow
from dataflow import Latest, Pipeline, run, stage
from dataflow.errors import ConfigError, PolicyError, StageFailed

pytestmark = pytest.mark.timeout(60)
TOY = """
from dataflow import Hosted, Latest, Pipeline, stage

class Model:
    def __init__(self):
        self.weight = 0.0

@stage(writes="drawn", on="controller")
def draw(numbers):
    return [2 * number for number in numbers]

@stage(writes="model", on="gpu", role="trains")
def train(drawn, model: Latest, *, trainer, task):
    trainer.weight += sum(drawn)
    task.log({"weight": trainer.weight})
    return task.step

def pipeline(config):
    return Pipeline([draw, train.bind(trainer=Hosted("trainer", Model))], inputs=["numbers"])

def inputs(config):
    return {"numbers": lambda step: [step, config.seed]}
"""


@stage(writes="mean", on="gpu", role="trains")
def train(numbers: Any, mean: Latest, *, rate: float = 0.5, task: Any) -> float:
    found = (mean or 0.0) + rate * (sum(numbers) - (mean or 0.0))
    task.log({"mean": found})
    return float(found)


INPUTS = {"numbers": lambda step: [step]}


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    return path


def test_a_run_of_a_pipeline_made_in_python_is_found_again_with_the_pipeline() -> None:
    pipeline = Pipeline([train], inputs=["numbers"])
    first = run(pipeline, inputs=INPUTS, steps=1, name="a", resume="auto")
    again = run(pipeline, inputs=INPUTS, steps=3, name="a", resume="auto")
    assert (again.directory, again.summary["steps"]) == (first.directory.resolve(), 3)
    with pytest.raises(
        ConfigError,
        match=r"does not name its pipeline file .*: resume that with run\(pipeline, name",
    ):
        dataflow.resume(first.directory, steps=4)


def test_it_runs_where_an_event_loop_runs_already() -> None:
    async def notebook() -> int:
        return int(run(Pipeline([train], inputs=["numbers"]), inputs=INPUTS, steps=2).summary["steps"])

    assert asyncio.run(notebook()) == 2


def test_a_file_of_ones_own_runs_with_its_configuration(toy: Path) -> None:
    done = run(toy, steps=2, seed=5)
    assert [row["weight"] for row in done.metrics] == [12.0, 26.0]


@pytest.mark.slow
def test_neither_torch_nor_ray_nor_verl_is_needed(toy: Path) -> None:
    blocked = "import sys\nfor name in ('torch', 'ray', 'verl', 'vllm', 'transformers'): sys.modules[name] = None\n"
    code = f"{blocked}from dataflow.cli import main\nsys.exit(main(['run', {str(toy)!r}, 'steps=2', '--json']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2
    assert (Path("runs/toy-both-1") / "timeline.html").is_file()


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"steps": 0}, ConfigError, "steps=0"),
        ({"inputs": {}}, ConfigError, "the pipeline: nothing supplies its input 'numbers'; define inputs(config)"),
        ({"policy": "mini-batch", "mini_batches": 4}, PolicyError, "split=4 needs the number of prompt groups"),
    ],
)
def test_wrong_input_is_one_sentence_and_nothing_is_written(
    keys: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        run(Pipeline([train], inputs=["numbers"]), **{"inputs": INPUTS, **keys})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("runs").exists()


def test_a_stage_cannot_log_the_runs_own_columns() -> None:
    def logs(numbers: Any, *, task: Any) -> None:
        task.log({"step": 5})

    with pytest.raises(StageFailed, match="stage 'logs' logs 'step', which the run itself logs; rename it"):
        run(Pipeline([stage(on="gpu")(logs)], inputs=["numbers"]), inputs=INPUTS, steps=1)


def test_a_run_is_resumed_by_its_own_pipeline_alone(toy: Path, tmp_path: Path) -> None:
    first = run(toy, name="a", steps=2)
    other = tmp_path / "other.py"
    other.write_text(TOY.replace("2 * number", "3 * number"))
    with pytest.raises(ConfigError, match=r"is of a run of .*toy\.py, not of .*other\.py; give the run's own pipeline"):
        run(other, name="a", steps=2, resume="auto")
    with pytest.raises(ConfigError, match=r"is of a run of .*toy\.py, not of one made in Python"):
        run(Pipeline([train], inputs=["numbers"]), inputs=INPUTS, name="a", steps=2, resume="auto")
    run(Pipeline([train], inputs=["numbers"]), inputs=INPUTS, name="b", steps=1)
    with pytest.raises(ConfigError, match=r"is of a run of a pipeline made in Python, not of .*toy\.py"):
        run(toy, name="b", steps=1, resume="auto")
    moved = toy.rename(tmp_path / "moved.py")
    assert run(moved, name="a", steps=2, resume="auto").summary["steps"] == first.summary["steps"]


@pytest.mark.parametrize(
    ("directory", "keys", "words"),
    [
        ("runs/a", {"name": "b"}, "name= and runs= cannot move run 'runs/a'"),
        ("runs/aa", {}, "no run at 'runs/aa'; give a run directory"),
        ("runs", {}, "no run at 'runs'; give a run directory (runs/NAME)."),
    ],
)
def test_what_cannot_be_resumed_is_one_sentence(toy: Path, directory: str, keys: dict[str, Any], words: str) -> None:
    run(toy, name="a", steps=1)
    before = sorted(Path("runs").rglob("*"))
    Path("config.yaml").touch()  # of a project, as init makes it
    with pytest.raises(ConfigError) as caught:
        dataflow.resume(directory, steps=3, **keys)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(Path("runs").rglob("*")) == before
