"""Checks of what a start needs besides: packages, GPUs, memory, disk, judges. A start finds these out late."""

from __future__ import annotations

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
from dataflow.rewards.judge.client import check_judge
from dataflow.rewards.naming import keyed
from dataflow.running.preparing.check import Check, Checks
from dataflow.running.preparing.cluster import check_cluster
from dataflow.running.preparing.machine import GIB, GpuMemory, cpu_memory, free_disk, gpu_memory
from dataflow.running.preparing.memory import Need, Part, gib, need_of, peak, shown
from dataflow.running.preparing.preparation import Preparation
from dataflow.running.services.served_models import model_hosts
from dataflow.system.extras import mismatched, not_installed

_LEAST_DISK = GIB // 10
"""Bytes for what a run writes besides models."""


def packages(config: BaseConfig) -> str | None:
    """Checks that the packages which a run imports are installed; returns their versions.

    Raises:
        ConfigError: one is missing, or has another version than training requires.
    """
    names = ["ray"] if config.executor == "ray" else []
    if isinstance(config, RunConfig):
        names += ["torch", "transformers", "verl"]
    for name in names:
        if (why := not_installed(name)) is not None:
            raise ConfigError(why)
    if isinstance(config, RunConfig) and (why := mismatched("train")) is not None:
        raise ConfigError(why)
    found = []
    for name in (*names, *(each for each in PACKAGES if each.startswith("vllm") and "torch" in names)):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or None


