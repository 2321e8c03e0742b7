"""The prompts of a run: GSM8K's JSONL, verl's parquet or generated problems, as one batch per step.

Every row is checked and tokenized before the first step. A step's batch depends only on the data, the seed and the
step; the order is verl's.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from loguru import logger

from dataflow.batch import Batch
from dataflow.data.pictures import Shown, opened, with_pictures
from dataflow.data.rows import IMAGES, load_rows, verl_rows
from dataflow.errors import ConfigError, DataError, ModelError, counted
from dataflow.files import sha256_of
from dataflow.models.directory import Room, room_of
from dataflow.models.processor import VISION, Processor, takes_images
from dataflow.models.tokenizer import load_chat_tokenizer, prompt_ids

PROBLEM_SEED = 0
"""Of the generated problems, so that the held-out ones are the same for runs of all seeds."""
_TOGETHER = 1024
"""Chats that are tokenized in one call, which uses all cores."""


class Problems(NamedTuple):
    """Rows of one or more files (or generated ones), their labels in messages, and the name of all."""

    rows: list[dict[str, Any]]
    labels: list[str]
    name: str


def read_problems(data: Any) -> tuple[Problems, Problems]:
    """Returns the training and the held-out problems that section ``data`` names."""
    from dataflow.models.problems import generate

    made = generate(0 if data.train else data.train_size, 0 if data.val else data.val_size, PROBLEM_SEED)
    found = []
    for given, problems, part in zip((data.train, data.val), made, ("train", "held-out"), strict=True):
        if not given:
            name = f"generated {part} problems"
            labels = [f"{name}, row {at}" for at in range(1, len(problems) + 1)]
            found.append(Problems(verl_rows(problems, labels), labels, name))
            continue
        paths = [given] if isinstance(given, str) else given
        files = [load_rows(Path(path).expanduser(), data.image_key) for path in paths]
        rows = [row for of_file, _labels in files for row in of_file]
        labels = [label for _rows, of_file in files for label in of_file]
        found.append(Problems(rows, labels, ", ".join(paths)))
    return found[0], found[1]


def load_prompts(
    config: Any, train: Problems, val: Problems, schemas: Sequence[Mapping[str, Any]] | None = None
) -> tuple[PromptSource, PromptSource]:
    """Returns the prompts of a run, training and held-out; ``model.path`` is a local directory."""
    path, data = config.model.path, config.data
    tokenizer = load_chat_tokenizer(path, data.apply_chat_template_kwargs)
    processor = Processor(path, data.apply_chat_template_kwargs) if takes_images(path) else None
    train_source, val_source = (
        PromptSource(problems, tokenizer, data, config.seed, size, schemas, processor)
        for problems, size in ((train, data.prompts + config.extra_groups), (val, 1))
    )
    train_source.check_fits(room_of(path), config.response_length, config.trainer.max_tokens_per_gpu)
    val_source.check_fits(room_of(path), config.response_length)
    return train_source, val_source


@dataclass
class _Prompt:
    """A row with its label in messages and its token ids, int32; ``cut`` if ``data.truncation`` has shortened them."""

    row: Mapping[str, Any]
    label: str
    ids: np.ndarray
    cut: bool = False


class PromptSource:
    """Draws the prompts of each step from problems, in an order given by the seed.

    Args:
        problems: in verl's schema.
        tokenizer: with a chat template.
        data: the options ``max_prompt_length``, ``truncation``, ``filter_overlong_prompts``, ``shuffle``.
        seed: of the order.
        prompts: number per step.
        schemas: JSON schemas of the tools that the chat template describes in each prompt.
        processor: of a model that takes images; None for another.

    Raises:
        DataError: a prompt has images that cannot be read or that the model does not take; it is too long (or all are,
            if long ones are dropped); or there are too few for a step.
    """

    def __init__(
        self,
        problems: Problems,
        tokenizer: Any,
        data: Any,
        seed: int,
        prompts: int,
        schemas: Sequence[Mapping[str, Any]] | None = None,
        processor: Processor | None = None,
    ) -> None:
        self.name = problems.name
        self._seed, self._shuffle, self._size = seed, data.shuffle, prompts
        self._processor = processor
        ids = self._tokenized(problems, tokenizer, schemas)
        whole = [_Prompt(*each) for each in zip(problems.rows, problems.labels, ids, strict=True)]
        self._prompts = self._fitting(whole, data)
        if len(self) < prompts:
            raise DataError(
                f"{self.name}: {len(self)} prompts are fewer than the {prompts} of a step; give more data or a smaller "
                "data.prompts."
            )
        self._cut = any(prompt.cut for prompt in self._prompts)
        self._epoch = -1  # the one whose order is known
        self._order: Sequence[int] = range(len(self))
        self._generator: Any = None

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max((len(prompt.ids) for prompt in self._prompts), default=0)

    def digests(self, limit: int | None = None) -> tuple[str, str]:
        """Returns the SHA-256 of the first ``limit`` rows that were kept, images included, and of their token ids."""
        content, tokens = hashlib.sha256(), hashlib.sha256()
        for prompt in self._prompts[:limit]:
            # A text has one representation, unlike a pickle of it.
            content.update(repr({name: value for name, value in prompt.row.items() if name != IMAGES}).encode())
            for image in prompt.row.get(IMAGES) or ():
                content.update(image.get("bytes") or sha256_of(image["path"]).encode())
            tokens.update(len(prompt.ids).to_bytes(4) + prompt.ids.tobytes())
        return content.hexdigest(), tokens.hexdigest()

    def check_fits(self, room: Room, response: int, most: int | None = None) -> None:
        """Checks that the model can read each prompt with a response of up to ``response`` tokens.

        ``most`` tokens fit into one pass of the trainer; None for any number.
        """
        prompt = max(self._prompts, key=lambda each: len(each.ids))
        whole = len(prompt.ids) + response
        needs = (
            f"{prompt.label}: the prompt's {len(prompt.ids)} tokens and a response of up to {response} are more than"
        )
        if room.positions is not None and whole > room.positions:
            raise DataError(
                f"{needs} the {room.positions} tokens that the model can read; lower engine.max_tokens (or "
                "tools.max_response_tokens), or cut prompts with data.max_prompt_length and data.truncation."
            )
        if most is not None and whole > most:
            raise ConfigError(f"trainer.max_tokens_per_gpu={most}: {needs} one pass takes; give at least {whole}.")
        highest = max(int(each.ids.max(initial=0)) for each in self._prompts)
        if room.vocabulary is not None and highest >= room.vocabulary:
            raise ModelError(
                f"{self.name}: the tokenizer gives token {highest}, but the model has only {room.vocabulary} "
                "(vocab_size in its config.json); take both from one model."
            )

    def _tokenized(
        self, problems: Problems, tokenizer: Any, schemas: Sequence[Mapping[str, Any]] | None
    ) -> list[np.ndarray]:
        """Returns each row's token ids, int32."""
        found: list[np.ndarray] = []
        for begin in range(0, len(problems.rows), _TOGETHER):
            rows, labels = problems.rows[begin : begin + _TOGETHER], problems.labels[begin : begin + _TOGETHER]
            seen = [self._seen(row, label) for row, label in zip(rows, labels, strict=True)]
            try:
                if self._processor is not None:
                    ids = [self._processor.inputs(chat, pictures)[0] for chat, pictures in seen]
                else:
                    ids = prompt_ids(tokenizer, [chat for chat, _pictures in seen], schemas)
            # A chat template is a program that comes with the model; it may refuse roles and raise anything.
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
                raise DataError(
                    f"{labels[0]}: the model's chat template cannot write this prompt, or one of the {len(rows) - 1} "
                    f"after it ({reason}); give other prompts or another model."
                ) from error
            found += [np.array(each, dtype=np.int32) for each in ids]
        return found

    def _seen(self, row: Mapping[str, Any], label: str) -> tuple[list[dict[str, Any]], list[Any]]:
        """Returns the messages of a row with its images in their places, and the images."""
        images = row.get(IMAGES)
        if not images:
            return [dict(message) for message in row["prompt"]], []
        if self._processor is None:
            raise DataError(
                f"{label}: the prompt has images, which the model does not take; give model.path a model with a "
                f"processor of images ({', '.join(VISION)}), or leave out the column."
            )
        pictures = opened(images, label)
        return with_pictures(row["prompt"], pictures), pictures

    def _fitting(self, prompts: list[_Prompt], data: Any) -> list[_Prompt]:
        """Returns the prompts with at most ``data.max_prompt_length`` tokens; drops, cuts or refuses longer ones."""
        limit = data.max_prompt_length
        long = [prompt for prompt in prompts if len(prompt.ids) > limit]
        if long and data.filter_overlong_prompts:
            if len(long) == len(prompts):
                raise DataError(f"{self.name}: every prompt is longer than data.max_prompt_length={limit} tokens.")
            logger.info(f"{self.name}: left out {len(long)} of {counted(len(prompts), 'prompt')} over {limit} tokens")
            return [prompt for prompt in prompts if len(prompt.ids) <= limit]
        shows = [prompt for prompt in long if prompt.row.get(IMAGES)]
        if long and (shows or data.truncation == "error"):
            first = (shows or long)[0]
            fix = "data.filter_overlong_prompts=true"
            fix = f"{fix}, as an image cannot be cut" if shows else f"data.truncation=left|right|middle or {fix}"
            raise DataError(
                f"{first.label}: the prompt has {len(first.ids)} tokens, more than data.max_prompt_length={limit} (as "
                f"have {len(long)} of {len(prompts)}); raise it, or set {fix}."
            )
        for prompt in long:
            prompt.ids, prompt.cut = truncate(prompt.ids, limit, data.truncation), True
        return prompts

    def batch(self, step: int) -> Batch:
        """Returns the prompts of a step; each epoch drops its last rows if they do not fill a step.

        Args:
            step: counts from 1.

        Returns:
            ``prompts`` rows, each a group of its own (0, 1, ...), with columns ``raw_prompt`` (chat
            messages), ``prompt_ids`` (token ids, unpadded), ``data_source``, ``ground_truth`` and
            ``extra_info``; for a model that takes images also ``multi_modal_inputs``
            (:class:`~dataflow.data.pictures.Shown`), and the messages of a prompt with images have parts
            ``{"type": "image", "image": ...}`` with PIL's images, as verl's do. Where ``data.truncation`` has cut a
            prompt of the data, ``prompt_truncated`` says which.
        """
        epoch, at = divmod(step - 1, len(self) // self._size)
        if self._shuffle and epoch != self._epoch:
            self._draw(epoch)
        return self._batch(self._order[at * self._size : (at + 1) * self._size])

    def _draw(self, epoch: int) -> None:
        """Draws the order of an epoch: that of torch's random sampler, which verl uses, with the same seed."""
        import torch

        if epoch < self._epoch or self._generator is None:
            self._generator, self._epoch = torch.Generator().manual_seed(self._seed), -1
        while self._epoch < epoch:
            self._order = torch.randperm(len(self), generator=self._generator).tolist()
            self._epoch += 1

    def all(self, limit: int | None = None) -> Batch:
        """Returns the first ``limit`` prompts (all if None) in the order of the file; see :meth:`batch`."""
        return self._batch(range(len(self))[:limit])

    def _batch(self, at: Sequence[int]) -> Batch:
        prompts = [self._prompts[number] for number in at]
        seen = [self._seen(prompt.row, prompt.label) for prompt in prompts]
        more: dict[str, Any] = {}
        if self._cut:
            more["prompt_truncated"] = [prompt.cut for prompt in prompts]
        if self._processor is not None:
            # Pixels are made for each step anew: those of all rows would take more memory than the model.
            read = [self._processor.inputs(chat, pictures) for chat, pictures in seen]
            more["multi_modal_inputs"] = [Shown(inputs, positions) for _ids, inputs, positions in read]
        return Batch(
            range(len(prompts)),
            {
                "raw_prompt": [chat for chat, _pictures in seen],
                "prompt_ids": [prompt.ids.tolist() for prompt in prompts],
                "data_source": [prompt.row["data_source"] for prompt in prompts],
                "ground_truth": [truth_of(prompt.row) for prompt in prompts],
                # A parquet file gives every row the keys of all rows, with None for missing values.
                "extra_info": [_given(copy.deepcopy(prompt.row.get("extra_info") or {})) for prompt in prompts],
                **more,
            },
        )


def truncate(ids: np.ndarray, limit: int, side: str) -> np.ndarray:
    """Returns ``limit`` tokens: the last ones (left), the first ones (right), or both ends (middle).

    >>> truncate(np.arange(5), 3, "left").tolist(), truncate(np.arange(5), 3, "middle").tolist()
    ([2, 3, 4], [0, 3, 4])
    """
    head = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])


def truth_of(row: Mapping[str, Any]) -> Any:
    """Returns a row's reference as rewards get it: text, or as in verl a list or dict of what the data has."""
    value = copy.deepcopy(row["reward_model"]["ground_truth"])
    if isinstance(value, Mapping):
        return _given(value)
    return value if isinstance(value, list) else str(value)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
