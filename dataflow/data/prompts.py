"""The prompts of a run: GSM8K's JSONL, verl's parquet or generated problems, as one batch per step.

Every row is checked and measured before the first step. A step's batch depends only on the data, the seed and the step;
the order is verl's.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from loguru import logger

from dataflow.batch import Batch
from dataflow.data.chats import ChatProcess, Chats, Refused, chats_of
from dataflow.data.order import steps
from dataflow.data.pictures import opened, with_pictures
from dataflow.data.rows import IMAGES, first_line, load_rows, verl_rows
from dataflow.data.shown import Shown
from dataflow.data.tokenize import DESCRIBED, truncate
from dataflow.errors import ConfigError, DataError, ModelError, counted
from dataflow.files import sha256_of
from dataflow.models.directory import Room, room_of
from dataflow.models.processor import VISION, Processor, takes_images
from dataflow.usercode.copies import own_copy

_LEAST_CHARACTERS = 2**16
"""Prompts of fewer characters are always tokenized, as a tokenizer may drop or join characters."""

# Problems are generated from a fixed seed, so that the held-out ones are the same for runs of all seeds.
PROBLEM_SEED = 0


class Problems(NamedTuple):
    """Rows of one file (or generated ones), their labels in messages, and the file's name."""

    rows: list[dict[str, Any]]
    labels: list[str] | None
    name: str


def read_problems(data: Any) -> tuple[Problems, Problems]:
    """Returns the training and the held-out problems that section ``data`` names.

    Raises:
        DataError: a file is missing or holds a bad row.
    """
    if not data.train or not data.val:
        from dataflow.models.problems import generate

        made = generate(0 if data.train else data.train_size, 0 if data.val else data.val_size, PROBLEM_SEED)
    found = []
    for part, given in enumerate((data.train, data.val)):
        if not given:
            name = f"generated {'held-out' if part else 'train'} problems"
            found.append(Problems(verl_rows(made[part], name), None, name))
            continue
        rows, labels = [], []
        paths = [given] if isinstance(given, str) else given
        for path in paths:
            of_file, its_labels = load_rows(Path(path).expanduser(), data.image_key)
            rows += of_file
            labels += its_labels
        found.append(Problems(rows, labels, ", ".join(paths)))
    return found[0], found[1]


def load_prompts(
    config: Any,
    train: Problems,
    val: Problems,
    schemas: Sequence[Mapping[str, Any]] | None = None,
    chats: ChatProcess | None = None,
) -> tuple[PromptSource, PromptSource]:
    """Returns the prompts of a run, training and held-out.

    Args:
        config: a RunConfig whose ``model.path`` is a local directory.
        train, val: the problems.
        schemas: JSON schemas of the tools that the chat template describes in each prompt; None without tools.
        chats: the process of the model's tokenizer, which the caller ends; None starts one if it is needed.

    Raises:
        ConfigError: a prompt with the longest response does not fit into one pass of the trainer.
        DataError: a prompt is too long, or there are too few.
        ModelError: the tokenizer cannot be loaded or has no chat template.
    """
    room = (room_of(config.model.path), config.response_length)
    options = config.data.apply_chat_template_kwargs
    processor = Processor(config.model.path, options) if takes_images(config.model.path) else None
    of = [(train, config.data.prompts + config.extra_groups), (val, 1)]
    with contextlib.ExitStack() as stack:
        reader = chats or chats_of(config.model.path, options)
        if isinstance(reader, ChatProcess) and reader is not chats:
            stack.enter_context(reader)
        sources = [
            PromptSource(p.rows, reader, config.data, config.seed, n, p.name, p.labels, schemas, room, processor)
            for p, n in of
        ]
    if (most := config.trainer.max_tokens_per_gpu) is not None:
        sources[0].check_pass(most, config.response_length)
    return sources[0], sources[1]


