"""When a slow request gets a second one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.retry import Hedge, parse_hedge

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (None, ("", 0.0)),
        ("p95", ("p", 95.0)),
        ("p99.9", ("p", 99.9)),
        ("p0.5", ("p", 0.5)),
        ("8", ("s", 8.0)),
        (8, ("s", 8.0)),
        (0.25, ("s", 0.25)),
        ("1e-3", ("s", 0.001)),
    ],
)
def test_a_percentile_or_seconds(text: str | float | None, read: tuple[str, float]) -> None:
    assert parse_hedge(text) == read


@pytest.mark.parametrize(
    "text", ["", "p", "p0", "p100", "p-1", "pnan", "95p", "P95", "0", "-3", "inf", "nan", "3s", 0, -1.0, float("nan")]
)
def test_what_is_neither(text: str | float) -> None:
    with pytest.raises(ConfigError, match="give a percentile such as p95, or seconds above 0"):
        parse_hedge(text)


def test_never_and_fixed_seconds_need_no_latencies() -> None:
    never, fixed = Hedge(None), Hedge(3)
    assert (never.after_s, fixed.after_s) == (None, 3.0)
    for _ in range(100):
        never.answered(50.0)
        fixed.answered(50.0)
    assert (never.after_s, fixed.after_s) == (None, 3.0)


def test_a_percentile_needs_twenty_answers() -> None:
    hedge = Hedge("p50")
    for i in range(19):
        hedge.answered(float(i))
        assert hedge.after_s is None
    hedge.answered(19.0)
    assert hedge.after_s == 9.5


def test_the_percentile_follows_the_last_thousand_answers() -> None:
    hedge, rng = Hedge("p90"), random.Random(0)
    slow = [rng.uniform(10, 20) for _ in range(1000)]
    fast = [rng.uniform(1, 2) for _ in range(1000)]
    for seconds in slow:
        hedge.answered(seconds)
    assert hedge.after_s == pytest.approx(np.percentile(slow, 90))
    for seconds in fast:
        hedge.answered(seconds)
    assert hedge.after_s == pytest.approx(np.percentile(fast, 90)), "nothing is left of what was before"


def test_the_percentile_is_taken_anew_every_25_answers() -> None:
    hedge = Hedge("p50")
    values = {hedge.after_s}
    for i in range(500):
        hedge.answered(float(i))
        values.add(hedge.after_s)
    assert len(values - {None}) == 21, "at 20 answers, then at 25, 50, ..."
    assert hedge.after_s == 249.5
