"""Which runs have a process of which their workers are copies."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from dataflow.config.run import RunConfig
from dataflow.executors.ray import copies


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(copies, "ForkServer", lambda *given: asked.append(given))
    monkeypatch.setattr(copies, "available", lambda: True)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    return asked


def test_a_run_on_a_ray_of_its_own_has_one(asked: list[tuple[Any, ...]]) -> None:
    config = RunConfig()
    copies.server_of(config)
    assert asked == [(config.copied, config.worker_threads)]


ALONE = """
import importlib, os, sys
os.environ |= {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
for name in sys.argv[1:]:
    importlib.import_module(name)
assert "ray" not in sys.modules
assert len(os.listdir("/proc/self/task")) == 1
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="no copies there")
def test_what_is_imported_brings_neither_ray_nor_threads() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE, *RunConfig.copied], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"executor": "inline"}, id="without Ray"),
        pytest.param({"ray": {"address": "auto"}}, id="on a cluster"),
        pytest.param({"ray": {"gpus_per_worker": 1}}, id="with GPUs"),
        pytest.param({"ray": {"fork": False}}, id="not wanted"),
    ],
)
def test_other_runs_have_none(asked: list[tuple[Any, ...]], keys: dict[str, Any]) -> None:
    assert copies.server_of(RunConfig(**keys)) is None
    assert asked == []


def test_a_machine_with_a_gpu_has_none(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "available", lambda: False)
    assert copies.server_of(RunConfig()) is None
    assert asked == []