class PromptSource:
    """Draws the prompts of each step from rows, in an order given by the seed.

    Args:
        rows: in verl's schema.
        tokenizer: with a chat template, or what turns chats into ids with one.
        data: the options ``max_prompt_length``, ``truncation``, ``filter_overlong_prompts``, ``shuffle``.
        seed: of the order.
        prompts: number per step.
        name: of the file, for messages.
        labels: of the rows, for messages; their numbers if None.
        schemas: JSON schemas of the tools that the chat template describes in each prompt.
        room: positions and vocabulary of the model, and the longest response in tokens.
        processor: of a model that takes images; None for another.

    Raises:
        DataError: a prompt has images that cannot be read or that the model does not take; it is too long (or all are,
            if long ones are dropped); or there are too few for a step.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        tokenizer: Any,
        data: Any,
        seed: int,
        prompts: int,
        name: str = "data",
        labels: Sequence[str] | None = None,
        schemas: Sequence[Mapping[str, Any]] | None = None,
        room: tuple[Room, int] = (Room(None, None), 0),
        processor: Processor | None = None,
    ) -> None:
        self.name = name
        self._labels = labels
        self._seed, self._shuffle, self._prompts = seed, data.shuffle, prompts
        self._uncounted: set[int] = set()
        self._cut: set[int] = set()
        self._processor = processor
        self._meta = {DESCRIBED: True} if schemas else {}
        self._shows = [bool(row.get(IMAGES)) for row in rows]
        chats = tokenizer if isinstance(tokenizer, Chats | ChatProcess) else Chats(tokenizer)
        ids = self._tokenized(rows, chats, data, schemas)
        kept = self._fit(ids, data)
        self.rows = [rows[i] for i in kept]
        self._ids = [ids[i] for i in kept]
        self._origin = [self._label(i) for i in kept]
        self._check_room(kept, *room)
        if len(self.rows) < prompts:
            raise DataError(
                f"{name}: {len(self.rows)} prompts are fewer than the {prompts} of a step; give more data "
                "or a smaller data.prompts."
            )
        self._batches: Iterator[list[int]] = iter(())
        self._step = 0
        self._last: Batch | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self._ids), default=0)

    def digests(self, limit: int | None = None) -> tuple[str, str]:
        """Returns the SHA-256 of the first ``limit`` rows that were kept, images included, and of their token ids.

        It takes some seconds a gigabyte, a small part of what reading and tokenizing them takes.
        """
        content, tokens = hashlib.sha256(), hashlib.sha256()
        for row, ids in zip(self.rows[:limit], self._ids[:limit], strict=True):
            images = row.get(IMAGES) or ()
            # A text has one representation, unlike a pickle of it. Half a surrogate pair has no UTF-8.
            text = repr({name: value for name, value in row.items() if name != IMAGES})
            content.update(text.encode(errors="backslashreplace"))
            for image in images:
                content.update(image.get("bytes") or sha256_of(image["path"]).encode())
            tokens.update(len(ids).to_bytes(4) + ids.tobytes())
        return content.hexdigest(), tokens.hexdigest()

    def check_pass(self, most: int, response: int) -> None:
        """Checks that each prompt fits into one pass of the trainer, with a response of up to ``response`` tokens.

        Raises:
            ConfigError: one does not.
        """
        longest = max(range(len(self._ids)), key=lambda row: len(self._ids[row]), default=None)
        if longest is None or (tokens := len(self._ids[longest])) + response <= most:
            return
        raise ConfigError(
            f"trainer.max_tokens_per_gpu={most}: {self._origin[longest]}: the prompt's {tokens} tokens and a response "
            f"of up to {response} are more than one pass takes; give at least {tokens + response}."
        )

    def _label(self, row: int) -> str:
        return self._labels[row] if self._labels else f"{self.name}, row {row + 1}"

    def _check_room(self, kept: Sequence[int], room: Room, response: int) -> None:
        highest = np.concatenate([np.zeros(1, dtype=np.int32), *self._ids]).max()
        most = highest if room.vocabulary is None else room.vocabulary - 1
        for row, ids in zip(kept, self._ids, strict=True):
            if room.positions is not None and len(ids) + response > room.positions:
                raise DataError(
                    f"{self._label(row)}: the prompt's {len(ids)} tokens and a response of up to {response} are more "
                    f"than the {room.positions} tokens that the model can read; lower engine.max_tokens (or "
                    "tools.max_response_tokens), or cut prompts with data.max_prompt_length and data.truncation."
                )
            if most < highest and ids.max(initial=0) > most:
                raise ModelError(
                    f"{self._label(row)}: the tokenizer gives token {ids.max()}, but the model has only "
                    f"{room.vocabulary} (vocab_size in its config.json); take both from one model."
                )

    def _tokenized(
        self,
        rows: Sequence[dict[str, Any]],
        chats: Chats | ChatProcess,
        data: Any,
        schemas: Sequence[Mapping[str, Any]] | None,
    ) -> list[np.ndarray]:
        """Returns each row's token ids, int32; a row with too many characters gets limit + 1 zeros.

        Raises:
            DataError: the chat template refuses a row.
        """
        limit = data.max_prompt_length
        # Tokenizing a million characters takes 6 seconds; the number of characters shows that they are too many.
        most = max(_LEAST_CHARACTERS, limit * chats.longest_token())
        cut = data.truncation != "error" and not data.filter_overlong_prompts
        found = [np.zeros(limit + 1, dtype=np.int32)] * len(rows)
        seen: dict[int, list[dict[str, Any]]] = {}
        for at, row in enumerate(rows):
            if not cut and sum(len(str(message["content"])) for message in row["prompt"]) > most:
                self._uncounted.add(at)
                continue
            seen[at], pictures = self._seen(row, self._label(at))
            if self._processor is not None:
                try:
                    found[at] = np.array(self._processor.inputs(seen[at], pictures)[0], dtype=np.int32)
                except Exception as error:  # of the chat template, as of a text's
                    raise self._refused(at, f"{type(error).__name__}: {first_line(error).rstrip('.')}") from error
        if self._processor is None:
            try:
                for at, ids in zip(seen, chats.ids(list(seen.values()), schemas), strict=True):
                    found[at] = ids
            except Refused as error:
                raise self._refused(list(seen)[error.at], error.reason) from error
        return found

    def _refused(self, at: int, reason: str) -> DataError:
        return DataError(
            f"{self._label(at)}: the model's chat template cannot write this prompt ({reason}); give another prompt or "
            "model."
        )

    def _seen(self, row: Mapping[str, Any], label: str) -> tuple[list[dict[str, Any]], list[Any]]:
        """Returns the messages of a row with its images in their places, and the images.

        Raises:
            DataError: the model takes no images, or one cannot be read.
        """
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

    def _fit(self, ids: list[np.ndarray], data: Any) -> list[int]:
        """Truncates overlong prompts in place or drops them; returns the indices of the remaining rows."""
        limit = data.max_prompt_length
        long = [i for i, tokens in enumerate(ids) if len(tokens) > limit]
        if not long:
            return list(range(len(ids)))
        if data.filter_overlong_prompts:
            if len(long) == len(ids):
                raise DataError(f"{self.name}: every prompt is longer than data.max_prompt_length={limit} tokens.")
            logger.info(f"{self.name}: left out {len(long)} of {counted(len(ids), 'prompt')} over {limit} tokens")
            gone = set(long)
            return [i for i in range(len(ids)) if i not in gone]
        shows = next((i for i in long if self._shows[i]), None)
        if shows is not None and data.truncation != "error":
            raise DataError(
                f"{self._label(shows)}: the prompt has {len(ids[shows])} tokens with those of its images, more than "
                f"data.max_prompt_length={limit}, and an image cannot be cut; raise it, or set "
                "data.filter_overlong_prompts=true."
            )
        if data.truncation == "error":
            longest = max(len(ids[i]) for i in long)
            least = "over " if self._uncounted.intersection(long) else ""
            longest -= bool(least)
            cut = "" if shows is not None else "data.truncation=left|right|middle or "
            first = f"over {limit}" if long[0] in self._uncounted else str(len(ids[long[0]]))
            raise DataError(
                f"{self._label(long[0])}: the prompt has {first} tokens, more than data.max_prompt_length={limit} "
                f"(as have {len(long)} of {len(ids)}, the longest {least}{longest}); raise it, or set "
                f"{cut}data.filter_overlong_prompts=true."
            )
        self._cut.update(long)
        for i in long:
            ids[i] = np.array(truncate(ids[i].tolist(), limit, data.truncation), dtype=np.int32)
        return list(range(len(ids)))

    def batch(self, step: int) -> Batch:
        """Returns the prompts of a step; each epoch drops its last rows if they do not fill a step.

        Args:
            step: counts from 1. Steps in order read one batch each; any other order reads from the start.

        Returns:
            ``prompts`` rows, each a group of its own (0, 1, ...), with columns ``raw_prompt`` (chat
            messages), ``prompt_ids`` (token ids, unpadded), ``data_source``, ``ground_truth`` and
            ``extra_info``; for a model that takes images also ``multi_modal_inputs``
            (:class:`~dataflow.data.shown.Shown`), and the messages of a prompt with images have parts
            ``{"type": "image", "image": ...}`` with PIL's images, as verl's do. Where ``data.truncation`` has cut a
            prompt of the data, ``prompt_truncated`` says which.

        Raises:
            DataError: ``step`` is below 1.
        """
        if step < 1:
            raise DataError(f"{self.name}: steps count from 1, there is no step {step}.")
        if self._last is None or step != self._step:
            if step <= self._step or self._last is None:
                seed = self._seed if self._shuffle else None
                self._batches, self._step = steps(len(self), self._prompts, seed), 0
            # A resumed run starts in the middle: reading the earlier steps again needs no state on disk.
            while self._step < step:
                drawn = next(self._batches)
                self._step += 1
            self._last = self._batch(drawn)
        return self._last

    def all(self, limit: int | None = None) -> Batch:
        """Returns the first ``limit`` prompts (all if None) in the order of the file; see :meth:`batch`."""
        return self._batch(range(len(self) if limit is None else min(limit, len(self))))

    def _batch(self, at: Sequence[int]) -> Batch:
        rows = [self.rows[row] for row in at]
        # A parquet file gives every row the keys of all rows, with None for missing values.
        extras = [_given(own_copy(row.get("extra_info") or {})) for row in rows]
        seen = [self._seen(row, self._origin[number]) for row, number in zip(rows, at, strict=True)]
        more: dict[str, Any] = {"prompt_truncated": [row in self._cut for row in at]} if self._cut else {}
        if self._processor is not None:
            # Pixels are made for each step anew: those of all rows would take more memory than the model.
            read = [self._processor.inputs(chat, pictures) for chat, pictures in seen]
            more["multi_modal_inputs"] = [Shown(inputs, positions) for _ids, inputs, positions in read]
        return Batch(
            range(len(extras)),
            {
                "raw_prompt": [chat for chat, _pictures in seen],
                "prompt_ids": [self._ids[row].tolist() for row in at],
                "data_source": [row["data_source"] for row in rows],
                "ground_truth": [truth_of(row) for row in rows],
                "extra_info": extras,
                **more,
            },
            self._meta,
        )


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def truth_of(row: Mapping[str, Any]) -> Any:
    """Returns a row's reference as rewards get it: text, or as in verl a list or dict of what the data has."""
    value = own_copy(row["reward_model"]["ground_truth"])
    if isinstance(value, Mapping):
        return _given(value)
    return value if isinstance(value, list) else str(value)
