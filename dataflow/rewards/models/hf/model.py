"""A reward model in this process: a transformers model with a classification head, on a CPU or one GPU."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.utils.logging import disable_progress_bar

from dataflow.errors import ConfigError, ModelError
from dataflow.models.directory import room_of, without_report
from dataflow.models.tokenizer import load_tokenizer


class HfModel:
    """Scores rows of token ids; padding does not change the score of a row.

    Args:
        path: of the model's directory, which :func:`~dataflow.models.directory.check_classifier` has checked.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: the model's own on a GPU, float32 on a CPU.
        device: ``cpu``, ``cuda``, ``cuda:1``; None takes a GPU if there is one.
        threads: of the CPU; None for as many as torch takes.
        max_model_len: longest row; None for as long as model and tokenizer allow.

    Attributes:
        tokenizer: of the model.
        max_model_len: longest row.
        vocabulary: number of token ids.
        labels: names of the head's outputs.

    Raises:
        ConfigError: there is no such device, or the model takes no rows of that length.
        ModelError: the model cannot be loaded, or weights are missing, those of the head for example.
    """

    def __init__(
        self,
        path: Path,
        dtype: str = "auto",
        device: str | None = None,
        threads: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        disable_progress_bar()
        self._path = path
        self._device = _device(device)
        self._dtype = {"auto": "auto" if self._device.type == "cuda" else torch.float32}.get(dtype) or getattr(
            torch, dtype
        )
        self._model: Any = self._load()
        self.tokenizer = load_tokenizer(str(path), "--model", ModelError)
        config = self._model.config
        self.labels: list[str] = [str(config.id2label.get(at, at)) for at in range(config.num_labels)]
        self._sigmoid = config.num_labels < 2 or config.problem_type == "multi_label_classification"
        self._identity = config.problem_type == "regression"
        room = room_of(path)
        self.vocabulary = room.vocabulary or len(self.tokenizer)
        longest = min(room.positions or 1 << 31, self.tokenizer.model_max_length)
        if max_model_len is not None and max_model_len > longest:
            raise ConfigError(f"max_model_len={max_model_len}: {path} takes at most {longest} tokens; give fewer.")
        self.max_model_len = max_model_len or longest

    def scores(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the head's raw outputs for each row; of a token-level head, those at the row's last token."""
        try:
            with torch.inference_mode():
                return self._scores(rows)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        torch.cuda.empty_cache()
        half = len(rows) // 2
        return [*self.scores(rows[:half]), *self.scores(rows[half:])]

    def activated(self, scores: Sequence[float]) -> list[float]:
        """Returns what the head's activation makes of raw outputs, as vLLM does: a sigmoid of one, else a softmax."""
        raw = torch.tensor(scores)
        if self._identity:
            return list(scores)
        made: list[float] = (raw.sigmoid() if self._sigmoid else raw.softmax(-1)).tolist()
        return made

    def sleep(self, level: int) -> None:
        """Frees the memory of the weights.

        Args:
            level: 1 keeps those of a GPU in CPU memory, 2 drops them; those of a CPU are dropped always.
        """
        if level == 1 and self._device.type == "cuda":
            self._model.to("cpu")
        else:
            self._model = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, which else keeps freed memory
        if trim is not None:
            trim(0)

    def wake(self) -> None:
        """Brings the weights back.

        Raises:
            ModelError: they were dropped, and cannot be loaded again.
        """
        if self._model is None:
            self._model = self._load()
        self._model.to(self._device)

    def _load(self) -> Any:
        self._per_token = _per_token(self._path)
        kind = AutoModelForTokenClassification if self._per_token else AutoModelForSequenceClassification
        try:
            with without_report():
                model, info = kind.from_pretrained(self._path, dtype=self._dtype, output_loading_info=True)
        # For a wrong value, the architecture's own code may raise any exception.
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise ModelError(f"model {self._path} cannot be loaded with transformers ({reason}).") from error
        if missing := sorted(info["missing_keys"]):
            raise ModelError(
                f"model {self._path}: weight '{missing[0]}' is in none of its files, and would be random; save the "
                "model again with its head."
            )
        return model.to(self._device).eval().requires_grad_(False)

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        config = self._model.config.get_text_config()
        own = config.pad_token_id
        # transformers scores at the last token that is not this one. Without one, it takes no batches.
        pad = _unused(rows) if own is None else own
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), pad, dtype=torch.int64)
        mask = torch.zeros((len(rows), longest), dtype=torch.int64)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = torch.tensor(row)
            mask[at, : len(row)] = 1
        options = {"use_cache": False} if hasattr(config, "use_cache") else {}
        config.pad_token_id = pad
        try:
            logits = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device), **options).logits
        finally:
            config.pad_token_id = own
        if self._per_token:
            logits = logits[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
        found: list[list[float]] = logits.float().cpu().tolist()
        return found


def _per_token(path: Path) -> bool:
    names = json.loads((path / "config.json").read_bytes()).get("architectures") or []
    return not any(name.endswith("ForSequenceClassification") for name in names)


def _unused(rows: Sequence[Sequence[int]]) -> int:
    """Returns the smallest token id that no row contains."""
    used = {token for row in rows for token in row}
    return next(token for token in range(len(used) + 1) if token not in used)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device={name} is unknown; give cpu, cuda or cuda:1.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device={name}: torch finds {torch.cuda.device_count()} GPUs; give another, or cpu.")
    return device
