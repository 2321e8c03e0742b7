"""A simulated trace, and the files that a trace is saved as."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow import Pipeline, Trace, expand, plan, preset, simulate, stage
from dataflow.errors import ConfigError, DataError
from dataflow.testing import check_trace, grpo_pipeline

SECONDS = dict.fromkeys((s.name for s in grpo_pipeline().stages), 1.0)


def test_seconds_are_those_of_a_step() -> None:
    graph = expand(grpo_pipeline(), preset("mini-batch", 4), 1, 4, groups=16)
    trace = simulate(graph, SECONDS)
    updates = [span for span in trace.spans if span.stage == "actor_update"]
    assert len(updates) == 4
    assert sum(span.end - span.begin for span in updates) == pytest.approx(1.0)
    asked = next(span.end for span in trace.spans if span.stage == "reward_request")
    came = [span.end for span in trace.spans if span.stage == "reward_collect"]
    assert came == pytest.approx([asked + 0.25, asked + 0.5, asked + 0.75, asked + 1.0])


def test_a_collector_without_requests_takes_its_seconds() -> None:
    @stage(writes="drawn", on="gpu", role="samples")
    def draw(prompts: object) -> None: ...

    @stage(writes="scored", on="teacher", role="collects")
    def score(drawn: object) -> None: ...

    @stage(writes="model", on="gpu", role="trains", per_mini_batch=True)
    def train(scored: object) -> None: ...

    pipeline = Pipeline([draw, score, train], inputs=["prompts"], resources={"gpu": 1, "teacher": 1})
    graph = expand(pipeline, preset("mini-batch", 2), 1, 2, groups=4)
    trace = simulate(graph, {"draw": 1.0, "score": 4.0, "train": 2.0})
    check_trace(trace, graph)
    assert trace.wall == pytest.approx(1 + 4 + 1), "the first update hides behind the second half of the scores"


def test_seconds_that_are_missing() -> None:
    graph = expand(grpo_pipeline(), preset("both", 4), 2, 4, groups=16)
    without = {name: value for name, value in SECONDS.items() if name not in ("rollout", "sync_weights")}
    with pytest.raises(ConfigError, match="no seconds for stage 'rollout', 'sync_weights'"):
        simulate(graph, without)


def test_a_simulation_cannot_be_planned_from(tmp_path: Path) -> None:
    path = simulate(expand(grpo_pipeline(), preset("both", 4), 2, 4, groups=16), SECONDS).save(tmp_path / "a.json")
    with pytest.raises(DataError, match="give a run, not a simulation"):
        plan(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["html", "png", "svg", "txt", "json"])
def test_a_trace_is_saved_and_what_json_holds_is_loaded(kind: str, tmp_path: Path) -> None:
    trace = simulate(expand(grpo_pipeline(), preset("both", 4), 3, 4, groups=16), SECONDS)
    path = trace.save(tmp_path / f"trace.{kind}")
    assert path.stat().st_size > 100
    if kind == "json":
        again = Trace.load(path)
        assert [(s.task, s.begin, s.end) for s in again.spans] == [
            (s.task, pytest.approx(s.begin), pytest.approx(s.end)) for s in trace.spans
        ]
        assert again.wall == pytest.approx(trace.wall)
    if kind == "txt":
        assert "gpu" in path.read_text()


def test_a_trace_that_cannot_be_saved(tmp_path: Path) -> None:
    trace = simulate(expand(grpo_pipeline(), preset("both", 4), 1, 4, groups=16), SECONDS)
    with pytest.raises(DataError, match=r"no such kind, '\.pdf'; give a name in \.html"):
        trace.save(tmp_path / "trace.pdf")
    with pytest.raises(DataError, match="save"):
        trace.save(tmp_path / "missing" / "trace.html")
