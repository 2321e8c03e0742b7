# NOTE to helper-1 from the lead: I overwrote your prompts.py by accident (same minute). This one now uses your rows.py;
# keep this public API (load_prompts, PromptSource, load_tokenizer), improve it from yours, delete this note, write the tests.
"""The prompts of a run: GSM8K's JSONL, verl's parquet or generated problems, as one batch a step.

Rows are read by verl's RLHFDataset through a stateful, seeded loader. Whatever is wrong with a file or a prompt is
said before anything is started.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.batch import Batch
from dataflow.data.rows import first_line, load_rows, verl_rows, write_parquet
from dataflow.errors import DataError

# Problems are generated from a seed of their own: the held-out ones are the same for runs of all seeds.
PROBLEM_SEED = 0


def load_prompts(config: Any) -> tuple[PromptSource, PromptSource]:
    """Returns the training and the held-out prompts of a run.

    Args:
        config: a RunConfig whose ``model.path`` is a local directory.

    Raises:
        DataError: a file is missing or holds a bad row, or there are too few prompts.
        ModelError: the tokenizer cannot be loaded or has no chat template.
    """
    data = config.data
    tokenizer = load_tokenizer(config.model.path)
    if data.train is None or data.val is None:
        from dataflow.data.problems import generate

        made = generate(data.train_size, data.val_size, PROBLEM_SEED)
    sources = []
    for part, (path, prompts) in enumerate(((data.train, data.prompts), (data.val, 1))):
        name = path or f"generated {'held-out' if part else 'train'} problems"
        rows, labels = load_rows(Path(path).expanduser()) if path else (verl_rows(made[part], name), None)
        sources.append(PromptSource(rows, tokenizer, data, config.seed, prompts, name, labels))
    return sources[0], sources[1]


def load_tokenizer(path: str) -> Any:
    """Loads a tokenizer with a chat template.

    Raises:
        ModelError: it cannot be loaded, or has no chat template.
    """
    from transformers import AutoTokenizer

    from dataflow.errors import ModelError

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.path={path}: its tokenizer cannot be loaded: {first_line(error)}."
        ) from error
    if not tokenizer.chat_template:
        raise ModelError(
            f"model.path={path}: its tokenizer has no chat template; use an instruct model or add one."
        )
    return tokenizer


class PromptSource:
    """A step's prompts out of rows, in an order that the seed decides.

    Args:
        rows: in verl's schema.
        tokenizer: with a chat template.
        data: the options ``max_prompt_length``, ``truncation``, ``filter_overlong_prompts``, ``shuffle``.
        seed: of the order.
        prompts: a step's.
        name: of the file, for messages.
        labels: what messages call each row; by its number if None.

    Raises:
        DataError: a prompt is too long (or all are, where such are left out), or fewer than a step needs.
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
    ) -> None:
        self.name = name
        self._labels = labels
        self._seed, self._shuffle, self._prompts = seed, data.shuffle, prompts
        ids = [prompt_ids(tokenizer, row["prompt"]) for row in rows]
        kept = self._fit(ids, data)
        self.rows = [rows[i] for i in kept]
        self._ids = [ids[i] for i in kept]
        if len(self.rows) < prompts:
            raise DataError(
                f"{name}: {len(self.rows)} prompts are fewer than the {prompts} of a step; give more data "
                "or a smaller data.prompts."
            )
        self._tokenizer = tokenizer
        self._batches: Iterator[dict[str, Any]] | None = None
        self._last: tuple[int, Batch] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def _fit(self, ids: list[list[int]], data: Any) -> list[int]:
        """Cuts overlong prompts in place or leaves them out; returns which rows stay."""
        limit = data.max_prompt_length
        long = [i for i, tokens in enumerate(ids) if len(tokens) > limit]
        if not long:
            return list(range(len(ids)))
        if data.filter_overlong_prompts:
            if len(long) == len(ids):
                raise DataError(
                    f"{self.name}: every prompt is longer than data.max_prompt_length={limit} tokens."
                )
            logger.info(f"{self.name}: left out {len(long)} of {len(ids)} prompts over {limit} tokens")
            gone = set(long)
            return [i for i in range(len(ids)) if i not in gone]
        if data.truncation == "error":
            longest = max(len(ids[i]) for i in long)
            raise DataError(
                f"{self._labels[long[0]] if self._labels else f'{self.name}, row {long[0] + 1}'}: "
                f"the prompt has {len(ids[long[0]])} tokens, more than data.max_prompt_length={limit} "
                f"(as have {len(long)} of {len(ids)}, the longest {longest}); raise it, or set "
                "data.truncation=left|right|middle or data.filter_overlong_prompts=true."
            )
        for i in long:
            ids[i] = truncate(ids[i], limit, data.truncation)
        return list(range(len(ids)))

    def batch(self, step: int) -> Batch:
        """Returns the next prompts; steps are asked for in order, the last one may be asked for again."""
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        if self._batches is None:
            self._batches = self._epochs()
        rows = next(self._batches)["row"]
        self._last = step, self._batch([int(i) for i in rows])
        return self._last[1]

    def all(self, limit: int | None = None) -> Batch:
        """Returns the first ``limit`` prompts, in the order of the file."""
        return self._batch(list(range(min(limit or len(self), len(self)))))

    def _batch(self, index: list[int]) -> Batch:
        rows = [self.rows[i] for i in index]
        return Batch(
            range(len(rows)),
            {
                "raw_prompt": [row["prompt"] for row in rows],
                "prompt_ids": [self._ids[i] for i in index],
                "data_source": [row["data_source"] for row in rows],
                "ground_truth": [row["reward_model"]["ground_truth"] for row in rows],
                "extra_info": [row.get("extra_info") or {} for row in rows],
            },
        )

    def _epochs(self) -> Iterator[dict[str, Any]]:
        loader = self._loader()
        while True:
            yield from loader

    def _loader(self) -> Any:
        import torch
        from omegaconf import OmegaConf
        from torch.utils.data import RandomSampler, SequentialSampler
        from torchdata.stateful_dataloader import StatefulDataLoader

        # verl and datasets print and draw bars while they load, torchdata warns of a call of its own.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        with contextlib.redirect_stdout(io.StringIO()):
            import datasets
            from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

            datasets.disable_progress_bars()
            settings = OmegaConf.create({"filter_overlong_prompts": False, "cache_dir": str(_cache())})
            # Facts of rows differ from file to file; the loader decides the order, the rows stay here.
            plain = [{"row": i, "prompt": row["prompt"]} for i, row in enumerate(self.rows)]
            dataset = RLHFDataset([str(write_parquet(plain, _cache()))], self._tokenizer, settings)
        order = (
            RandomSampler(dataset, generator=torch.Generator().manual_seed(self._seed))
            if self._shuffle
            else SequentialSampler(dataset)
        )
        return StatefulDataLoader(
            dataset, batch_size=self._prompts, sampler=order, drop_last=True, collate_fn=collate_fn
        )


def prompt_ids(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    """Returns a chat's token ids, ending where the model's answer begins."""
    return list(
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    )


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """Returns ``limit`` tokens: the last ones (left), the first ones (right), or both ends (middle).

    >>> truncate([1, 2, 3, 4, 5], 3, "left"), truncate([1, 2, 3, 4, 5], 3, "middle")
    ([3, 4, 5], [1, 4, 5])
    """
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[-(limit - head) :]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataflow" / "prompts"
