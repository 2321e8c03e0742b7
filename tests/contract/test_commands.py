"""What is said before anything starts: dry runs, the machine's check, a new project, a launch of verl, bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.rig import ENVIRONMENT, PIPELINE, ROOT, SMALL, command, problems, tiny_model

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_a_dry_run_checks_everything_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """A mistake in the data or the memory would be found after minutes on rented GPUs."""
    data = problems(8, tmp_path / "train.jsonl")
    done = command(
        "run", PIPELINE, *SMALL, f"model.path={model}", f"data.train={data}", "dry=true", "--json", cwd=tmp_path
    )
    assert done.code == 0, done.err
    lines = {line["what"]: line for line in json.loads(done.out)}
    assert {"configuration", "pipeline", "engine", "reward", "data", "model", "prompts", "disk"} <= lines.keys()
    assert "8 rows" in lines["data"]["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


def test_a_dry_run_names_every_problem_at_once(tmp_path: Path) -> None:
    """Each mistake would take a start of its own."""
    done = command("run", PIPELINE, *SMALL, "data.train=none.jsonl", "model.path=none", "steps=0", "dry=true", "--json")
    assert done.code == 2
    states = {line["what"]: line["state"] for line in json.loads(done.out)}
    assert states["configuration"] == states["data"] == "problem"
    assert "reward" in states


def test_a_start_refuses_what_a_dry_run_finds(tmp_path: Path) -> None:
    """What is wrong would be half written before it is said."""
    done = command("run", PIPELINE, *SMALL, "data.train=none.jsonl", f"runs={tmp_path / 'runs'}")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "none.jsonl" in done.err
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("polcy=both", "policy"),
        ("policy=bth", "did you mean 'both'"),
        ("trainer.lrr=1", "trainer.lr"),
        ("steps=many", "steps=many"),
        ("trainer.mini_batches=3", "mini_batches=3"),
    ],
)
def test_a_wrong_key_is_one_sentence_with_what_was_meant(argument: str, said: str) -> None:
    """A typing error would train with another value, or print a page."""
    done = command("run", PIPELINE, argument)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert said in done.err


def test_doctor_says_what_is_installed() -> None:
    """A missing package would be found by a failing run."""
    done = command("doctor", "--json")
    found = {line["what"]: line["state"] for line in json.loads(done.out)}
    assert done.code == (0 if "problem" not in found.values() else 2)
    assert found["Python"] == "ok"
    assert "training" in found


def test_a_new_project_is_ready_to_run(tmp_path: Path) -> None:
    """A first project would begin with an empty file."""
    assert command("init", "mine", cwd=tmp_path).code == 0
    done = command("run", "config.yaml", "dry=true", "engine.rollout=hf", cwd=tmp_path / "mine")
    assert done.code == 0, done.err
    shown = command("show", "pipeline.py", cwd=tmp_path / "mine")
    assert shown.code == 0, shown.err
    assert "actor_update" in shown.out


LAUNCH = """\
set -x
data=/elsewhere/gsm8k
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$data/train.parquet \\
    data.val_files=$data/test.parquet \\
    data.train_batch_size=64 \\
    data.max_response_length=256 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \\
    actor_rollout_ref.actor.optim.lr=3e-6 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    trainer.n_gpus_per_node=1 \\
    trainer.total_epochs=15 $@
"""


def test_a_launch_of_verl_becomes_a_script_that_takes_further_keys(model: Path, tmp_path: Path) -> None:
    """A verl user would translate a hundred keys by hand."""
    (tmp_path / "run.sh").write_text(LAUNCH)
    done = command("import-verl", tmp_path / "run.sh", "trainer.total_training_steps=20", "-o", tmp_path / "ours.sh")
    assert done.code == 0, done.err
    script = (tmp_path / "ours.sh").read_text()
    for key in ("data.prompts=64", "engine.n=5", "engine.max_tokens=256", "trainer.mini_batches=8", "trainer.lr=3e-06",
                "steps=20", "policy=baseline"):  # fmt: skip
        assert key in script.replace("3e-6", "3e-06"), key
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "dataflow").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dataflow "$@"\n')
    (binaries / "dataflow").chmod(0o755)
    data = problems(80, tmp_path / "train.jsonl")
    ran = subprocess.run(
        ["bash", str(tmp_path / "ours.sh"), "policy=both", f"data.train={data}", f"data.val={data}",
         f"model.path={model}", "executor=inline", "engine.rollout=hf", "dry=true", "--json"],
        capture_output=True, text=True, timeout=100, cwd=ROOT,
        env={**ENVIRONMENT, "PATH": f"{binaries}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    )  # fmt: skip
    lines = {line["what"]: line["message"] for line in json.loads(ran.stdout)}
    assert "20 steps under both" in lines["pipeline"], ran.stderr


def test_a_launch_whose_data_is_elsewhere_is_printed_with_what_is_missing(tmp_path: Path) -> None:
    """Nothing would be printed for want of one number."""
    (tmp_path / "run.sh").write_text(LAUNCH)
    done = command("import-verl", tmp_path / "run.sh")
    assert "engine.n=5" in done.out
    assert "total_training_steps" in done.out + done.err or "steps=" in done.out


def test_a_resolved_run_is_repeated_from_its_configuration(tmp_path: Path) -> None:
    """A run could not be repeated without the command that began it."""
    (tmp_path / "config.yaml").write_text(
        f"origin: {{pipeline: {PIPELINE}}}\nsteps: 3\npolicy: off-policy\nexecutor: inline\n"
    )
    done = command("run", tmp_path / "config.yaml", "engine.rollout=hf", "dry=true", "--json")
    lines = {line["what"]: line["message"] for line in json.loads(done.out)}
    assert "3 steps under off-policy" in lines["pipeline"]
