"""A light selection of benchmarks/kills.py: a process of a real run is killed, and the run says what died."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.benchmarks import benchmark

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def kills() -> Iterator[Any]:
    with benchmark("kills") as module:
        yield module


@pytest.mark.parametrize(("victim", "name"), [("raylet", "raylet"), ("gcs", "GCS")])
def test_a_killed_daemon_of_ray_is_named(kills: Any, tmp_path: Path, tiny_qwen: Path, victim: str, name: str) -> None:
    run = kills.Run(tmp_path, "run", [*kills.SMALL, "engine.rollout=hf", f"model.path={tiny_qwen}"])
    assert run.victim("trainer") is not None  # Ray has started, and its workers do
    process = run.alive(victim)
    assert process is not None
    process.kill()
    found = run.end()
    assert kills.verdict(found, victim) == "one sentence", found
    # Ray may print lines of its own before.
    assert any(line.startswith(f"RunError: Ray's {name} died (killed, or out of memory)") for line in found["said"])
    assert "\x1b" not in "".join(found["said"]), "the output is no terminal"
