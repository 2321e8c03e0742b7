"""The agent's latencies: bounded in size, percentiles within the stated accuracy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.rewards.records import ACCURACY, Latencies


@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=200))
def test_percentiles_are_within_the_stated_accuracy(seconds: list[float]) -> None:
    latencies = Latencies()
    for each in seconds:
        latencies.append(each)
    summary = latencies.summary()
    for percent in (50, 95, 99):
        exact = float(np.percentile(seconds, percent, method="lower"))
        assert summary[f"p{percent}"] == pytest.approx(exact, rel=ACCURACY + 1e-9)
    assert summary["max"] == max(seconds)
    assert summary["mean"] == pytest.approx(np.mean(seconds))


def test_its_size_does_not_grow_with_the_number_of_rewards() -> None:
    latencies = Latencies()
    for seconds in np.random.default_rng(0).lognormal(0.0, 4.0, 100_000):
        latencies.append(float(seconds))
    for odd in (0.0, -1.0, 1e300, float("inf")):
        latencies.append(odd)
    assert len(latencies) == 100_004
    assert len(latencies._buckets) < 1800


def test_no_latencies_have_no_summary() -> None:
    assert Latencies().summary() == {}
