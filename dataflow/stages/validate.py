"""Evaluation without a reward agent: a rule scores the validation responses. Mean scores of any evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from dataflow.batch import Batch
from dataflow.graph import TaskInfo, stage
from dataflow.metrics import Mean
from dataflow.usercode.copies import own_copy

SCORE, ACCURACY = "val-aux/score", "val-aux/accuracy"


@stage(writes="val_scores", on="controller", role="validates")
def val_check(val_responses: Batch, *, compute_score: Callable[..., Any], task: TaskInfo) -> Batch:
    """Scores the validation responses with a function that takes no time worth waiting for.

    Args:
        val_responses: with the columns ``data_source``, ``response_text``, ``ground_truth`` and, optionally,
            ``extra_info``.
        compute_score: takes verl's four keywords and returns a number.
        task: takes verl's ``val-core/<data_source>/reward/mean@<n>``.

    Returns:
        ``score``, float32 ``[rows]``.
    """
    import torch

    infos = val_responses["extra_info"] if "extra_info" in val_responses else [None] * len(val_responses)
    columns = (val_responses[name] for name in ("data_source", "response_text", "ground_truth"))
    scores = [
        float(
            compute_score(
                data_source=source, solution_str=text, ground_truth=own_copy(truth), extra_info=own_copy(info or {})
            )
        )
        for source, text, truth, info in zip(*columns, infos, strict=True)
    ]
    task.log(mean_scores(val_responses, scores))
    return val_responses.like(score=torch.tensor(scores, dtype=torch.float32))


def accuracies(scores: Batch) -> tuple[str, list[float]]:
    """Returns what an evaluation is about, as in verl, ``acc`` if the rewards have it or ``reward``; and its numbers.

    The score of the manager ``dapo`` has a penalty for the response's length, its ``acc`` has none. Samples with a
    score alone, such as those of ``reward.on_failure=score:0``, count with it; NaN is a sample without one.
    """
    known = scores["score"].tolist()
    own = scores["acc"] if "acc" in scores else [None] * len(known)
    numbers = [float(value) if isinstance(value, (Real, np.bool_)) else None for value in own]
    if all(number is None for number in numbers):
        return "reward", known
    return "acc", [
        score if number is None or math.isnan(score) else number for number, score in zip(numbers, known, strict=True)
    ]


def mean_scores(responses: Batch, scores: Sequence[float], name: str = "reward") -> dict[str, float]:
    """Returns verl's ``val-core/<data_source>/<name>/mean@<n>``, where n is the number of responses per prompt.

    With :data:`SCORE`, the mean over all samples, and :data:`ACCURACY`, the same where each score is 0 or 1; NaN is
    left out of the means.
    """
    n = len(responses) // len(responses.ids)
    by_source: dict[str, list[float]] = {}
    for source, score in zip(responses["data_source"], scores, strict=True):
        by_source.setdefault(str(source), []).append(score)
    known = {source: [score for score in found if not math.isnan(score)] for source, found in sorted(by_source.items())}
    means = {f"val-core/{source}/{name}/mean@{n}": sum(found) / len(found) for source, found in known.items() if found}
    every = [score for found in known.values() for score in found]
    if not every:
        return means
    mean = Mean(sum(every) / len(every), len(every))
    return {**means, SCORE: mean, **({ACCURACY: mean} if all(score in (0, 1) for score in every) else {})}
