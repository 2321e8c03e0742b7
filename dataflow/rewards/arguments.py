"""The keyword arguments of each row's call, under verl's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from dataflow.batch import Batch

Decode: TypeAlias = Callable[[Sequence[np.ndarray]], list[str]]


def decoder(tokenizer: Any) -> Decode:
    """Returns a function that decodes the token ids of responses, without special tokens.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def decode(rows: Sequence[np.ndarray]) -> list[str]:
        texts = tokenizer.batch_decode([row.tolist() for row in rows], skip_special_tokens=True)
        return list(texts) if rows else []  # the library returns one text for no rows

    return decode


class Arguments:
    """Builds the arguments of rows on demand.

    Args:
        samples: columns ``data_source``, ``ground_truth`` and ``response_text``, or in place of the last
            ``responses`` and ``response_mask``, token ids ``[rows, R]``; optionally ``extra_info``, ``raw_prompt``
            and ``finish_reason``.
        decode: converts token ids to texts.
        with_ids: adds ``response_ids``, a list of the response's token ids, to ``extra_info``.

    Raises:
        DataflowError: a column is missing.
    """

    def __init__(self, samples: Batch, decode: Decode | None, with_ids: bool = False) -> None:
        self._decode = decode if "response_text" not in samples else None
        self._text = "responses" if self._decode else "response_text"
        optional = ("extra_info", "raw_prompt", "finish_reason", "response_mask", "responses" if with_ids else "")
        names = dict.fromkeys(("data_source", "ground_truth", self._text))
        names |= dict.fromkeys(name for name in optional if name in samples)
        # Unread: the first requests need not wait for the columns of all.
        self._samples, self._with_ids = samples.only(*names), with_ids

    @property
    def decodes(self) -> bool:
        """Whether the rows have token ids to be decoded."""
        return self._decode is not None

    def rows(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Returns the keywords of the rows from begin to end."""
        some = self._samples.rows(np.arange(begin, end))
        ends = own = None
        if "response_mask" in some:
            ends, own = _ends(some["response_mask"]), some.nonzero("response_mask").tolist()
        texts = self._texts(some, ends)
        sources, truths = some["data_source"], some["ground_truth"]
        names = ("extra_info", "raw_prompt", "finish_reason", "responses" if self._with_ids else "")
        extras, prompts, finishes, ids = (some[n] if n in some else None for n in names)  # noqa: SIM401
        found = []
        for row, text in enumerate(texts):
            extra = dict((None if extras is None else extras[row]) or {})
            if prompts is not None and prompts[row] is not None:
                extra["raw_prompt"] = prompts[row]
            if finishes is not None:
                extra["finish_reason"] = finishes[row]
            if own is not None:
                extra["response_length"] = own[row]
            if ids is not None:
                extra["response_ids"] = ids[row][: None if ends is None else ends[row]].tolist()
            given = {"data_source": sources[row], "solution_str": text, "ground_truth": truths[row]}
            found.append({**given, "extra_info": extra})
        return found

    def _texts(self, some: Batch, ends: list[int] | None) -> list[str]:
        if self._decode is None:
            return list(some[self._text])
        ids = list(some[self._text].numpy())
        return self._decode(ids if ends is None else [row[:end] for row, end in zip(ids, ends, strict=True)])


def _ends(mask: Any) -> list[int]:
    """Returns where each response ends; tokens inside it may be masked out of the loss (a tool's)."""
    backwards = mask.cpu().numpy()[:, ::-1].astype(bool)
    last = mask.shape[-1] - backwards.argmax(axis=1)
    return np.where(backwards.any(axis=1), last, 0).tolist()  # type: ignore[no-any-return]
