"""Resumes a run that ended: from its directory to a session, and which keys may be changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dataflow.config.base import BaseConfig, values_of
from dataflow.config.loading.saved import CONFIG, Saved
from dataflow.config.reward import sources_of
from dataflow.config.run import RunConfig
from dataflow.errors import ConfigError, counted
from dataflow.rewards.naming import MAIN
from dataflow.running.directory import check_run, check_unlocked
from dataflow.running.preparing.preparation import settle
from dataflow.running.reporting.progress import Progress
from dataflow.running.saving.checkpoints import Checkpoint, CheckpointStore
from dataflow.running.session import Session
from dataflow.running.summary import complete

Made = TypeVar("Made")
MAY_CHANGE = (
    "checkpoint", "engine.api_key_env", "engine.gpu_memory", "engine.kv_cache_gb", "engine.max_num_seqs",
    "engine.replicas", "engine.request_timeout", "engine.request_tries", "engine.restarts", "engine.server_wait",
    "engine.urls", "engine.weights_dir", "executor", "judge.api_key_env", "judge.latency", "judge.max_cost",
    "judge.max_tokens", "judge.price_per_million", "judge.time_scale", "judge.url", "ray",
    "resume", "reward.adaptive", "reward.backoff", "reward.concurrency", "reward.deadline",
    "reward.floor", "reward.frozen_after", "reward.hedge_after", "reward.max_abandoned",
    "reward.max_backoff", "reward.max_failed_share", "reward.restarts", "reward.rpm", "reward.timeout", "reward.tpm",
    "reward.tries", "samples", "steps", "tracking", "trainer.activation_offload", "trainer.max_skipped",
    "trainer.optimizer_offload", "trainer.param_offload", "trainer.restarts", "trainer.threads", "trainer.world_size",
    "val",
)  # fmt: skip
"""Keys and sections that change neither the samples nor what is trained on them."""
MODEL_MAY_CHANGE = (
    "gpu_memory", "max_num_seqs", "placement", "replicas", "restarts", "routing", "start_timeout", "tensor_parallel",
    "url",
)  # fmt: skip
"""The same of a reward model: keys of ``reward.models.NAME``."""


@dataclass(frozen=True)
class Complete:
    """A run that has made all its steps, and the content of its summary.json."""

    directory: Path
    summary: dict[str, Any]

    @property
    def words(self) -> str:
        """A sentence about it."""
        return f"run '{self.directory}' is complete: {counted(self.summary['steps'], 'step')}"


def began(
    module: ModuleType,
    config: BaseConfig,
    overrides: Sequence[str],
    progress: Progress,
    make: Callable[[BaseConfig, ModuleType, Progress, Path | None], Made],
) -> Made | Complete:
    """Returns the session of ``dataflow run``: a new one, or with ``resume=auto`` the one that resumes a run.

    A run that is complete has none, so that a loop which starts a run again and again can end. The overrides are the
    arguments that made the configuration; ``make`` makes the session, or what else is wanted of the run. At a UserError
    nothing has been written or started.
    """
    if config.resume.mode != "auto":
        return make(config, module, progress, None)
    if not config.name:
        raise ConfigError("resume=auto: give name=, by which the run is found again.")
    directory = Path(config.runs, config.name)
    if not (directory / CONFIG).is_file():
        return make(config, module, progress, None)
    after, module, _point, summary = _checked(directory, overrides, progress, module)
    return make(after, module, progress, directory.resolve()) if summary is None else Complete(directory, summary)


def resumed(directory: Path, overrides: Sequence[str], progress: Progress) -> Session:
    """Returns the session that resumes a run from its last checkpoint.

    Args:
        directory: of the run.
        overrides: ``key=value`` arguments that change its configuration.
        progress: shows what happens.

    Raises:
        UserError: one sentence; nothing has been written or started.
    """
    after, module, point, summary = _checked(directory, overrides, progress)
    if summary is not None:
        raise ConfigError(f"{Complete(directory, summary).words}; give a larger steps= to go on.")
    if point is None:
        paid = ", which takes the rewards that its ledger holds" if any(directory.glob("rewards*.sqlite")) else ""
        raise ConfigError(
            f"run '{directory}' has no checkpoint to resume from; begin it again with 'dataflow run' and "
            f"resume=auto{paid}."
        )
    return Session(after, module, progress, directory.resolve())


def _checked(
    directory: Path, overrides: Sequence[str], progress: Progress, module: ModuleType | None = None
) -> tuple[BaseConfig, ModuleType, Checkpoint | None, dict[str, Any] | None]:
    """Returns configuration and pipeline to resume a run with, its newest checkpoint, its summary if it is complete.

    ``module`` is the pipeline that is given once more; None for the one that the run's directory names.
    """
    check_run(directory)
    check_unlocked(directory)
    saved = Saved(directory / CONFIG, module)
    before, after = saved.before(), saved.config(overrides)
    here = directory.resolve()
    given = {arg.partition("=")[0].strip() for arg in overrides}
    if ("name" in given and after.name != here.name) or ("runs" in given and Path(after.runs).resolve() != here.parent):
        raise ConfigError(
            f"name= and runs= cannot move run '{directory}'; leave them out, or copy the directory and resume the copy."
        )
    after.name, after.runs = here.name, str(here.parent)
    settle(after, progress)  # as for the run's own configuration, so that equal arguments are no change
    check_changes(before, after, directory)
    if (summary := complete(directory, after.steps)) is not None:
        return after, saved.module, None, summary
    point = CheckpointStore(directory / "checkpoints").newest()
    if point is not None and point.step > after.steps:
        raise ConfigError(
            f"steps={after.steps}: run '{directory}' has made step {point.step}; give as many steps or more."
        )
    return after, saved.module, point, None


def check_changes(before: BaseConfig, after: BaseConfig, directory: Path) -> None:
    """Checks that a run can be resumed with another configuration; its ``resume.allow`` names more keys to accept."""
    allowed = (*MAY_CHANGE, *_of_agents(after), "name", "runs", *after.resume.allow)
    for key, old, new in changes(values_of(before), values_of(after)):
        if not any(f"{key}.".startswith(f"{name}.") for name in allowed):
            old, new = ("null" if value is None else value for value in (old, new))
            raise ConfigError(
                f"{key}={new}: the run '{directory}' has {key}={old}, and with another value it would be "
                f"another run; leave it out, or allow it with resume.allow=[{key}]."
            )


def _of_agents(config: BaseConfig) -> Iterator[str]:
    """Yields the keys of reward models and of further reward agents that may change: those that may of agent reward."""
    if not isinstance(config, RunConfig):
        return
    for model in config.reward.models:
        yield from (f"reward.models.{model}.{key}" for key in MODEL_MAY_CHANGE)
    of_agent = [key for key in MAY_CHANGE if key.startswith(("reward.", "judge."))]
    for source in sources_of(config):
        if source.name != MAIN:
            yield from (f"{source.name}.{key.removeprefix('reward.')}" for key in of_agent)


def changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted key, old value, new value) of each key that differs."""
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from changes(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", old, new
