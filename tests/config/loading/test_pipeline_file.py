"""The arguments of a pipeline file's functions."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dataflow.config.base import PipelineConfig
from dataflow.config.loading.pipeline_file import inputs_of, load_pipeline_file, pipeline_of
from dataflow.config.run import RunConfig
from dataflow.errors import PipelineError


def test_inputs_gets_a_configuration_of_its_own() -> None:
    def inputs(config: RunConfig) -> dict[str, Any]:
        config.steps = 99
        config.reward.manager_kwargs["workers"] = 99
        return {"own": lambda step: config.steps}

    module = ModuleType("pipeline_file")
    module.inputs = inputs  # type: ignore[attr-defined]
    config = RunConfig()
    steps = config.steps
    assert inputs_of(module, config)["own"](1) == 99
    assert config.steps == steps
    assert config.reward.manager_kwargs == {}


def test_what_is_no_pipeline_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    head = "from dataflow import Pipeline, stage\n\n\n"
    stage, made = (
        "@stage(writes='a', on='gpu')\ndef f(b): ...\n\n\n",
        "def pipeline(config):\n    return Pipeline([f])\n",
    )
    file.write_text(head + stage + made)
    with pytest.raises(PipelineError, match=r"mine\.py' \(line 9\): stage 'f' reads field 'b', but no stage writes it"):
        pipeline_of(load_pipeline_file(file), PipelineConfig())
    file.write_text(f"{head}@stage(writes='a')\ndef f(b): ...\n")
    with pytest.raises(PipelineError, match=r"^@stage above 'f' \(mine\.py:4\) is without a resource; give on="):
        load_pipeline_file(file)
