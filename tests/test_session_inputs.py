"""A pipeline file's ``inputs(config)``: what it returns, and that the configuration it gets is its own."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dataflow import session
from dataflow.config import RunConfig


def test_the_configuration_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Prompts:
        batch = staticmethod(lambda step: step)

        def all(self, _size: int) -> None: ...

    from dataflow.data import prompts
    from dataflow.models import tiny

    monkeypatch.setattr(prompts, "read_problems", lambda data: ((), ()))
    monkeypatch.setattr(prompts, "load_prompts", lambda config, *problems: (Prompts(), Prompts()))
    monkeypatch.setattr(tiny, "tiny_model", lambda progress: tmp_path)

    def inputs(config: RunConfig) -> dict[str, Any]:
        config.steps = 99
        config.reward.manager_kwargs["workers"] = 99
        return {"own": lambda step: config.steps}

    module = ModuleType("pipeline_file")
    module.inputs = inputs  # type: ignore[attr-defined]
    run = session.Session.__new__(session.Session)
    run.config, run.module = RunConfig(), module
    run.progress = SimpleNamespace(warm_up=None)  # type: ignore[assignment]
    before = run.config.model_copy(deep=True)
    assert run._inputs()["own"](1) == 99
    assert run.config.steps == before.steps
    assert run.config.reward.manager_kwargs == {}
