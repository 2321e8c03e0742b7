"""Only the stages depend on their names: a pipeline with other names runs and reads the same."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataflow.executors.virtual import VirtualExecutor
from dataflow.graph import Pipeline
from dataflow.planning.config import PlanConfig
from dataflow.planning.planner import predict
from dataflow.planning.sources.trace import of_trace
from dataflow.policy import expand, preset
from dataflow.runner import Runner
from dataflow.running.reporting.timings import step_metrics
from dataflow.testing import grpo_pipeline
from dataflow.timeline import perfetto
from dataflow.timeline.causes import critical_path, culprits, exposed_waits, summary
from dataflow.timeline.spans import Trace
from tests.rigs.costs import SteadyCosts
from tests.rigs.virtual_time import run_virtual

NONSENSE = {
    "rollout": "wug", "reward_request": "dax", "old_log_prob": "blicket", "reward_collect": "fep", "advantage": "toma",
    "actor_update": "zav", "gather_weights": "pim", "sync_weights": "quib", "val_rollout": "sib", "val_score": "rel",
}  # fmt: skip
BACK = {new: old for old, new in NONSENSE.items()}


def renamed() -> Pipeline:
    usual = grpo_pipeline(val_every=2)
    stages = [replace(s, name=NONSENSE[s.name], after=tuple(NONSENSE[a] for a in s.after)) for s in usual.stages]
    return Pipeline(stages, usual.inputs, usual.resources)


def run(pipeline: Pipeline, policy: str, names: dict[str, str]) -> Trace:
    graph = expand(pipeline, preset(policy, 4), 3, 4, groups=16)
    job = {"pipeline": pipeline.facts(), "prompts": 16, "responses": 2, "mini_batches": 4, "concurrency": 8}
    trace = Trace(meta={"resources": dict(pipeline.resources), "steps": 3, "status": "finished", "job": job})
    seconds = {names[stage]: took for stage, took in SECONDS.items()}
    costs = SteadyCosts(8.0, 16, seconds)
    inputs = {field: lambda step: step for field in pipeline.inputs}
    run_virtual(Runner(graph, VirtualExecutor(costs), inputs=inputs, trace=trace).run)
    return trace


SECONDS = {
    "rollout": 3.0, "reward_request": 0.01, "old_log_prob": 2.0, "advantage": 0.01, "actor_update": 1.5,
    "gather_weights": 0.1, "sync_weights": 0.2, "val_rollout": 1.0, "val_score": 5.0,
}  # fmt: skip


def back(value: Any) -> Any:
    """Puts the usual names in the place of nonsense."""
    return re.sub(r"\b(" + "|".join(BACK) + r")\b", lambda m: BACK[m[1]], str(value))


@pytest.fixture(params=["baseline", "both"])
def traces(request: pytest.FixtureRequest) -> tuple[Trace, Trace]:
    same = {name: name for name in NONSENSE}
    return run(grpo_pipeline(val_every=2), request.param, same), run(renamed(), request.param, NONSENSE)


def test_trace_waits_causes_and_summary_are_the_same(traces: tuple[Trace, Trace]) -> None:
    usual, other = traces
    assert back(other.spans) == str(usual.spans)
    for read in (exposed_waits, culprits, critical_path, summary):
        assert back(read(other)) == str(read(usual))
    assert back({step: step_metrics(other, step) for step in (1, 2, 3)}) == str(
        {step: step_metrics(usual, step) for step in (1, 2, 3)}
    )


def test_the_file_is_the_same(traces: tuple[Trace, Trace], tmp_path: Path) -> None:
    files = []
    for number, trace in enumerate(traces):
        perfetto.write(trace, tmp_path / f"{number}.json")
        files.append((tmp_path / f"{number}.json").read_text())
    assert json.loads(back(files[1])) == json.loads(files[0])


@pytest.mark.slow
def test_the_plan_is_the_same(traces: tuple[Trace, Trace]) -> None:
    asked = PlanConfig.model_validate({"log": {"latency": "8", "concurrency": 8}})
    plans = [predict(of_trace(trace, "run", asked)) for trace in traces]
    assert back(plans[1]) == str(plans[0])
