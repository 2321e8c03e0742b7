"""The page on clusters, and its files: they parse, and their commands are checked like those of a user."""

from __future__ import annotations

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
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")


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


def test_all_nodes_of_the_ray_job_have_one_image_one_disk_and_room_for_objects() -> None:
    cluster = job()["rayClusterSpec"]
    pods = [each["template"]["spec"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    containers = [pod["containers"][0] for pod in pods]
    assert len({each["image"] for each in containers}) == 1
    assert all({"name": "shared", "mountPath": "/shared"} in each["volumeMounts"] for each in containers)
    assert all({"name": "memory", "mountPath": "/dev/shm"} in each["volumeMounts"] for each in containers)
    assert all({volume["name"] for volume in pod["volumes"]} == {"shared", "memory"} for pod in pods)
    import importlib.metadata

    assert cluster["rayVersion"] == importlib.metadata.version("ray")


def test_the_ray_job_has_the_judges_key_where_it_is_checked_and_where_it_is_used() -> None:
    spec = job()
    config = checked(shlex.split(spec["entrypoint"]))
    cluster = spec["rayClusterSpec"]
    agents = [group for group in cluster["workerGroupSpecs"] if group["labels"] == config.ray.nodes["reward"].labels]
    assert agents
    for pod in (cluster["headGroupSpec"], *agents):
        (container,) = pod["template"]["spec"]["containers"]
        assert config.judge.api_key_env in {each["name"] for each in container["env"]}


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


def test_the_page_names_its_files_and_every_key() -> None:
    for name in ("rayjob.yaml", "slurm.sh"):
        assert f"(../examples/cluster/{name})" in PAGE
    for key in ("ray.address", "ray.nodes", "ray.start_timeout", "strict_spread", "RAY_AUTH_MODE=token"):
        assert key in PAGE


@pytest.mark.parametrize("words", re.findall(r"^(dataflow run .*?[^\\])$", PAGE, re.MULTILINE | re.DOTALL))
def test_a_command_of_the_page_has_keys_that_exist(words: str) -> None:
    checked(shlex.split(words.replace("\\\n", " ")))
