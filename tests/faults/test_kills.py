"""A light selection of benchmarks/kills.py: a process of a real run is killed, and the run says what died.

A judge that is killed and started anew is in tests/rewards/judge/test_keeper.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(200)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kills() -> Any:
    """The benchmark, which is no package's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        spec = importlib.util.spec_from_file_location("kills", ROOT / "benchmarks" / "kills.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
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
