"""A light selection of benchmarks/kills.py: a process of a real run is killed, and the run says what died.

A judge that is killed and started anew is in tests/rewards/judge/test_keeper.py.
"""

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


def test_a_killed_raylet_is_named(kills: Any, tmp_path: Path, tiny_qwen: Path) -> None:
    run = kills.Run(tmp_path, "run", [*kills.SMALL, "engine.rollout=hf", f"model.path={tiny_qwen}"])
    # Then all of Ray is up, and the workers start.
    assert run.victim("trainer") is not None
    process = run.alive("raylet")
    assert process is not None
    process.kill()
    found = run.end()
    assert kills.verdict(found, "raylet") == "one sentence", found
    assert found["said"][0].startswith("RunError: Ray's raylet died (killed, or out of memory)")
