"""A run beside its own prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.planning.backtest import backtest
from dataflow.timeline import perfetto
from tests.rigs.simulated import job, run


def test_a_run_that_the_model_explains_has_no_error() -> None:
    trace = run(job(steps=40), "both")
    trace.meta |= {"split": 4, "max_staleness": 1}
    lines, predicted = backtest(trace, "a run")
    by_name = {line.what: line for line in lines}
    assert list(by_name)[:3] == ["wall time", "GPU pool busy", "exposed wait"]
    assert by_name["wall time"].error == pytest.approx(0, abs=0.02)
    assert by_name["rollout"].error == pytest.approx(0, abs=1e-6)
    assert by_name["actor_update"].measured_s == pytest.approx(40 * 2.0)
    assert predicted.meta["policy"] == "both predicted"
    assert by_name["advantage"].error is None


@pytest.mark.slow
def test_the_command_prints_and_draws_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    perfetto.write(run(job()), tmp_path / "trace.json")
    picture = tmp_path / "beside.png"
    assert main(["compare", str(tmp_path), "--predicted", "-o", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["seconds", "in", "all", "measured", "predicted", "error"]
    assert "actor_update" in out
    assert picture.stat().st_size > 10_000
    assert main(["compare", str(tmp_path), "--predicted", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["what"] == "wall time"
