"""The page on clusters, and its files: they parse, and their commands are checked like those of a user."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dataflow.config.keys.overrides import parse_overrides
from pipelines import gsm8k_grpo

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "examples" / "cluster"


def checked(words: list[str]) -> Any:
    """The configuration of a command of dataflow, without what only the cluster knows."""
    assert words[:2] == ["dataflow", "run"]
    return parse_overrides(gsm8k_grpo.Config, words[3:])


def job() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((FILES / "rayjob.yaml").read_text(encoding="utf-8")))
    (found,) = [each for each in documents if each["kind"] == "RayJob"]
    return dict(found["spec"])


def test_the_command_of_the_ray_job_suits_its_cluster() -> None:
    spec = job()
    config = checked(shlex.split(spec["entrypoint"]))
    cluster = spec["rayClusterSpec"]
    groups = {group["labels"]["role"]: group for group in cluster["workerGroupSpecs"]}

    def gpus(role: str) -> int:
        (container,) = groups[role]["template"]["spec"]["containers"]
        return groups[role]["replicas"] * int(container["resources"]["limits"].get("nvidia.com/gpu", 0))

    assert gpus("trainer") == config.trainer.world_size
    assert gpus("rollout") == config.engine.replicas * config.engine.tensor_parallel
    assert {rule.labels["role"] for rule in config.ray.nodes.values()} == set(groups)
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["rayVersion"] == importlib.metadata.version("ray")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_batch_script_parses_and_its_command_is_right() -> None:
    script = FILES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8")
    # The arithmetic and the variables are the shell's: a job of 4 machines, 2 of which train.
    (line,) = re.findall(r"^dataflow run (?:.*\\\n)*.*$", text, re.MULTILINE)
    made = subprocess.run(
        ["bash", "-c", "set -u; printf '%s\\n' " + line.replace("\\\n", " ").removesuffix("&")],
        capture_output=True, text=True, check=True,
        env={"SHARED": "/s", "HEAD": "10.0.0.1", "PORT": "20001", "TRAINERS": "2", "SLURM_JOB_NUM_NODES": "4"},
    ).stdout.split()  # fmt: skip
    config = checked(made)
    assert config.trainer.world_size == 16
    assert config.engine.replicas * config.engine.tensor_parallel == 16
    assert config.ray.address == "10.0.0.1:20001"
    assert f"export {config.judge.api_key_env}\n" in text[: text.index("srun")]
    assert config.data.train is not None
    assert config.judge.url is not None
