"""The prompts of a run that trains a language model, with the checks of its data and model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from dataflow.config.base import BaseConfig
from dataflow.config.run import ModelConfig, RunConfig
from dataflow.errors import ConfigError, DataError
from dataflow.graph import Pipeline
from dataflow.models.processor import takes_images
from dataflow.rewards.naming import MAIN
from dataflow.rewards.user.build import build_manager, scores_alone
from dataflow.running.hosting import check_room, circumstances
from dataflow.running.reporting.progress import Progress

if TYPE_CHECKING:
    from dataflow.data.prompts import Problems

_TRUTHS = 100
"""Rows that are checked, at most."""


class Prompts:
    """The prompts of a run: its data is read and its model settled first, before other inputs are made.

    Args:
        config: of the run; its model is settled.
        pipeline: that reads the prompts.
        progress: shows the warm-up of the default model.

    Raises:
        UserError: the data or the model is wrong, in one sentence.
    """

    def __init__(self, config: RunConfig, pipeline: Pipeline, progress: Progress) -> None:
        from dataflow.data.prompts import read_problems

        self._config = config
        # Before the warm-up, which takes a minute, so that an invalid data file fails at once.
        self._problems = read_problems(config.data)
        if MAIN in pipeline.hosts():
            check_truths(config, self._problems[0])
        settle(config, progress)
        check_images(config)
        if "rollout" in pipeline.hosts():
            check_room(config)

    def fields(self) -> dict[str, Callable[[int], Any]]:
        """Returns the fields ``prompts`` and ``val_prompts``, each a function of the step.

        Raises:
            UserError: the model's weights or a prompt is wrong, in one sentence.
        """
        from dataflow.data.prompts import load_prompts
        from dataflow.models.checked import WeightsCheck
        from dataflow.tools import toolbox_of

        config = self._config
        with WeightsCheck(Path(config.model.path or "")) as check:
            schemas = toolbox_of(config).schemas if config.tools.offered else None
            train, held_out = load_prompts(config, *self._problems, schemas)
            check.wait()
        val = held_out.all(config.data.val_size) if config.val.every else None
        return {"prompts": train.batch, "val_prompts": lambda step: val}


def check_truths(config: RunConfig, problems: Problems) -> None:
    """Checks that the data is of the form that the reward manager needs, if it scores without a function.

    Single bad rows are left to the failure rule, and a warning names one; if the first ones all are bad, the data is
    another.

    Raises:
        DataError: it is not.
    """
    from dataflow.data.prompts import truth_of

    options = config.reward
    if not scores_alone(options.manager, options.manager_path):
        return
    manager = build_manager(options.manager, None, **options.manager_kwargs)
    if not hasattr(manager, "check_truth"):
        return
    rows, bad = problems.rows[:_TRUTHS], []
    for at, row in enumerate(rows):
        try:
            manager.check_truth(truth_of(row))
        except DataError as error:
            bad.append((at, error))
    if not bad:
        return
    at, first = bad[0]
    label = problems.labels[at] if problems.labels else f"{problems.name}, row {at + 1}"
    said = f"{label}: reward.manager={options.manager}: {first}"
    if len(bad) == len(rows):
        raise DataError(f"{said}; {getattr(first, 'fix', 'give other data')}.") from first
    logger.warning(
        f"{said}. Of the first {len(rows)} rows, {len(bad)} cannot be scored: reward.on_failure={options.on_failure} "
        "says what becomes of them."
    )


def settle(config: BaseConfig, progress: Progress) -> None:
    """Replaces names of models by their directories, and the engine ``auto`` by one: a repeated run uses the same.

    Raises:
        ModelError: there is no such model.
    """
    if not isinstance(config, RunConfig):
        return
    from dataflow.engines.choice import rollout_engine, why_transformers
    from dataflow.models.tiny import RECIPES, check_model, tiny_model

    for name in type(config).model_fields:
        model = getattr(config, name)
        if isinstance(model, ModelConfig):
            path = model.path or tiny_model(progress=progress.warm_up, recipe=RECIPES[model.tiny])
            model.path = str(check_model(path, f"{name}.path"))
    if config.engine.rollout == "auto":
        known = circumstances(config)
        config.engine.rollout = rollout_engine("auto", **known)  # type: ignore[assignment]
        why = why_transformers(**known)
        vllm = f"vLLM samples, as it is installed for {'GPUs' if known['device'] == 'cuda' else 'the CPU'}"
        logger.info(f"engine.rollout=auto: {f'transformers samples, as {why}' if why else vllm}")


def check_images(config: RunConfig) -> None:
    """Checks that every part of the run supports a model that takes images, if the model does.

    Raises:
        ConfigError: one does not.
    """
    if not takes_images(config.model.path or ""):
        return
    takes = f"model '{config.model.path}' takes images"
    if config.engine.replicas > 1:
        raise ConfigError(f"engine.replicas={config.engine.replicas}: {takes}, for which one engine samples; use 1.")
    workers = config.engine.tensor_parallel
    if workers > 1 and not config.ray.gpus_per_worker:
        raise ConfigError(
            f"engine.tensor_parallel={workers}: {takes}, which vLLM's processes cannot load on a CPU; use 1."
        )
    if config.tools.offered:
        raise ConfigError(f"tools: {takes}, and conversations cannot show any yet; leave out the tools.")
    for name in type(config).model_fields:
        if name in ("critic", "teacher"):
            raise ConfigError(f"{name}: {takes}, and a {name} cannot read them yet; give a model of text.")
