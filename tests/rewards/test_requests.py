"""The requests of a step: the arguments of calls, the groups that are returned, and their reports."""

from __future__ import annotations

import asyncio
import math
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.errors import DataflowError
from dataflow.rewards.arguments import Arguments
from dataflow.rewards.failure import parse_rule
from dataflow.rewards.requests import Request, State, StepRequests, Waiter, latency_summary, record
from dataflow.rewards.steps import rewards_of, step_summary

pytestmark = pytest.mark.timeout(30)


def step_of(sizes: list[int], extra_groups: int = 0, rule: str = "fail") -> StepRequests:
    """A step whose groups are 0, 10, 20, ... and all still to come."""
    state = StepRequests(7, parse_rule(rule), (0, 7), extra_groups=extra_groups)
    state.add([10 * i for i, size in enumerate(sizes) for _ in range(size)])
    return state


def arrive(state: StepRequests, *groups: int) -> None:
    for group in groups:
        del state.unfinished[group]
        state.arrived.append(group)
        for request in state.groups[group]:
            state.end(request, "scored")
            request.score, request.begin, request.end = group + request.sample / 10, 1.0, 3.0


# --- arguments -----------------------------------------------------------------------------------------------


def batch(rows: int = 4, **columns: Any) -> Batch:
    given_ = {
        "data_source": [f"d{i}" for i in range(rows)],
        "ground_truth": list(range(rows)),
        "response_text": [f"text {i}" for i in range(rows)],
    }
    return Batch(list(range(rows)), {name: what for name, what in (given_ | columns).items() if what is not None})


def test_a_row_is_called_with_verls_keywords() -> None:
    rows = Arguments(batch()).rows(1, 3)
    assert rows == [
        {"data_source": f"d{i}", "solution_str": f"text {i}", "ground_truth": i, "extra_info": {}} for i in (1, 2)
    ]


def test_extra_info_has_the_prompt_and_the_length_beside_the_datas_own() -> None:
    prompt = [{"role": "user", "content": "2 + 2?"}]
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1]])
    samples = batch(
        extra_info=[{"index": 3}, None, {}, {"raw_prompt": "mine"}],
        raw_prompt=[prompt, None, None, None],
        response_mask=mask,
        finish_reason=["stop", "length", "length", "stop"],
    )
    extras = [row["extra_info"] for row in Arguments(samples).rows(0, 4)]
    assert extras == [
        {"index": 3, "raw_prompt": prompt, "response_length": 2, "finish_reason": "stop"},
        {"response_length": 3, "finish_reason": "length"},
        {"response_length": 0, "finish_reason": "length"},
        {"raw_prompt": "mine", "response_length": 2, "finish_reason": "stop"},
    ], "a token that is masked within a response is not the model's"


def test_each_call_may_change_what_it_is_given() -> None:
    samples = batch(extra_info=[{"index": 0}] * 4)
    first, second = Arguments(samples).rows(0, 2)
    first["extra_info"]["index"] = 9
    assert second["extra_info"] == {"index": 0}
    assert samples["extra_info"][0] == {"index": 0}


def test_response_ids_where_they_are_wanted() -> None:
    ids, mask = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    samples = batch(2, responses=ids, response_mask=mask)
    extras = [row["extra_info"] for row in Arguments(samples, with_ids=True).rows(0, 2)]
    assert [extra["response_ids"] for extra in extras] == [[1, 2], [4, 5, 6]]
    assert "response_ids" not in Arguments(samples).rows(0, 1)[0]["extra_info"]
    assert "response_ids" not in Arguments(batch(2), with_ids=True).rows(0, 1)[0]["extra_info"]


@pytest.mark.parametrize("missing", ["data_source", "ground_truth", "response_text"])
def test_a_column_that_is_missing(missing: str) -> None:
    with pytest.raises(DataflowError, match=f"no column '{missing}'"):
        Arguments(batch(4, **{missing: None}))


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6))
def test_a_response_ends_with_its_last_token_that_is_not_masked(masks: list[list[bool]]) -> None:
    samples = batch(len(masks), response_mask=torch.tensor(masks), responses=torch.ones(len(masks), 5))
    extras = [row["extra_info"] for row in Arguments(samples, with_ids=True).rows(0, len(masks))]
    ends = [max((i + 1 for i, kept in enumerate(mask) if kept), default=0) for mask in masks]
    assert [len(extra["response_ids"]) for extra in extras] == ends
    assert [extra["response_length"] for extra in extras] == [sum(mask) for mask in masks]


# --- which groups --------------------------------------------------------------------------------------------


def test_groups_are_picked_as_they_arrive() -> None:
    state = step_of([1, 1, 1, 1])
    arrive(state, 30, 10)
    assert state.pick(3, "arrival") is None
    arrive(state, 0)
    assert state.pick(2, "arrival") == [10, 30], "first come, in order of their ids"
    assert state.arrived == [0]
    assert state.pick(1, "arrival") == [0]
    assert state.pick(1, "arrival") is None


def test_groups_are_picked_by_their_ids() -> None:
    state = step_of([1, 1, 1, 1])
    arrive(state, 30, 10)
    assert state.pick(1, "index") is None, "0 is the next, and still to come"
    arrive(state, 0)
    assert state.pick(2, "index") == [0, 10]
    assert state.pick(1, "index") is None
    arrive(state, 20)
    assert state.pick(2, "index") == [20, 30]


