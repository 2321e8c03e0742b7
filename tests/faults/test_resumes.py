"""The comparison of benchmarks/resumes.py finds what differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.benchmarks import benchmark


@pytest.fixture(scope="module")
def resumes() -> Iterator[Any]:
    with benchmark("resumes") as module:
        yield module


def test_a_request_that_was_asked_again_is_found(resumes: Any, tmp_path: Path) -> None:
    trial = resumes.Trial(tmp_path / "trial", "both", judged=False)
    trial.run.mkdir(parents=True)
    summary = {"weights_sha256": "a", "status": "finished", "steps": 2, "evaluations": {"0": 0.5, "1": 0.5}}
    rows = [{"step": 1, "timing_s/step": 1.0}, {"step": 2, "timing_s/step": 1.0}]
    log = '["once", 10.0]\n["twice", 11.0]\n["twice", 50.0]\n'

    def compared(kills: list[float], asked: str = log, said: str = "", **facts: Any) -> list[str]:
        (trial.run / "summary.json").write_text(json.dumps({**summary, **facts}))
        (trial.run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (trial.directory / "asked.jsonl").write_text(asked)
        (trial.directory / "answered.jsonl").write_text(asked)
        whole = {"facts": {**summary, "rows": [1, 2]}, "asked": {"once": 1, "twice": 1}}
        end = {"code": 0, "left": [], "shared_memory": [], "said": ["evaluating", said]}
        return list(trial.compared(whole, kills, [end])["wrong"])

    assert compared([]) == ["1 requests asked again"]
    assert compared([11.5]) == []  # it was answered too late to be stored
    assert compared([30.0]) == ["1 requests asked again"]
    assert compared([], asked='["once", 10.0]\n["twice", 11.0]\n') == []
    assert compared([11.5], weights_sha256="b") == ["weights_sha256: b"]
    # An evaluation may be absent only if the run said so.
    assert compared([11.5], evaluations={"0": 0.5}) == ["evaluations: {'0': 0.5}"]
    assert compared([11.5], said="no evaluation of step 1: not all", evaluations={"0": 0.5}) == []
    assert compared([11.5], said="no evaluation of step 1: ") == []
    assert compared([11.5], said="no evaluation of step 2, 1: ", evaluations={"0": 0.5}) == []
    assert compared([11.5], said="no evaluation of step 2: ", evaluations={"0": 0.5}) == ["evaluations: {'0': 0.5}"]
    rows.append(rows[-1])
    assert compared([11.5]) == ["rows: [1, 2, 2]"]
