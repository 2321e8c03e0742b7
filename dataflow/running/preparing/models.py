"""The models of a run: their directories, and whether what the run samples fits into them."""

from __future__ import annotations

from loguru import logger

from dataflow.config.base import BaseConfig
from dataflow.config.run import ModelConfig, RunConfig
from dataflow.config.training.critic import CriticConfig
from dataflow.engines.choice import rollout_engine, why_transformers
from dataflow.errors import ConfigError
from dataflow.models.directory import check_model, room_of
from dataflow.models.processor import takes_images
from dataflow.running.reporting.progress import Progress
from dataflow.running.services.hosting import circumstances, engine_kind


def settle(config: BaseConfig, progress: Progress) -> None:
    """Replaces names of models by their directories, and the engine ``auto`` by one: a repeated run uses the same.

    Raises:
        ModelError: there is no such model.
    """
    if isinstance(config, RunConfig):
        settle_models(config, progress)
        for name in config.trained:
            settle_trained(config, name)


def settle_trained(config: RunConfig, name: str) -> None:
    """Does so with the model that a critic begins with, by the name of its section."""
    section = config.trained[name]
    if isinstance(section, CriticConfig) and section.path is not None:
        section.path = str(check_model(section.path, f"{name}.path"))


def settle_models(config: RunConfig, progress: Progress) -> str:
    """Does so with the actor, and with a teacher, and chooses the engine; returns the actor's directory."""
    from dataflow.models.tiny import RECIPES, tiny_model

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
    return str(config.model.path)


def check_fits(config: RunConfig) -> None:
    """Checks that prompts and responses fit into the model, and that each part of the run can have its images.

    Raises:
        ConfigError: they do not, or one cannot.
    """
    draw, room, path = config.engine, room_of(config.model.path or ""), config.model.path
    key = "tools.max_response_tokens" if config.tools.offered else "engine.max_tokens"
    tokens, longest, positions = config.response_length, config.data.max_prompt_length, room.positions
    # vLLM and servers reserve memory for the longest possible prompt; transformers for each actual one.
    if engine_kind(config) == "hf":
        longest = 1
    if positions is not None and longest + tokens > positions:
        prompt = f"data.max_prompt_length={longest} and " if longest > 1 else "a prompt and "
        raise ConfigError(
            f"{prompt}{key}={tokens} are together more than the {positions} tokens that model '{path}' can read; lower "
            "one."
        )
    if not takes_images(path or ""):
        return
    for wrong, what in (
        (draw.replicas > 1, f"engine.replicas={draw.replicas}"),
        (draw.tensor_parallel > 1 and not config.ray.gpus_per_worker, f"engine.tensor_parallel={draw.tensor_parallel}"),
        (draw.rollout == "http", "engine.rollout=http"),
        (config.tools.offered, "tools"),
        ("critic" in type(config).model_fields, "critic"),
        ("teacher" in type(config).model_fields, "teacher"),
    ):
        if wrong:
            raise ConfigError(f"{what}: model '{path}' takes images, which this cannot have yet; leave it out.")
