"""Which rollout engine a run uses."""

from __future__ import annotations

import importlib.util

import pytest

from dataflow.engines import choice
from dataflow.engines.choice import rollout_engine
from dataflow.errors import ConfigError


def test_vllm_is_taken_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_vllm", lambda: True)
    assert rollout_engine("auto") == rollout_engine("vllm") == "vllm"
    assert rollout_engine("auto", own_process=False) == rollout_engine("hf") == "hf"
    with pytest.raises(ConfigError, match=r"needs a process of its own; use executor=ray, or engine\.rollout=hf"):
        rollout_engine("vllm", own_process=False)


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert rollout_engine("auto") == "hf"
    with pytest.raises(ConfigError, match=r"not installed; run 'make setup'.*pip install 'dataflow-rl\[gpu\]'"):
        rollout_engine("vllm")


def test_an_unknown_engine() -> None:
    with pytest.raises(ConfigError, match=r"engine\.rollout=vlm is unknown; did you mean 'vllm'\?"):
        rollout_engine("vlm")
