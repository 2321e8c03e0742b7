"""Distributions of durations: what is drawn, and what is no distribution."""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from dataflow.distribution import parse_distribution
from dataflow.errors import ConfigError


@pytest.mark.parametrize("text", ["2.5", "uniform:1:40", "lognormal:8:0.6", "0"])
def test_draws_agree_with_the_mean(text: str) -> None:
    distribution, rng = parse_distribution(text), Random(0)
    draws = [distribution.draw(rng) for _ in range(20_000)]
    assert min(draws) >= 0
    assert fmean(draws) == pytest.approx(distribution.mean, rel=0.03)
    again, twice = Random(0), distribution.scaled(2)
    assert [distribution.draw(again) for _ in range(5)] == draws[:5]
    assert twice.mean == pytest.approx(2 * distribution.mean)
    assert twice.draws(Random(0), 9) == pytest.approx([2 * d for d in distribution.draws(Random(0), 9)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unifrom:1:40", "no distribution is named 'unifrom'; did you mean 'uniform'?"),
        ("uniform:1", "not of the form uniform:LOW:HIGH"),
        ("uniform:1:inf", "0 <= LOW <= HIGH"),
        ("uniform:5:1", "0 <= LOW <= HIGH"),
        ("lognormal:0:1", "MEDIAN > 0"),
        ("lognormal:1:1e3", "SIGMA from 0 to 20"),
        ("-1", "0 or more"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_distribution(text)
    assert message in str(error.value)


def test_measured_values_are_drawn_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "waits.txt").write_text("1\n2\n\n6\n")
    distribution = parse_distribution("empirical:waits.txt", folder=tmp_path)
    assert set(distribution.draws(Random(0), 100)) == {1.0, 2.0, 6.0}
    assert distribution.mean == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [("1\ntwo\n", "'two'"), ("-1", "holds no durations"), ("", "holds no durations"), (None, "cannot read")],
)
def test_a_file_that_cannot_be_used_is_said(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "f").write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse_distribution("empirical:f", "rollout", tmp_path)
