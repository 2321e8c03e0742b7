"""The prompts of a run that trains a language model, with the checks of its data and model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from dataflow.config.base import BaseConfig
from dataflow.config.run import ModelConfig, RunConfig
from dataflow.config.training.critic import CriticConfig
from dataflow.errors import ConfigError, DataError, NotChecked, counted
from dataflow.models.directory import check_model, check_weights
from dataflow.models.processor import takes_images
from dataflow.rewards.failure import FailureRule, parse_rule
from dataflow.rewards.managers import build_manager, scores_alone
from dataflow.rewards.naming import MAIN
from dataflow.runner import Ahead
from dataflow.running.preparing.check import Check, Checks
from dataflow.running.reporting.progress import Progress
from dataflow.running.services.hosting import check_room, circumstances

if TYPE_CHECKING:
    from dataflow.data.prompts import Problems, PromptSource
    from dataflow.tools import Toolbox

_TRUTHS = 100
"""Rows that are checked, at most."""


class Prompts:
    """The prompts of a run: its data is read and its model settled first, before other inputs are made.

    Args:
        config: of the run; its model is settled.
        hosts: names of its services.
        progress: shows the warm-up of the default model.

    Attributes:
        problems: the training and the held-out ones, once they are read.
        toolbox: the tools that the run offers, if any, once they are checked.
        settled: whether the models are there.
    """

    FIELDS = ("prompts", "val_prompts")

    def __init__(self, config: RunConfig, hosts: Collection[str], progress: Progress) -> None:
        self._config, self._hosts, self._progress = config, hosts, progress
        self._sources: tuple[PromptSource, PromptSource] | None = None
        self.problems: tuple[Problems, Problems] | None = None
        self.toolbox: Toolbox | None = None
        self.settled = False

    def checks(self) -> Checks:
        """Yields the checks of data and model."""
        # Before the warm-up, which takes a minute, so that an invalid data file fails at once.
        yield Check("data", self._read)
        if MAIN in self._hosts:
            yield Check("references", self._check_truths, ("data",))
        yield Check("model", self._settle)
        yield Check("images", lambda: check_images(self._with_model()), ("model",))
        if "rollout" in self._hosts:
            yield Check("lengths", lambda: check_room(self._with_model()), ("model",))

    def made(self) -> Checks:
        """Yields the checks of the prompts and of the model's weights, after those of :meth:`checks`."""
        yield Check("prompts", self._tokenize)
        yield Check("weights", self._check_weights, ("model",))

    def _with_model(self) -> RunConfig:
        """Returns the configuration once its models are there."""
        if not self.settled:
            raise NotChecked("it needs the model, which is not there")
        return self._config

    def _check_truths(self) -> list[str]:
        assert self.problems is not None
        return check_truths(self._config, *self.problems)

    def _read(self) -> str:
        from dataflow.data.prompts import read_problems

        self.problems = read_problems(self._config.data)
        train, val = self.problems
        return f"{train.name}: {counted(len(train.rows), 'row')}; {val.name}: {len(val.rows):,}"

    def _settle(self) -> str:
        settle_models(self._config, self._progress)
        self.settled = True
        return str(self._config.model.path)

    def _tokenize(self) -> str:
        from dataflow.data.prompts import load_prompts
        from dataflow.tools import toolbox_of

        config = self._config
        if self.problems is None or not self.settled:
            raise NotChecked("their length needs the data and the model's tokenizer")
        if config.tools.offered:
            self.toolbox = toolbox_of(config).check_model()
        schemas = None if self.toolbox is None else self.toolbox.schemas
        self._sources = load_prompts(config, *self.problems, schemas)
        most = max(source.longest for source in self._sources)
        return f"up to {most:,} tokens (data.max_prompt_length={config.data.max_prompt_length})"

    def _check_weights(self) -> str:
        check_weights(Path(self._with_model().model.path or ""))
        return "they are those of the model's architecture"

    @property
    def tokenized(self) -> bool:
        """Whether the prompts are there."""
        return self._sources is not None

    def fields(self) -> dict[str, Callable[[int], Any]]:
        """Returns the fields ``prompts`` and ``val_prompts``, each a function of the step."""
        assert self._sources is not None
        train, held_out = self._sources
        config = self._config
        val = held_out.all(config.data.val_size) if config.val.every else None
        return {"prompts": Ahead(train.batch), "val_prompts": lambda step: val}

    def digests(self) -> dict[str, str]:
        """Returns hashes of what decides which samples a step or an evaluation has, by the key that gives it."""
        from dataflow.models.tokenizer import tokenizer_sha256

        assert self._sources is not None
        train, held_out = self._sources
        config, found = self._config, {"model.path": tokenizer_sha256(str(self._config.model.path))}
        found["data.train"], found["data.train token ids"] = train.digests()
        if config.val.every:
            found["data.val"], found["data.val token ids"] = held_out.digests(config.data.val_size)
        return found


