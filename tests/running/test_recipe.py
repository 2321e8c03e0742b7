"""What recipes share besides their graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.run import RunConfig
from dataflow.engines.base import Sampling
from dataflow.errors import ConfigError, PipelineError
from dataflow.graph import Pipeline, stage
from dataflow.running.recipe import actor_stage, recipe_pipeline, sampling_of
from dataflow.stage import Hosted

TRAINER = Hosted("trainer", object, concurrent=True)
SLOTS = {"gpu": 1, "io": 1}


@stage(writes="responses", on="gpu")
def respond(prompts): ...


@stage(writes="actor", on="gpu", role="trains")
def train(responses, *, trainer): ...


@stage(on="gpu", role="validates")
def validate(val_prompts): ...


@stage(on="io")
def keep(responses): ...


def config_of(*keys: str) -> RunConfig:
    return parse_overrides(RunConfig, ["name=x", "runs=nowhere", *keys])


def made(*keys: str, update=train) -> Pipeline:
    stages = [respond, update.bind(trainer=TRAINER) if update is train else update]
    return recipe_pipeline(config_of(*keys), stages, validation=[validate], samples=[keep], resources=SLOTS)


def test_evaluations_samples_and_checkpoints_follow_the_stages_of_the_step() -> None:
    pipeline = made("val.every=3", "checkpoint.every=4")
    names = [each.name for each in pipeline.stages]
    saving = ["stage_checkpoint", "keep_samples", "write_checkpoint"]
    assert names == ["respond", "train", "validate", "keep", *saving]
    assert pipeline.by_name["validate"].every == 3
    assert {pipeline.by_name[name].every for name in saving} == {4}
    assert pipeline.inputs == ("prompts", "val_prompts")
    assert pipeline.resources == SLOTS


def test_checkpoints_need_a_trained_service() -> None:
    with pytest.raises(PipelineError, match="no stage trains a hosted service"):
        made("checkpoint.every=4", update=replace(train.bind(trainer=TRAINER), role=None))


def test_the_update_has_the_groups_and_epochs_of_the_run() -> None:
    keys = ["data.prompts=8", "trainer.mini_batches=2", "trainer.epochs=3", "trainer.epochs_over=step"]
    update = actor_stage(config_of(*keys, "policy=baseline"), trainer=TRAINER, on="train", warmup=2)
    assert (update.name, update.on, update.host, update.epochs, update.epochs_over) == (
        "actor_update",
        "train",
        TRAINER,
        3,
        "step",
    )
    assert (update.services["groups"], update.services["warmup"]) == (8, 2)


def test_training_and_validation_sample_by_their_own_keys() -> None:
    config = RunConfig.model_validate(
        {
            "engine": {"n": 4, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "max_tokens": 9},
            "val": {"n": 2, "temperature": 0.3, "top_p": 0.7, "top_k": 5},
        }
    )
    training, held_out = sampling_of(config)
    assert training == Sampling(4, 0.8, 0.9, 20, 9)
    assert held_out == Sampling(2, 0.3, 0.7, 5, max_tokens=9)


@pytest.mark.heavy
def test_stop_tokens_are_looked_up(tiny_qwen: Path) -> None:
    config = RunConfig.model_validate({"engine": {"stop": "<|im_start|>"}})
    assert sampling_of(config)[0].stop_token_ids == (), "there is no model yet"
    config.model.path = str(tiny_qwen)
    assert sampling_of(config)[0].stop_token_ids == sampling_of(config)[1].stop_token_ids == (1,)
    config.engine.stop = ["<|im_stop|>"]
    with pytest.raises(ConfigError, match=r"engine.stop: the tokenizer has no token '<\|im_stop\|>'; give single"):
        sampling_of(config)