def test_what_is_left_to_collect() -> None:
    async def body() -> None:
        state = step_of([1] * 5, extra_groups=1)
        assert state.left == 4
        arrive(state, 0, 10)
        assert state.left == 4
        state.waiters.append(Waiter(3, "arrival", asyncio.get_running_loop().create_future()))
        assert state.left == 1

    asyncio.run(body())


def test_a_request_ends_once() -> None:
    state = step_of([1])
    request = state.groups[0][0]
    state.end(request, "failed")
    assert (request.open, request.how, state.open) == (False, "failed", 0)
    with pytest.raises(AssertionError, match="failed -> scored"):
        state.end(request, "scored")


def test_a_request_names_itself() -> None:
    state = step_of([1, 2])
    assert str(state.groups[10][1]) == "sample 1 of group 10 of step 7"


# --- reports -------------------------------------------------------------------------------------------------


def test_rewards_are_those_of_the_chosen_groups_alone() -> None:
    state = step_of([2, 1, 2])
    arrive(state, 20, 0)
    rewards = rewards_of(state, [0, 20])
    assert rewards.groups.tolist() == [0, 0, 20, 20]
    assert rewards["score"].tolist() == pytest.approx([0.0, 0.1, 20.0, 20.1])
    assert rewards["score"].dtype == torch.float32
    assert rewards.names == ("score",)
    assert rewards.meta["latency_s"] == [2.0] * 4
    assert list(state.groups) == [10], "they are returned once"
    assert len(state.ended) == 4


def test_columns_that_some_samples_lack_are_filled() -> None:
    state = step_of([3])
    arrive(state, 0)
    columns: list[dict[str, Any]] = [{"why": "a"}, {}, {"tokens": 5, "why": None}]
    for request, extras in zip(state.groups[0], columns, strict=True):
        request.extras = extras
    rewards = rewards_of(state, [0])
    assert list(rewards["why"]) == ["a", None, None]
    assert list(rewards["tokens"]) == [None, None, 5]


@pytest.mark.parametrize("rule", ["fail", "score:0", "drop_sample", "drop_group", "replace_group"])
def test_what_is_kept_is_told_where_anything_may_be_left_out(rule: str) -> None:
    state = step_of([2], rule=rule)
    arrive(state, 0)
    state.groups[0][1].kept = False
    rewards = rewards_of(state, [0])
    if rule.startswith("drop"):
        assert rewards["kept"].tolist() == [True, False]
        assert rewards["kept"].dtype == torch.bool
    else:
        assert "kept" not in rewards


def test_a_record_says_what_was_out_of_the_ordinary_and_no_more() -> None:
    request = Request(step_of([1]), 3, 1, begin=1.0, end=2.5, tries=1)
    assert record(request) == {"group": 3, "sample": 1, "begin": 1.0, "end": 2.5}
    request.tries, request.source = 3, "hedged"
    assert record(request) == {"group": 3, "sample": 1, "begin": 1.0, "end": 2.5, "tries": 3, "how": "hedged"}


def test_the_summary_of_a_step_counts_each_request_once() -> None:
    state = step_of([7])
    hows = ["", "", "hedged", "failed", "ledger", "shared", "cancelled"]
    for i, (request, how) in enumerate(zip(state.groups[0], hows, strict=True)):
        ends: State = how if how in ("failed", "cancelled") else "scored"  # type: ignore[assignment]
        state.end(request, ends)
        request.source = "" if ends == how else how
        request.begin, request.end, request.tries = 10.0, 10.0 + i, 1 + 2 * (i == 1)
    arrive_at = state.groups.pop(0)
    state.ended = arrive_at
    summary = step_summary(state)
    assert {name: summary[name] for name in ("scored", "failed", "retried", "hedged", "cached")} == {
        "scored": 5,
        "failed": 1,
        "retried": 2,
        "hedged": 1,
        "cached": 2,
    }
    assert summary["latency_max"] == 3, "those that were called"
    assert summary["latency_mean"] == pytest.approx(1.5)


def test_a_step_of_which_nothing_was_called_has_no_latency() -> None:
    state = step_of([2])
    state.ended = state.groups.pop(0)
    for request in state.ended:
        request.source = "ledger"
    nothing = dict.fromkeys(("failed", "retried", "throttled", "timed_out", "hedged", "indistinct"), 0)
    assert step_summary(state) == {"requested": 2, "scored": 2, "cached": 2, **nothing}


def test_no_latencies_have_no_summary() -> None:
    assert latency_summary([]) == latency_summary(array("d")) == {}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_latencies_are_summed_up(latency_s: list[float]) -> None:
    summary = latency_summary(array("d", latency_s))
    assert set(summary) == {"p50", "p95", "p99", "max", "mean"}
    assert summary["max"] == max(latency_s)
    assert summary["mean"] == pytest.approx(np.mean(latency_s))
    assert min(latency_s) - 1e-9 <= summary["p50"] <= summary["p95"] <= summary["p99"] <= max(latency_s) + 1e-9
    assert all(math.isfinite(value) for value in summary.values())
