"""What the tasks of a step log makes the number that one computation over the whole step gives."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import StageFailed
from dataflow.metrics import Mean, Metric, Provisional, Sum, of_step
from dataflow.stage import TaskInfo


def sent(number: Metric) -> Metric:
    """Returns a number as another process gets it."""
    task = TaskInfo(step=1)
    task.log({"n": number})
    received: Metric = pickle.loads(pickle.dumps(task.metrics["n"]))
    assert type(received) is type(number)
    return received


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), min_size=1, max_size=6))
def test_a_mean_of_parts_is_that_of_all_samples(parts: list[list[float]]) -> None:
    every = [score for part in parts for score in part]
    means = [sent(Mean(sum(part) / len(part), of=len(part))) for part in parts]
    assert of_step("critic/score/mean", means) == pytest.approx(sum(every) / len(every), abs=1e-9)
    assert of_step("reward/dropped_samples", [sent(Sum(len(part))) for part in parts]) == len(every)


def test_a_part_without_samples_counts_nothing() -> None:
    assert of_step("n", [Mean(0.0, of=0), Mean(2.0, of=3)]) == 2.0
    assert of_step("n", [Mean(0.5, of=0)]) == 0.5


def test_numbers_of_several_kinds_are_no_metric() -> None:
    with pytest.raises(StageFailed) as caught:
        of_step("score", [Provisional(9), Mean(1, of=1), 5, 7])
    assert str(caught.value) == (
        "the tasks of a step log Mean(...) and plain numbers as metric 'score'; log one kind, or under other names."
    )


def test_a_provisional_number_gives_way_to_others() -> None:
    assert of_step("response_length/mean", [Provisional(9), Mean(4.0, of=1), Mean(2.0, of=1)]) == 3.0
    assert of_step("response_length/mean", [sent(Provisional(9))]) == 9.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("critic/score/max", 3.0),
        ("response_length/min", 1.0),
        ("global_seqlen/minmax_diff", 3.0),
        # A data set, an agent and mini-batches are no extremes.
        ("critic/score/minerva/mean", 2.0),
        ("max/loss", 2.0),
        ("mini_batches", 2.0),
    ],
)
def test_other_numbers_are_reduced_by_the_last_word_of_their_name(name: str, expected: float) -> None:
    assert of_step(name, [3.0, 1.0, 2.0]) == expected
