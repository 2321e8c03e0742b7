"""A resumed run continues under the ids that it has in wandb, SwanLab and MLflow."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dataflow.running.reporting.run_ids import FILE, RunIds
from dataflow.running.reporting.tracking import Tracker


def test_a_resumed_run_has_the_ids_it_had(tmp_path: Path) -> None:
    first = RunIds(tmp_path, ["wandb", "swanlab", "tensorboard"], resumes=False, environment={})
    first.keep()
    assert first.variables["WANDB_RESUME"] == first.variables["SWANLAB_RESUME"] == "allow"
    assert len(first.variables["SWANLAB_RUN_ID"]) == 21
    assert first.variables["WANDB_RUN_ID"] != first.variables["SWANLAB_RUN_ID"]
    assert RunIds(tmp_path, ["wandb", "swanlab"], resumes=True, environment={}).variables == first.variables
    # One that begins is another run, whatever its directory holds.
    again = RunIds(tmp_path, ["wandb"], resumes=False, environment={})
    assert again.variables["WANDB_RUN_ID"] != first.variables["WANDB_RUN_ID"]


def test_an_id_of_the_user_stays(tmp_path: Path) -> None:
    def ids(own: str, resumes: bool) -> RunIds:
        return RunIds(tmp_path, ["wandb", "mlflow"], resumes=resumes, environment={"WANDB_RUN_ID": own})

    first = ids("mine", resumes=False)
    first.keep()
    assert first.variables == {}
    assert not first.continues("wandb")
    again = ids("mine", resumes=True)
    assert again.continues("wandb")
    assert again.variables == {"WANDB_RESUME": "allow"}  # wandb would begin that run anew
    other = ids("another", resumes=True)
    assert not other.continues("wandb")
    assert other.variables == {}
    # Without the variable, the run continues where it was.
    bare = RunIds(tmp_path, ["wandb"], resumes=True, environment={})
    assert bare.continues("wandb")
    assert bare.variables == {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "allow"}


def test_an_id_stays_while_the_run_does_not_use_it(tmp_path: Path) -> None:
    RunIds(tmp_path, ["wandb"], resumes=False, environment={}).keep(rows=7)
    RunIds(tmp_path, ["swanlab"], resumes=True, environment={}).keep(rows=9)
    again = RunIds(tmp_path, ["wandb"], resumes=True, environment={})
    assert again.continues("wandb")
    assert again.rows == 7


@pytest.mark.parametrize("text", ["", "[1]", '"wandb"'])
def test_ids_that_cannot_be_read_are_new(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    ids = RunIds(tmp_path, ["wandb"], resumes=True, environment={})
    assert len(ids.variables["WANDB_RUN_ID"]) == 21


class Mlflow(ModuleType):
    """What verl calls of MLflow: it numbers runs, and refuses a parameter that has changed, as MLflow does."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.runs: dict[str, dict[str, Any]] = {}
        self.active: str | None = None

    def set_tracking_uri(self, _uri: str) -> None: ...

    def set_experiment(self, _name: str) -> SimpleNamespace:
        return SimpleNamespace(experiment_id="1")

    def start_run(self, run_id: str | None = None, **_: Any) -> None:
        assert self.active is None
        self.active = run_id or f"run-{len(self.runs)}"
        self.runs.setdefault(self.active, {})

    def log_params(self, values: dict[str, Any]) -> None:
        known = self.runs[str(self.active)]
        assert all(known.get(name, value) == value for name, value in values.items())
        known.update(values)

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.runs[str(self.active)][f"step {step}"] = metrics

    def active_run(self) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id=self.active))

    def end_run(self) -> None:
        self.active = None


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_mlflow_continues_the_same_run_with_more_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    for steps, upto in ((2, None), (4, 2)):
        with Tracker(tmp_path, ["mlflow"], config={"steps": steps}, upto=upto) as tracker:
            tracker.log(steps, {"loss": 0.5})
        mlflow.end_run()
    assert mlflow.runs.keys() == {"run-0"}
    assert {"step 2", "step 4"} <= mlflow.runs["run-0"].keys()
    assert json.loads((tmp_path / FILE).read_text())["mlflow"] == "run-0"
    assert "MLFLOW_RUN_ID" not in os.environ
