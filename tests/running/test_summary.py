"""The figures of a run's summary: what a stranger would take each of them to mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.running.record import finish_killed
from dataflow.running.reporting.progress import end_table
from dataflow.running.summary import evaluation_in, summarise
from dataflow.timeline.spans import Span, Trace


def shown(summary: dict[str, Any]) -> list[str]:
    """Returns the rows of the table at the end of a run."""
    return [" ".join(row.split()) for row in end_table(summary).splitlines()]


def ended(evaluations: dict[int, float], total_s: float = 92.0, accurate: bool = True) -> dict[str, Any]:
    """Returns the summary of two steps of 39 s each, whose command took 92 s in all."""
    trace = Trace(meta={"policy": "both", "seed": 1, "status": "finished"})
    for step in (1, 2):
        at = 39.0 * (step - 1)
        trace.add(
            Span("rollout", step, 0, 1, "gpu", at, at + 20), Span("actor_update", step, 0, 1, "gpu", at + 20, at + 39)
        )
    return summarise(trace, 2, evaluations, accurate, {"requested": 8, "scored": 8}, total_s)


def test_of_a_run_that_was_still_rising_the_last_evaluation_counts_and_the_mean_has_its_name() -> None:
    summary = ended({0: 0.0, 10: 0.467, 20: 0.603, 30: 0.742})
    assert summary["accuracy_after"] == 0.742
    assert summary["accuracy_mean_last_3"] == pytest.approx(0.604)
    table = shown(summary)
    assert "accuracy before 0.000" in table
    assert "accuracy after 0.742 (evaluation of step 30)" in table
    assert "0.604 (mean of the last 3 evaluations)" in table


def test_a_mean_score_that_is_no_accuracy_is_not_called_one() -> None:
    summary = ended({0: 2.5, 10: 3.0, 20: 3.5, 30: 4.0}, accurate=False)
    assert (summary["score_before"], summary["score_after"], summary["score_mean_last_3"]) == (2.5, 4.0, 3.5)
    assert not [name for name in summary if "accuracy" in name]
    assert "score after 4.000 (evaluation of step 30)" in shown(summary)
    assert "accuracy" not in end_table(summary)


def test_an_evaluation_is_the_mean_over_all_its_samples() -> None:
    sources = {"val-core/a/reward/mean@1": 1.0, "val-core/b/reward/mean@1": 0.0}
    assert evaluation_in({**sources, "val-aux/score": 0.9, "val-aux/accuracy": 0.9}) == (0.9, True)
    assert evaluation_in({**sources, "val-aux/score": 0.9}) == (0.9, False)
    assert evaluation_in(sources) == (0.5, False), "of a user's own stage"
    assert evaluation_in({"val-aux/failed": 3.0}) is None


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (None, "stopped after 0 of 7 steps; 'dataflow run' with name={1} and resume=auto begins it again; its files"),
        ({"status": "failed", "steps": 3}, "stopped after 3 of 7 steps; 'dataflow run' with name={1} and resume=auto"),
        ({"status": "finished", "steps": 7}, "finished before that, and its files in {0} are complete"),
    ],
)
def test_what_is_said_of_a_run_whose_process_was_killed(
    written: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    if written is not None:
        (tmp_path / "summary.json").write_text(json.dumps(written))
    assert finish_killed(tmp_path, "failed", 7).startswith(said.format(tmp_path, tmp_path.name))
    status = json.loads((tmp_path / "summary.json").read_text())["status"]
    assert status == (written["status"] if written else "failed")
