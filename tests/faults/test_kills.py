"""A light selection of benchmarks/kills.py: a process of a real run is killed, and the run says what died."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.benchmarks import benchmark

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(200)]


def test_a_killed_daemon_of_ray_is_named(tmp_path: Path, tiny_qwen: Path) -> None:
    with benchmark("kills") as kills:
        run = kills.Run(tmp_path, "run", [*kills.SMALL, "engine.rollout=hf", f"model.path={tiny_qwen}"])
        assert run.victim("trainer") is not None  # Ray has started, and its workers do
        process = run.alive("raylet")
        assert process is not None
        process.kill()
        found = run.end()
        assert kills.verdict(found, "raylet") == "one sentence", found
    # Ray may print lines of its own before.
    assert any(line.startswith("RunError: Ray's raylet died (killed, or out of memory)") for line in found["said"])
    assert "\x1b" not in "".join(found["said"]), "the output is no terminal"
