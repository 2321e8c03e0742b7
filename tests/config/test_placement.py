"""The GPU pool of each stage under each placement."""

from __future__ import annotations

import pytest

from dataflow.config.placement import placed
from dataflow.errors import PipelineError
from dataflow.graph import Pipeline, stage
from dataflow.planning.workload import Validation, grpo
from dataflow.policy import PRESETS, expand, preset
from pipelines import gsm8k_grpo


def test_the_engines_stages_are_those_of_its_weights() -> None:
    colocated = grpo(True, Validation(2, 8), 3)
    apart = placed(colocated, "disaggregated")
    on = {s.name: s.on for s in apart.stages}
    assert {name for name, pool in on.items() if pool == "rollout"} == {"rollout", "val_rollout", "sync_weights"}
    assert {name for name, pool in on.items() if pool == "train"} == {
        "old_log_prob", "ref_log_prob", "actor_update", "gather_weights", "checkpoint",
    }  # fmt: skip
    assert apart.resources == {"train": 1, "rollout": 1, "reward": None, "controller": 1, "io": 1}
    assert placed(apart, "colocated").facts() == colocated.facts()


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
@pytest.mark.parametrize("name", [*PRESETS, "both+stream"])
def test_the_pipeline_places_its_stages_as_the_planner_does(name: str, placement: str) -> None:
    config = gsm8k_grpo.Config.model_validate(
        {"placement": placement, "engine": {"rollout": "hf"}, "algorithm": {"use_kl_loss": True}}
    )
    pipeline = gsm8k_grpo.pipeline(config)
    assert placed(pipeline, config.placement).facts() == pipeline.facts()
    graph = expand(pipeline, preset(name, 4), 3, 4, groups=32)
    assert {graph.pipeline.by_name[t.id.stage].on for t in graph.unroll(2)} >= set(pipeline.resources) - {"io"}


def test_nothing_to_place() -> None:
    @stage(writes="out", on="gpu")
    def plain(prompts: object) -> None: ...

    with pytest.raises(PipelineError, match="no rollout on GPUs that reads its weights as Carried"):
        placed(Pipeline([plain], inputs=["prompts"]), "disaggregated")