class Needs:
    """The checks of what a run that is prepared needs of its surroundings.

    Args:
        prepared: the run, after its own checks.
        patience_s: seconds in which a judge shall answer.
    """

    def __init__(self, prepared: Preparation, patience_s: float) -> None:
        self._prepared, self._patience_s = prepared, patience_s
        self._config = prepared.config

    def checks(self) -> Checks:
        """Yields them."""
        config, prepared = self._config, self._prepared
        for name, judge in prepared.judges.items():
            if judge.url is not None and name in prepared.right:
                yield Check("judge" if len(prepared.judges) == 1 else f"judge of {name}", partial(self._judge, name))
        gpus = prepared.gpus
        if config.executor == "ray" and config.ray.address is not None:
            yield Check(
                "cluster", lambda: check_cluster(config, {**prepared.hosts, **model_hosts(config)}), ("pipeline",)
            )
        if gpus and config.ray.address is None:
            yield Check("GPUs", lambda: check_count(gpus, len(visible_gpus())))
        if not isinstance(config, RunConfig) or (hasattr(prepared, "graph") and not prepared.hosts):
            return
        need, models = list[Need](), ("pipeline", "model", "critic")
        if gpus:
            yield Check("GPU memory", lambda: self._gpu_memory(self._read(need)), models)
        else:
            yield Check("memory", lambda: self._estimate(need), models)
        if config.ray.address is None and (need[0].cpu if need else gpus):
            yield Check("CPU memory", lambda: self._cpu_memory(self._read(need)), models)
        if need and need[0].checkpoint + need[0].model:
            yield Check("disk", lambda: self._disk(need[0]), needs=("directory",))
        else:
            yield Check("disk", self._some_disk, needs=("directory",))

    def _judge(self, name: str) -> str:
        judge = self._prepared.judges[name]
        try:
            return check_judge(str(judge.url), judge.api_key_env, self._patience_s)
        except ConfigError as error:
            raise ConfigError(keyed(str(error), name)) from error

    def _read(self, found: list[Need]) -> Need:
        """Returns what the run needs; it is estimated once."""
        config = self._config
        assert isinstance(config, RunConfig)
        if not found:
            if not config.model.path or not Path(config.model.path, "config.json").is_file():
                raise NotChecked("it is estimated from the model's config.json, which is not on this machine")
            # Made again, as names of models have become directories.
            found.append(need_of(config, pipeline_of(self._prepared.module, config).hosts()))
        return found[0]

    def _estimate(self, found: list[Need]) -> None:
        self._read(found)

    def _gpu_memory(self, need: Need) -> str:
        try:
            gpus = gpu_memory() if self._config.ray.address is None else []
        except NotChecked as reason:
            sizes = "; ".join(self._unmeasured(parts) for parts in need.pools.values())
            raise NotChecked(f"{reason}: {sizes} a GPU by estimate") from None
        if not gpus:
            raise NotChecked("the GPUs are those of the cluster at ray.address")
        return "; ".join(self._fits(pool, parts, gpus) for pool, parts in need.pools.items())

    def _unmeasured(self, parts: Sequence[Part]) -> str:
        return ", ".join(
            f"{part.name} {gib(part.held + part.works)}" + (" and its KV cache" if part.share else "") for part in parts
        )

    def _fits(self, pool: str, parts: Sequence[Part], gpus: list[GpuMemory]) -> str:
        """Checks that services fit on each GPU of a pool; any of the machine's may be one of it."""
        config = self._config
        assert isinstance(config, RunConfig)
        least = min(gpus, key=lambda gpu: gpu.total - gpu.used)
        free, total = least.total - least.used, least.total
        most = peak(parts, total)
        facts = f"{pool}: {shown(parts, total)}; at most {gib(most)} of {gib(total)}"
        if most > free:
            used = f", of which other processes use {gib(least.used)}" if least.used > total / 100 else ""
            raise ConfigError(
                f"{facts}{used}: too much for GPU {least.gpu}; give more ranks (trainer.world_size), lower "
                "trainer.micro_batch_size (or give trainer.max_tokens_per_gpu) or engine.gpu_memory, or give "
                "trainer.param_offload and optimizer_offload, or trainer.lora.rank."
            )
        longest = config.data.max_prompt_length + config.response_length
        for part in parts:
            if part.share and part.tokens(total) < longest:
                raise ConfigError(
                    f"engine.gpu_memory={part.share:g}: of {gib(part.share * total)}, weights and activations leave "
                    f"room for {part.tokens(total):,} tokens, and a sample may have {longest:,}; raise it, or give "
                    "engine.tensor_parallel."
                )
        return facts

    def _cpu_memory(self, need: Need) -> str:
        there = cpu_memory()
        what = "copies of weights and optimizer for checkpoints and the engine"
        if need.cpu > there:
            raise ConfigError(
                f"{what} take about {gib(need.cpu)}, and this machine has {gib(there)}; take a machine with more, "
                "several, or checkpoint.every=0."
            )
        return f"about {gib(need.cpu)} of {gib(there)}, for {what}"

    def _some_disk(self) -> str:
        """Checks the disk of a run that saves no model, or one whose size is not known."""
        free = free_disk(Path(self._config.runs))
        if free < _LEAST_DISK:
            raise ConfigError(
                f"runs={self._config.runs}: {gib(free)} are free, which its trace, samples and metrics soon fill; make "
                "room, or give another place."
            )
        return f"{gib(free)} are free"

    def _disk(self, need: Need) -> str:
        checkpoint, free = self._config.checkpoint, free_disk(Path(self._config.runs))
        saved = math.ceil(self._config.steps / checkpoint.every) if checkpoint.every else 0
        often = self._config.steps // checkpoint.keep_every if checkpoint.keep_every else 0
        # A checkpoint is written before an older one is removed.
        kept = min(saved, checkpoint.keep_last + checkpoint.keep_best + often + 1)
        wanted = kept * need.checkpoint + need.model
        of = f"of {gib(need.checkpoint)}"
        what = f"{kept} checkpoints {of}" if kept > 1 else f"a checkpoint {of}" if kept else "no checkpoint"
        facts = f"{what}{f' and a model of at most {gib(need.model)}' if need.model else ''}"
        if wanted > free:
            raise ConfigError(
                f"runs={self._config.runs}: {facts} need {gib(wanted)}, and {gib(free)} are free; make room, give "
                "another place, or lower checkpoint.keep_last."
            )
        return f"{facts}; {gib(free)} are free"
