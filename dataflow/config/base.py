"""The settings that every run has, whatever its pipeline computes.

A pipeline file may define a ``Config``, which derives from :class:`PipelineConfig`, or from
:class:`~dataflow.config.run.RunConfig` if it trains a language model, with further keys or other defaults. An invalid
key or value is a ConfigError: one sentence that names both.
"""

from __future__ import annotations

import dataclasses
import os
from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from dataflow.config.keys import yaml_values
from dataflow.config.section import Section, Text, Texts
from dataflow.errors import ConfigError, PolicyError
from dataflow.system.secrets import redact_values

if TYPE_CHECKING:
    from dataflow.policy import SchedulingPolicy

Backend = Literal["clearml", "console", "file", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
Backends = Annotated[list[Backend], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class PolicyConfig(Section):
    """How the steps overlap; a preset's numbers may be overridden one by one."""

    shorthand = "preset"

    preset: Text = "both"
    """Scheduling policy: baseline, mini-batch, off-policy or both, with the suffix +stream for a rollout that streams;
    or auto, which plans from the run's own trace and changes the policy."""
    split: PositiveInt | None = None
    """Parts in which a step's rewards are collected and used; null takes the preset's."""
    max_staleness: NonNegativeInt | None = None
    """Steps that a sample's weights may be older than those its update starts from; null takes the preset's. With auto
    the most that it may take; null for 1."""
    order: Literal["arrival", "index"] = "arrival"
    """Which groups form a part: the first to be scored, or by index (reproducible bit for bit)."""
    stream_rollout: bool | None = None
    """Submit each group for scoring as soon as it is finished; null takes the preset's, with auto what is faster."""

    @property
    def auto(self) -> bool:
        """Whether the run changes its policy."""
        return self.preset == "auto"

    @property
    def limit(self) -> int:
        """The largest staleness that auto may take."""
        return 1 if self.max_staleness is None else self.max_staleness

    @model_validator(mode="after")
    def _auto_chooses(self) -> Self:
        if self.auto and self.split is not None:
            raise ConfigError(f"policy.split={self.split}: policy=auto chooses the split itself; leave it out.")
        return self

    def resolve(self, mini_batches: int) -> SchedulingPolicy:
        """Returns the preset for ``mini_batches`` optimizer steps per step, with the given numbers overridden.

        For auto, that is the policy of its first step.
        """
        from dataflow.policy import SchedulingPolicy, preset

        base = SchedulingPolicy() if self.auto else preset(self.preset, mini_batches)
        try:
            policy = SchedulingPolicy(
                split=base.split if self.split is None else self.split,
                max_staleness=base.max_staleness if self.max_staleness is None else self.max_staleness,
                order=self.order,
                stream_rollout=base.stream_rollout if self.stream_rollout is None else self.stream_rollout,
            )
        except PolicyError as error:  # begins with the name of the number
            raise PolicyError(f"policy.{error}") from error
        return dataclasses.replace(policy, max_staleness=0) if self.auto else policy


class NodesConfig(Section):
    """The nodes of a cluster that a service runs on."""

    labels: dict[str, Text] = Field(default_factory=dict)
    """Labels that a node must have (ray start --labels); a value may be a selector of Ray's: in(a,b), !a."""


class CheckpointConfig(Section):
    """Checkpoints, from which a run can be resumed."""

    every: NonNegativeInt = 10
    """Steps from one checkpoint to the next; the last step has one, too. 0 saves none."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_best: NonNegativeInt = 1
    """Checkpoints to keep whose step has the best validation."""
    keep_every: NonNegativeInt = 0
    """Also keep the checkpoints of steps that are multiples of this; 0 for none."""
    grace_s: NonNegativeFloat = 30.0
    """Seconds that a checkpoint may take before Ctrl-C or SIGTERM ends the run; 0 saves none."""
    export: bool = True
    """Write the trained model to runs/NAME/model at the end."""


class ResumeConfig(Section):
    """Resumes from the last checkpoint of the run of the same name."""

    shorthand = "mode"

    mode: Literal["never", "auto"] = "never"
    """auto resumes runs/NAME if it exists, from its last whole checkpoint, or without one from the beginning with its
    ledger; never refuses to."""
    allow: Texts = Field(default=[])
    """Keys that may differ from those of the run although they change what it trains on, such as policy; data for other
    rows in the same files, or another tokenizer in the same directory."""


class RayConfig(Section):
    """The Ray cluster."""

    address: Text | None = None
    """Cluster to join (auto finds one); null starts a local one."""
    num_cpus: PositiveInt | None = None
    """CPUs of the local one; null for all that Ray detects."""
    gpus_per_worker: NonNegativeFloat = 0.0
    """GPUs per trainer and rollout process; 0 computes on the CPU."""
    nodes: dict[str, NodesConfig] = Field(default_factory=dict)
    """Nodes that a service (trainer, rollout, reward, critic, controller) or a served reward model has, by its name."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that a service may wait for nodes and GPUs of the cluster, and take to be built."""


class TrackingConfig(Section):
    """Where metrics go, besides the run's metrics.jsonl."""

    backends: Backends = Field(default=["tensorboard"])
    """Backends of verl's Tracking."""
    project: Text = "dataflow"
    """Project name in the backends."""


class BaseConfig(Section):
    """What :class:`PipelineConfig` and :class:`~dataflow.config.run.RunConfig` have in common."""

    @cached_property
    def given_keys(self) -> frozenset[str]:
        """The keys that the user gave, dotted; none of a configuration that is made in Python."""
        return frozenset()  # where arguments or a file are read, they put theirs in place of it

    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    steps: PositiveInt = 30
    """Training steps."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of data order, sampling and generated problems."""
    name: Text | None = None
    """Name of the run and of its directory; null makes one from the pipeline, the policy and a number."""
    runs: Text = "runs"
    """Directory that the runs are written to."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    resume: ResumeConfig = Field(default_factory=ResumeConfig)
    executor: Literal["ray", "inline"] = "ray"
    """Where tasks run: in Ray's processes, or inline in this process, to debug."""
    ray: RayConfig = Field(default_factory=RayConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)

    @property
    @abstractmethod
    def optimizer_steps(self) -> int:
        """Optimizer steps of a training step."""

    @property
    @abstractmethod
    def step_groups(self) -> int | None:
        """Prompt groups that a step trains on; None if the pipeline has none."""

    @property
    def gpus(self) -> int:
        """GPUs of the run; on CPUs the processes in their place."""
        return 1

    @property
    def worker_threads(self) -> int:
        """CPU threads of a worker."""
        return 1

    @property
    def recoveries(self) -> int:
        """How often the run restarts from its last checkpoint after a service died."""
        return 2

    def job(self) -> dict[str, Any]:
        """Returns what a plan must know of a run besides its pipeline, JSON-able."""
        return {"prompts": self.step_groups, "mini_batches": self.optimizer_steps}

    def run_file(self, name: str) -> str | None:
        """Returns the absolute path of a file in the run's directory; None while the run has no name."""
        return str(Path(self.runs, self.name, name).absolute()) if self.name else None

    @field_validator("runs")
    @classmethod
    def _in_the_home_directory(cls, runs: str) -> str:
        return os.path.expanduser(runs)

    @field_validator("name")
    @classmethod
    def _name_a_directory(cls, name: str | None) -> str | None:
        if name is not None and (name in (".", "..") or "/" in name or not name.isprintable() or name != name.strip()):
            raise ValueError("give a plain directory name, without slashes, line breaks and outer spaces")
        return name


class PipelineConfig(BaseConfig):
    """The settings of a pipeline of one's own, which need not train a language model."""

    executor: Literal["ray", "inline"] = "inline"
    """Where tasks run: inline in this process, or in Ray's processes."""
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig(export=False))
    tracking: TrackingConfig = Field(default_factory=lambda: TrackingConfig(backends=[]))
    groups: PositiveInt | None = None
    """Groups of samples in a step, which a policy may split; null if the pipeline has none."""
    mini_batches: PositiveInt = 1
    """Optimizer steps of a training step; must divide groups."""

    @property
    def optimizer_steps(self) -> int:
        return self.mini_batches

    @property
    def step_groups(self) -> int | None:
        return self.groups

    @model_validator(mode="after")
    def _fit_together(self) -> PipelineConfig:
        from dataflow.policy import check_batch

        if self.groups is not None:
            check_batch(self.groups, self.mini_batches)
        self.policy.resolve(self.mini_batches)
        return self


def values_of(config: BaseConfig) -> dict[str, Any]:
    """Returns the whole configuration as JSON can hold it, with the policy's numbers filled in."""
    values = config.model_dump(mode="json")
    if config.policy.auto:
        values["policy"]["max_staleness"] = config.policy.limit
    else:
        values["policy"] |= dataclasses.asdict(config.policy.resolve(config.optimizer_steps))
    return values


def dump_yaml(config: BaseConfig) -> str:
    """Returns the configuration of :func:`values_of` as YAML, its secrets masked."""
    return yaml_values.dump(redact_values(values_of(config)))
