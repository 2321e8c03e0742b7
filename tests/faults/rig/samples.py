"""The samples of the tests of faults; each has a score of its own that identifies its step and group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any
from zlib import crc32

import pytest

from dataflow.batch import Batch

DEADLINE_S = 100.0
"""Seconds in which everything must have ended, on a machine that is busy."""


def score_of(step: int | str, group: int, sample: int) -> float:
    """Returns the one right score, exact in float32."""
    return float(4096 * int(str(step).rpartition(":")[2]) + 8 * group + sample)


def graded(step: int | str, group: int, sample: int) -> float:
    """Returns the right score of a judge with scores 0 and 1; the pattern differs for each step and group."""
    return float(crc32(f"{step}.{group}.{sample}".encode()) & 1)


def samples(step: int | str, groups: Iterable[int], n: int = 2) -> Batch:
    """Rows for functions (the truth is the score) and for judges (the last line is right where they grade 1)."""
    rows = [(group, sample) for group in groups for sample in range(n)]
    return Batch(
        [group for group, _ in rows],
        {
            "response_text": [_response(step, *row) for row in rows],
            "data_source": ["d"] * len(rows),
            "ground_truth": [str(score_of(step, *row)) for row in rows],
            "extra_info": [{"question": f"the number of {step}.{g}.{i}?", "at": (step, g, i)} for g, i in rows],
        },
    )


def _response(step: int | str, group: int, sample: int) -> str:
    right = score_of(step, group, sample)
    return f"It is clear.\n#### {right if graded(step, group, sample) else right + 0.5}"


def check(rewards: Batch, step: int | str, n: int = 2, right: Callable[..., float] = score_of) -> None:
    """Sees to it that each group is whole and that each sample has its own score and no other."""
    assert rewards.groups.tolist() == [group for group in rewards.ids for _ in range(n)]
    wanted = [right(step, group, sample) for group in rewards.ids for sample in range(n)]
    assert rewards["score"].tolist() == wanted


def left_out(rewards: Batch) -> list[tuple[int, int]]:
    """Returns group and sample of the rows that no loss may use; those have no score."""
    dropped = [row for row, kept in enumerate(rewards["kept"].tolist()) if not kept]
    assert all(rewards["score"][dropped].isnan())
    records = rewards.meta["records"]
    return [(records[row]["group"], records[row]["sample"]) for row in dropped]


def run(test: Coroutine[Any, Any, Any]) -> Any:
    """Runs a test that must end."""

    async def limited() -> Any:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await test
        except TimeoutError:
            pytest.fail(f"it hung for {DEADLINE_S:g} s")

    return asyncio.run(limited())
