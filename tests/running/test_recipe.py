"""What recipes share besides their graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.run import RunConfig
from dataflow.errors import PipelineError
from dataflow.graph import Pipeline, stage
from dataflow.running.recipe import actor_stage, recipe_pipeline
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
