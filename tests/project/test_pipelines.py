"""The recipes of pipelines/: each is short, and is scheduled correctly under every policy on the virtual clock."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file, pipeline_of
from dataflow.errors import ConfigError
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


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("weights.judge=0", "weights.judge=0: its agent would be asked and paid for nothing"),
        ("weights.rule=0", "weights.rule=0: its agent would be asked"),
        ("rule.deadline=60", "rule.deadline=60 ends a request before its first try may time out (rule.timeout=120)"),
        ("rule.on_failure=drop", "rule.on_failure=drop is unknown"),
        ("rule.concurency=3", "unknown key 'rule.concurency'; did you mean 'rule.concurrency'"),
        ("algorithm.filter_groups.enable=true", "groups are chosen by the judge's score"),
        ("weights.speed=1", "unknown key 'weights.speed'"),
        ("weights.rule=-1", "weights.rule=-1"),
    ],
)
def test_rewards_that_cannot_be_combined_are_refused(override: str, words: str) -> None:
    module = load_pipeline_file(FILES[0].with_name("two_judges.py"))
    with pytest.raises(ConfigError) as caught:
        pipeline_of(module, parse_overrides(module.Config, [override, "name=x"]))
    assert words in str(caught.value)


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
