"""The prompts of a run that trains a language model, read and tokenized, with the checks of its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.config.run import RunConfig
from dataflow.errors import ConfigError, DataError, counted
from dataflow.rewards.managers import build_manager, scores_alone
from dataflow.runner import Ahead

if TYPE_CHECKING:
    from dataflow.data.prompts import Problems, PromptSource
    from dataflow.tools import Toolbox

_TRUTHS = 100
"""Rows that are checked, at most."""


class Data:
    """The prompts of a run.

    Attributes:
        problems: the training and the held-out ones, once they are read.
        toolbox: the tools that the run offers, if any, once they are checked.
    """

    def __init__(self) -> None:
        self._sources: tuple[PromptSource, PromptSource] | None = None
        self.problems: tuple[Problems, Problems] | None = None
        self.toolbox: Toolbox | None = None

    def read(self, config: RunConfig) -> str:
        """Reads the files, or makes the problems."""
        from dataflow.data.prompts import read_problems

        self.problems = train, val = read_problems(config.data)
        return f"{train.name}: {counted(len(train.rows), 'row')}; {val.name}: {len(val.rows):,}"

    def tokenize(self, config: RunConfig) -> str:
        """Makes the prompts, with the model's chat template."""
        from dataflow.data.prompts import load_prompts
        from dataflow.tools import toolbox_of

        assert self.problems is not None
        if config.tools.offered:
            self.toolbox = toolbox_of(config).check_model()
        schemas = None if self.toolbox is None else self.toolbox.schemas
        self._sources = load_prompts(config, *self.problems, schemas)
        most = max(source.longest for source in self._sources)
        return f"up to {most:,} tokens (data.max_prompt_length={config.data.max_prompt_length})"

    def fields(self, config: RunConfig) -> dict[str, Callable[[int], Any]]:
        """Returns the fields ``prompts`` and ``val_prompts``, each a function of the step."""
        assert self._sources is not None
        train, held_out = self._sources
        val = held_out.all(config.data.val_size) if config.val.every else None
        return {"prompts": Ahead(train.batch), "val_prompts": lambda step: val}

    def digests(self, config: RunConfig) -> dict[str, str]:
        """Returns hashes of what decides which samples a step or an evaluation has, by the key that gives it."""
        from dataflow.models.tokenizer import tokenizer_sha256

        assert self._sources is not None
        train, held_out = self._sources
        found = {"model.path": tokenizer_sha256(str(config.model.path))}
        found["data.train"], found["data.train token ids"] = train.digests()
        if config.val.every:
            found["data.val"], found["data.val token ids"] = held_out.digests(config.data.val_size)
        return found


def check_same(recorded: Mapping[str, str], found: Mapping[str, str], config: RunConfig, directory: Path) -> None:
    """Checks that a run is resumed with the data that it was begun with.

    Args:
        recorded: what :meth:`Data.digests` returned then.
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


def check_truths(config: RunConfig, train: Problems, val: Problems) -> None:
    """Checks that the first rows are of the form that the reward manager needs, if it scores without a function.

    Single bad rows are left to the failure rule; if all are bad, the data is another. The held-out problems count if
    the run evaluates on them.

    Raises:
        DataError: none of them can be scored.
    """
    from dataflow.data.prompts import truth_of

    options = config.reward
    if not scores_alone(options.manager, options.manager_path):
        return
    manager = build_manager(options.manager, None, **options.manager_kwargs)
    if not hasattr(manager, "check_truth"):
        return
    for problems, most in ((train, _TRUTHS), (val, min(_TRUTHS, config.data.val_size) if config.val.every else 0)):
        first: DataError | None = None
        for row in problems.rows[:most]:
            try:
                manager.check_truth(truth_of(row))
                break
            except DataError as error:
                first = first or error
        else:
            if first is not None:
                raise DataError(
                    f"{problems.labels[0]}: reward.manager={options.manager}: {first}; "
                    f"{getattr(first, 'fix', 'give other data')}."
                ) from first
