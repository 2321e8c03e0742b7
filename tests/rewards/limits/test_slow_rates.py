"""A rate that holds up one request for minutes is named, or refused before the run starts."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from pydantic import ValidationError

from dataflow.config.reward import EndpointConfig, RewardConfig
from dataflow.rewards.limits.rates import Rates
from tests.rigs.virtual_time import run_virtual


@pytest.mark.parametrize(
    ("rpm", "tpm", "words"),
    [
        (1e-300, None, "rpm=1e-300 allows one request in 1.9e+294 years"),
        (0.01, None, "rpm=0.01 allows one request in 1.67 hours"),
        (None, 1.0, "tpm=1 allows one request of 300 tokens in 5 hours"),
        (60.0, 0.1, "tpm=0.1 allows one request of 300 tokens in 2.08 days"),
    ],
)
def test_a_rate_that_allows_next_to_nothing_is_named_once(
    rpm: float | None, tpm: float | None, words: str, warned: list[str]
) -> None:
    async def body() -> None:
        rates = Rates(rpm, tpm)
        for _ in range(2):
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await rates.acquire(300)
                    rates.begin(300)

    run_virtual(body)
    assert warned == [f"reward agent: the limit {words}; raise it if you did not mean that."]


def test_a_rate_in_use_is_not(warned: list[str]) -> None:
    async def body() -> None:
        rates = Rates(60, 3000)
        for _ in range(20):
            await rates.acquire(300)
            rates.begin(300)

    run_virtual(body)
    assert warned == []


@pytest.mark.parametrize("section", [RewardConfig, EndpointConfig])
@pytest.mark.parametrize("key", ["rpm", "tpm"])
@pytest.mark.parametrize("rate", [1e-300, 5e-324, 0.0009])
def test_a_configured_rate_of_almost_nothing_is_refused(
    section: type[RewardConfig | EndpointConfig], key: str, rate: float
) -> None:
    with pytest.raises(ValidationError, match=r"greater than or equal to 0.001"):
        section(**{key: rate})
    assert getattr(section(**{key: 0.001}), key) == 0.001
