"""What a run with a model that takes images supports, and which data its reward manager scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.config.run import RunConfig
from dataflow.data.prompts import Problems
from dataflow.errors import ConfigError, DataError
from dataflow.running.preparing.prompts import check_images, check_truths
from pipelines import distill, ppo_critic
from tests.rigs.logs import logged


def configured(path: Path, kind: str, base: type[RunConfig] = RunConfig, **sections: Any) -> RunConfig:
    (path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    return base.model_validate({"model": {"path": str(path)}, **sections})


@pytest.mark.parametrize(
    ("base", "sections", "message"),
    [
        (RunConfig, {"engine": {"replicas": 2}}, "engine.replicas=2: model .* one engine samples"),
        (RunConfig, {"engine": {"tensor_parallel": 2}}, "engine.tensor_parallel=2: model .* on a CPU; use 1"),
        (RunConfig, {"tools": {"names": ["calculator"]}}, "tools: model .* leave out the tools"),
        (ppo_critic.Config, {}, "critic: model .* a critic cannot read them yet"),
        (distill.Config, {}, "teacher: model .* a teacher cannot read them yet"),
    ],
)
def test_what_cannot_take_images_is_named(
    base: type[RunConfig], sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_images(configured(tmp_path, "qwen2_5_vl", base, **sections))
    check_images(configured(tmp_path, "qwen2", base, **sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"engine": {"rollout": "hf"}},
        {"engine": {"rollout": "vllm"}},
        {"engine": {"rollout": "vllm", "tensor_parallel": 2}, "ray": {"gpus_per_worker": 1}},
    ],
)
def test_both_engines_take_them(sections: dict[str, Any], tmp_path: Path) -> None:
    check_images(configured(tmp_path, "qwen2_vl", **sections))


def test_data_that_the_reward_manager_cannot_score_is_refused_before_the_run() -> None:
    def checked(*truths: Any, manager: str = "sandbox") -> None:
        rows = [{"reward_model": {"ground_truth": truth}} for truth in truths]
        check_truths(RunConfig.model_validate({"reward": {"manager": manager}}), Problems(rows, None, "sums.jsonl"))

    good = {"inputs": ["1"], "outputs": ["1"]}
    with pytest.raises(DataError, match=r"sums\.jsonl, row 1: reward\.manager=sandbox: .* is a int; give"):
        checked("5", 7)
    with logged() as messages:
        checked(good, "5")  # single bad rows are left to the failure rule
    assert [one for one in messages if "sums.jsonl, row 2: " in one and "Of the first 2 rows, 1 cannot" in one]
    checked("5", manager="naive")
