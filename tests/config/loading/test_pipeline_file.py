"""The arguments of a pipeline file's functions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from dataflow.config.loading.pipeline_file import inputs_of
from dataflow.config.run import RunConfig


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
