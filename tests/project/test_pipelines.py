"""The recipes of pipelines/: each is short, and is scheduled correctly under every policy on the virtual clock."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file, pipeline_of
from dataflow.policy import PRESETS, expand
from dataflow.testing import check_trace
from tests.rigs.costs import RandomCosts
from tests.rigs.scheduling import simulate

FILES = sorted((Path(__file__).resolve().parents[2] / "pipelines").glob("*.py"))
POLICIES = [*PRESETS, "both+stream"]


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return load_pipeline_file(request.param)


def test_a_recipe_is_short(module: ModuleType) -> None:
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert f"dataflow run pipelines/{Path(str(module.__file__)).name}" in text, "says how to run it"


def test_a_recipe_needs_no_second_look_at_log_probs_with_bypass_mode(module: ModuleType) -> None:
    config = parse_overrides(module.Config, ["algorithm.bypass_mode=true", "name=x"])
    assert "old_log_prob" not in pipeline_of(module, config).by_name


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_recipe_is_scheduled_correctly_under_each_policy(module: ModuleType, policy: str, tmp_path: Path) -> None:
    overrides = [f"policy={policy}", "steps=7", "checkpoint.every=3", "val.every=3", "name=x", f"runs={tmp_path}"]
    config = parse_overrides(module.Config, overrides)
    pipeline, batches = pipeline_of(module, config), config.trainer.mini_batches
    graph = expand(pipeline, config.policy.resolve(batches), config.steps, batches, groups=config.data.prompts)
    trace, _seen = simulate(graph, RandomCosts(0, groups=config.data.prompts))
    check_trace(trace, graph)
    assert {span.step for span in trace.spans} >= set(range(1, 8))
