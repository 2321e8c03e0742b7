from __future__ import annotations

from random import Random
from statistics import fmean, median

import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.latency import Law, parse_latency


@pytest.mark.parametrize("text", ["2.5", "uniform:1:40", "lognormal:8:0.6", "0"])
def test_draws_agree_with_the_mean(text: str) -> None:
    law, rng = parse_latency(text), Random(0)
    draws = [law.draw(rng) for _ in range(20_000)]
    assert min(draws) >= 0
    assert fmean(draws) == pytest.approx(law.mean, rel=0.03)
    again = Random(0)
    assert [law.draw(again) for _ in range(5)] == draws[:5]


def test_bounds_and_median() -> None:
    rng = Random(1)
    uniform = [parse_latency("uniform:1:40").draw(rng) for _ in range(2000)]
    assert 1 <= min(uniform) < 1.5
    assert 39.5 < max(uniform) <= 40
    assert median(parse_latency("lognormal:8:0.6").draw(rng) for _ in range(5000)) == pytest.approx(8, rel=0.05)


def test_numbers_are_constants() -> None:
    assert parse_latency(3) == parse_latency("3") == Law("constant", 3.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unifrom:1:40", "no latency law is named 'unifrom'; did you mean 'uniform'?"),
        ("gamma:1:2", "give a number of seconds, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"),
        ("uniform:1", "not of the form uniform:LOW:HIGH"),
        ("uniform:a:b", "not of the form uniform:LOW:HIGH"),
        ("uniform:1:inf", "not of the form uniform:LOW:HIGH"),
        ("uniform:5:1", "0 <= LOW <= HIGH"),
        ("uniform:-1:1", "0 <= LOW <= HIGH"),
        ("lognormal:0:1", "MEDIAN > 0"),
        ("-1", "negative"),
        ("nan", "no latency law"),
        ("", "no latency law"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_latency(text)
    assert message in str(error.value)