def check_same(recorded: Mapping[str, str], found: Mapping[str, str], config: RunConfig, directory: Path) -> None:
    """Checks that a run is resumed with the data that it was begun with.

    Args:
        recorded: what :meth:`Prompts.digests` returned then.
        found: what it returns now.
        config: of the resumed run.
        directory: of the run.

    Raises:
        ConfigError: something differs that ``resume.allow`` does not name.
    """
    for name, digest in found.items():
        key, _, of = name.partition(" ")
        if recorded.get(name, digest) == digest or {"data", key, key.split(".")[0]}.intersection(config.resume.allow):
            continue
        given = config.model.path if key == "model.path" else getattr(config.data, key.partition(".")[2])
        what = "tokenizer, chat template and configuration" if key == "model.path" else of or "rows"
        raise ConfigError(
            f"{key}={'null' if given is None else given}: its {what} are not those that the run '{directory}' was "
            "begun with, and with others it would be another run; put them back, or allow it with resume.allow=[data]."
        )


def check_truths(config: RunConfig, train: Problems, val: Problems) -> list[str]:
    """Checks that the data is of the form that the reward manager needs, if it scores without a function.

    Single bad rows are left to the failure rule, and a sentence that is returned names one; if the first ones all are
    bad, the data is another. The held-out problems count if the run evaluates on them.

    Raises:
        DataError: it is not.
    """
    options = config.reward
    if not scores_alone(options.manager, options.manager_path):
        return []
    manager = build_manager(options.manager, None, **options.manager_kwargs)
    if not hasattr(manager, "check_truth"):
        return []
    rule = parse_rule(options.on_failure)
    found = _check_truths(manager, options.manager, train, None if config.data.train else "give data.train=FILE", rule)
    if config.val.every:
        made = None if config.data.val else "give data.val=FILE, or val.every=0 to evaluate nothing"
        held_out = val._replace(rows=val.rows[: config.data.val_size])
        found += _check_truths(manager, options.manager, held_out, made, rule.for_validation())
    return found


def _check_truths(manager: Any, name: str, problems: Problems, made: str | None, rule: FailureRule) -> list[str]:
    """Checks the first rows of one part of the data; returns a sentence if some are bad.

    Args:
        manager: with ``check_truth``.
        name: of the manager.
        problems: of this part.
        made: what to do if the rows are generated ones, which no file gave; None for those of a file.
        rule: what happens to single bad rows.

    Raises:
        DataError: they all are of another form.
    """
    from dataflow.data.prompts import truth_of

    rows, bad = problems.rows[:_TRUTHS], []
    for at, row in enumerate(rows):
        try:
            manager.check_truth(truth_of(row))
        except DataError as error:
            bad.append((at, error))
    if not bad:
        return []
    at, first = bad[0]
    problem = f"{problems.labels[at]}: reward.manager={name}: {first}"
    if len(bad) == len(rows):
        fix = getattr(first, "fix", "give other data")
        raise DataError(f"{problem}; {fix if made is None else f'the row is a generated one: {made}'}.") from first
    return [
        f"{problem}. Of the first {len(rows)} rows, {len(bad)} cannot be scored; they end by reward.on_failure={rule}."
    ]


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


def settle_models(config: RunConfig, progress: Progress) -> None:
    """Does so with the actor, and with a teacher, and chooses the engine."""
    from dataflow.engines.choice import rollout_engine, why_transformers
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
    if config.engine.rollout == "http":
        raise ConfigError(f"engine.rollout=http: {takes}, which are not sent to servers yet; use engine.rollout=vllm.")
    if config.tools.offered:
        raise ConfigError(f"tools: {takes}, and conversations cannot show any yet; leave out the tools.")
    for name in type(config).model_fields:
        if name in ("critic", "teacher"):
            raise ConfigError(f"{name}: {takes}, and a {name} cannot read them yet; give a model of text.")
