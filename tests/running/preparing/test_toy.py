"""Defaults of the tiny models are warned of in a run with a real model, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.config.loading.saved import load
from dataflow.config.run import RunConfig
from dataflow.running.preparing.toy import toy_settings
from tests.rigs.stand_ins import QWEN_05B, write_model

PIPELINES = Path(__file__).parents[3] / "pipelines"
LR = "trainer.lr=0.0002 is the default for the tiny model, and would ruin a real one such as model.path="
TOKENS = "engine.max_tokens=24 is the default for the tiny model, and cuts off the responses"


def settings(*keys: str, pipeline: str = "gsm8k_grpo") -> list[str]:
    _module, config = load(str(PIPELINES / f"{pipeline}.py"), list(keys))
    assert isinstance(config, RunConfig)
    return toy_settings(config)


def test_a_real_model_with_defaults_of_the_tiny_one(tmp_path: Path) -> None:
    model = f"model.path={write_model(tmp_path / 'qwen', QWEN_05B)}"
    lr, tokens = settings(model)
    assert lr.startswith(LR)
    assert lr.endswith("; give trainer.lr=1e-06 or the like.")
    assert tokens.startswith(TOKENS)
    assert tokens.endswith("; give engine.max_tokens=1024 or the like.")
    (lora,) = settings(model, "trainer.lora.rank=8", "engine.max_tokens=512")
    assert lora.endswith("; give trainer.lr=3e-05 or the like.")
    assert "is high for adapters of a real one" in lora
    assert settings(model, "trainer.lr=1e-6", "engine.max_tokens=512") == []
    # What the user gave is no oversight, be it the tiny models' value.
    assert settings(model, "trainer.lr=2e-4", "trainer.lora.rank=8", "engine.max_tokens=24") == []
    _actor, critic, _tokens = settings(model, pipeline="ppo_critic")
    assert critic.startswith("critic.lr=0.001 is the default for the tiny model")
    assert critic.endswith("; give critic.lr=1e-05 or the like.")


def test_one_that_is_still_to_be_downloaded_is_real_and_a_small_one_is_not(tmp_path: Path) -> None:
    assert len(settings("model.path=Qwen/Qwen2.5-0.5B-Instruct")) == 2
    small = {**QWEN_05B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    assert settings(f"model.path={write_model(tmp_path / 'small', small)}") == []
    assert settings() == []


@pytest.mark.parametrize("recipe", sorted((PIPELINES.parent / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_recipe_has_them(recipe: Path) -> None:
    _module, config = load(str(recipe), [])
    assert isinstance(config, RunConfig)
    assert toy_settings(config) == []
