"""The benchmark of the recipes: what it runs, what it keeps, and when it says that one has not learned."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LEARNS = {"0": 0.4, "5": 0.3, "10": 0.45, "15": 0.57}
FAILS = {"0": 0.4, "5": 0.6, "10": 0.48, "15": 0.5}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench: Any = importlib.import_module("recipes")
    monkeypatch.setattr(bench, "finish", lambda name: {"evaluations": FAILS if name == "b-1" else LEARNS, "total_s": 1})
    return bench


@pytest.mark.slow
def test_each_recipe_runs_once_for_each_seed_and_finished_ones_are_kept(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[tuple[str, str, dict[str, Any]]] = []

    def start(_runs: Path, name: str, pipeline: Path, **keys: Any) -> str:
        begun.append((name, pipeline.name, keys))
        return name

    monkeypatch.setattr(bench, "start", start)
    monkeypatch.setattr(bench, "_keys", lambda _pipeline: dict(bench.KEYS))
    out = tmp_path / "curves.json"
    assert bench.main(["a.py", "seeds=2", f"out={out}"]) == 0
    assert [(name, file, keys["seed"]) for name, file, keys in begun] == [("a-0", "a.py", "0"), ("a-1", "a.py", "1")]
    assert bench.main(["a.py", "b.py", "seeds=2", f"out={out}", "steps=7"]) == 1, (
        "seed 1 of b gained less than 10 points"
    )
    assert [(name, keys["steps"]) for name, _file, keys in begun[2:]] == [("b-0", "7"), ("b-1", "7")]
    assert json.loads(out.read_text()) == {"a": {"0": LEARNS, "1": LEARNS}, "b": {"0": LEARNS, "1": FAILS}}
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].split() == ["b", "0.40", "0.51", "0.49"]
