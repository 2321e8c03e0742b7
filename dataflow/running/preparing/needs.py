"""Checks of what a run needs around it, which a start finds out late: packages, GPUs, memory, disk, judges."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dataflow.config.base import BaseConfig
from dataflow.config.loading.pipeline_file import pipeline_of
from dataflow.config.loading.saved import PACKAGES
from dataflow.config.run import RunConfig
from dataflow.errors import ConfigError, NotChecked
from dataflow.executors.ray.nodes import check_count, visible_gpus
from dataflow.rewards.judge.client import models_of
from dataflow.rewards.naming import keyed
from dataflow.running.preparing.check import Check
from dataflow.running.preparing.machine import GIB, free_disk, gib, gpu_memory
from dataflow.running.preparing.memory import Need, need_of, peak, shown
from dataflow.running.preparing.preparation import Preparation
from dataflow.system.address import without_login
from dataflow.system.extras import mismatched, not_installed

_LEAST_DISK = GIB // 10
"""Bytes for what a run writes besides models."""


def check_packages(config: BaseConfig) -> str | None:
    """Checks that the packages which a run imports are installed; returns their versions.

    Raises:
        ConfigError: one is missing, or has another version than training requires.
    """
    names = ["ray"] if config.executor == "ray" else []
    trains = isinstance(config, RunConfig)
    names += ["torch", "transformers", "verl"] if trains else []
    for name in names:
        if (why := not_installed(name)) is not None:
            raise ConfigError(why)
    if trains and (why := mismatched("train")) is not None:
        raise ConfigError(why)
    found = []
    for name in (*names, *(each for each in PACKAGES if each.startswith("vllm") and trains)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found) or None


def needs(prepared: Preparation, patience_s: float) -> list[Check]:
    """Returns the checks of what a run needs of its surroundings, which a start finds out late.

    Args:
        prepared: the run, after its own checks.
        patience_s: seconds in which a judge shall answer.
    """
    config, joins = prepared.config, prepared.config.ray.address is not None
    if not prepared.hosts:
        return []
    judges = {name: judge for name, judge in prepared.judges.items() if judge.url is not None}
    found = [
        Check("judge" if len(judges) == 1 else f"judge of {name}", partial(_check_judge, prepared, name, patience_s),
              (name,))
        for name in judges
    ]  # fmt: skip
    gpus = prepared.gpus
    if gpus and not joins:
        found.append(Check("GPUs", lambda: check_count(gpus, len(visible_gpus()))))
    if not isinstance(config, RunConfig):
        return found
    need: list[Need] = []
    found.append(Check("memory", lambda: _estimate(prepared, need), ("model", *config.trained)))
    if gpus and not joins:
        found.append(Check("GPU memory", lambda: _check_gpu_memory(config, need[0]), ("memory",)))
    return [*found, Check("disk", lambda: _check_disk(config, need), ("directory",))]


def _check_judge(prepared: Preparation, name: str, patience_s: float) -> str:
    judge = prepared.judges[name]
    url = without_login(str(judge.url))[0]
    try:
        # For no score, which may cost money.
        listed = asyncio.run(models_of(str(judge.url), "judge.url", patience_s, judge.api_key_env))
    except ConfigError as error:
        raise ConfigError(keyed(str(error), name)) from error
    if not listed or judge.model in listed:
        return f"{url} answers"
    # No error: some servers list no aliases.
    return f"{url} answers, but lists no model '{judge.model}' (judge.model): it has {', '.join(listed[:5])}"


def _estimate(prepared: Preparation, need: list[Need]) -> None:
    config = prepared.config
    # The hosts are made again, as names of models have become directories.
    need.append(need_of(config, pipeline_of(prepared.module, config).hosts()))


def _check_gpu_memory(config: RunConfig, need: Need) -> str:
    try:
        gpus = gpu_memory()
    except NotChecked as reason:
        sizes = (f"{part.name} {gib(part.held + part.works)}" + (" and its KV cache" if part.share else "")
                 for parts in need.pools.values() for part in parts)  # fmt: skip
        raise NotChecked(f"{reason}: {', '.join(sizes)} a GPU by estimate") from None
    least = min(gpus, key=lambda gpu: gpu.total - gpu.used)  # any of the machine's may be one of a pool
    total, found = least.total, []
    for pool, parts in need.pools.items():
        most = peak(parts, total)
        found.append(f"{pool}: {shown(parts, total)}; at most {gib(most)} of {gib(total)}")
        if most > total - least.used:
            used = f", of which other processes use {gib(least.used)}" if least.used > total / 100 else ""
            raise ConfigError(
                f"{found[-1]}{used}: too much for GPU {least.gpu}; give more ranks (trainer.world_size), lower "
                "trainer.micro_batch_size (or give trainer.max_tokens_per_gpu) or engine.gpu_memory, or give "
                "trainer.param_offload and optimizer_offload, or trainer.lora.rank."
            )
    return "; ".join(found)


def _check_disk(config: RunConfig, need: Sequence[Need]) -> str:
    """Checks the disk; a run that saves no model, or one whose size is not known, needs little."""
    checkpoint, free = config.checkpoint, free_disk(Path(config.runs))
    saved = math.ceil(config.steps / checkpoint.every) if checkpoint.every and need else 0
    often = config.steps // checkpoint.keep_every if checkpoint.keep_every else 0
    # A checkpoint is written before an older one is removed.
    kept = min(saved, checkpoint.keep_last + checkpoint.keep_best + often + 1)
    each, model = (need[0].checkpoint, need[0].model) if need else (0.0, 0.0)
    wanted = max(_LEAST_DISK, kept * each + model)
    parts = [f"{kept} checkpoint{'s' * (kept > 1)} of {gib(each)}"] if kept else []
    parts += [f"a model of at most {gib(model)}"] if model else []
    facts = " and ".join(parts) or "trace, samples and metrics"
    if wanted > free:
        raise ConfigError(
            f"runs={config.runs}: {facts} need {gib(wanted)}, and {gib(free)} are free; make room, give another place, "
            "or lower checkpoint.keep_last."
        )
    return f"{facts}; {gib(free)} are free"
