"""The keyword arguments of each row's call, under verl's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataflow.batch import Batch


class Arguments:
    """Builds the arguments of rows on demand.

    Args:
        samples: columns ``data_source``, ``ground_truth`` and ``response_text``; optionally ``extra_info``,
            ``raw_prompt``, ``finish_reason``, and ``responses`` and ``response_mask``, tokens ``[rows, R]``.
        with_ids: adds ``response_ids``, a list of the response's token ids, to ``extra_info``.

    Raises:
        DataflowError: a column is missing.
    """

    def __init__(self, samples: Batch, with_ids: bool = False) -> None:
        optional = ("extra_info", "raw_prompt", "finish_reason", "response_mask", "responses" if with_ids else "")
        names = dict.fromkeys(("data_source", "ground_truth", "response_text"))
        names |= dict.fromkeys(name for name in optional if name in samples)
        # Unread: the first requests need not wait for the columns of all.
        self._samples, self._with_ids = samples.only(*names), with_ids

    def rows(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Returns the keywords of the rows from begin to end."""
        some = self._samples.rows(np.arange(begin, end))
        ends = own = None
        if "response_mask" in some:
            ends, own = _ends(some["response_mask"]), some.nonzero("response_mask").tolist()
        texts, sources, truths = some["response_text"], some["data_source"], some["ground_truth"]
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


def _ends(mask: Any) -> list[int]:
    """Returns where each response ends; tokens inside it may be masked out of the loss (a tool's)."""
    backwards = mask.cpu().numpy()[:, ::-1].astype(bool)
    last = mask.shape[-1] - backwards.argmax(axis=1)
    return np.where(backwards.any(axis=1), last, 0).tolist()  # type: ignore[no-any-return]
