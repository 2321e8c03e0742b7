"""The picture is complete and the same each time; its look is not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.drawing.style import columns_that_fit
from dataflow.timeline.picture import draw
from dataflow.timeline.spans import Mark, Span, Trace


def run(policy: str = "both", rest: float = 0.5) -> Trace:
    trace = Trace(meta={"policy": policy, "status": "finished", "resources": {"gpu": 1, "reward": None, "io": 1}})
    for step in range(1, 4):
        at = step * 4.0
        trace.add(
            Span("rollout", step, 0, 1, "gpu", at, at + 1),
            Span("reward_collect", step, 0, 1, "reward", at + 1, at + 1 + rest, {}, f"rollout[{step}]"),
            Span("actor_update", step, 0, 2, "gpu", at + 1 + rest, at + 2.5, {}, f"reward_collect[{step}]"),
            Span("actor_update", step, 1, 2, "gpu", at + 2.5, at + 3.5),
            Span("my_stage", step, 0, 1, "io", at, at + 0.001),
            *(Mark("reward", "reward", at + 1, at + 1 + rest * i / 8, {"step": step}) for i in range(1, 9)),
        )
    trace.add(Span("val_score", 3, 0, 1, "reward", 15.5, 17, {"optional": True}))
    return trace


def test_a_legend_without_words_has_a_column() -> None:
    assert columns_that_fit([], 9.0) == 1


@pytest.mark.slow
def test_an_svg_names_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "runs.svg"
    draw({"baseline": run(), "both": run(rest=0.1)}, path)
    text = path.read_text()
    for word in (
        "baseline",
        "actor_update",
        "my_stage",
        "exposed wait",
        "reward",
        "1.1",
        "against baseline",
    ):
        assert word in text
    draw({"baseline": run(), "both": run(rest=0.1)}, path)
    assert path.read_text() == text
