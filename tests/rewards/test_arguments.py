"""The arguments of a call, and the counts of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.reward_agent import arguments_of
from dataflow.rewards.failure import parse_rule
from dataflow.rewards.steps import State, StepRequests, step_summary

pytestmark = pytest.mark.timeout(30)


def batch(rows: int, **columns: Any) -> Batch:
    named = {"data_source": "d", "ground_truth": "7", "response_text": "text"}
    return Batch(list(range(rows)), {**{name: [value] * rows for name, value in named.items()}, **columns})


def test_extra_info_has_the_prompt_and_the_length_beside_the_datas_own() -> None:
    prompt = [{"role": "user", "content": "2 + 2?"}]
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1]])
    samples = batch(
        4,
        extra_info=[{"index": 3}, None, {}, {"raw_prompt": "mine"}],
        raw_prompt=[prompt, None, None, None],
        response_mask=mask,
        responses=torch.arange(12).reshape(4, 3),
        finish_reason=["stop", "length", "length", "stop"],
    )
    rows = arguments_of(samples.only(*(name for name in samples.names if name != "responses")))
    assert {name: rows[0][name] for name in ("data_source", "solution_str", "ground_truth")} == {
        "data_source": "d",
        "solution_str": "text",
        "ground_truth": "7",
    }
    assert [row["extra_info"] for row in rows] == [
        {"index": 3, "raw_prompt": prompt, "response_length": 2, "finish_reason": "stop"},
        {"response_length": 3, "finish_reason": "length"},
        {"response_length": 0, "finish_reason": "length"},
        {"raw_prompt": "mine", "response_length": 2, "finish_reason": "stop"},
    ], "a token that is masked within a response is not the model's"
    ids = [row["extra_info"]["response_ids"] for row in arguments_of(samples)]
    assert ids == [[0, 1], [3, 4, 5], [], [9, 10, 11]]


def test_the_summary_of_a_step_counts_each_request_once() -> None:
    state = StepRequests(7, parse_rule("fail"), (0, 7))
    state.add([0] * 7)
    hows = ["", "", "hedged", "failed", "ledger", "shared", "cancelled"]
    for i, (request, how) in enumerate(zip(state.groups[0], hows, strict=True)):
        ends: State = how if how in ("failed", "cancelled") else "scored"  # type: ignore[assignment]
        state.end(request, ends)
        request.source = "" if ends == how else how
        request.begin, request.end, request.tries = 10.0, 10.0 + i, 1 + 2 * (i == 1)
    state.ended = state.groups.pop(0)
    summary = step_summary(state)
    counts = {"requested": 7, "scored": 5, "failed": 1, "retried": 2, "hedged": 1, "cached": 2}
    assert {name: summary[name] for name in counts} == counts
    assert (summary["latency_max"], summary["latency_mean"]) == (3, 1.5), "of those that were called"
