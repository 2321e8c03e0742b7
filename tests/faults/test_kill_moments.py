"""A run that is killed at moments that hypothesis draws, under each policy, ends as the one that is not killed."""

from __future__ import annotations

import signal
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.rigs.toy_place import ToyPlace

pytestmark = pytest.mark.timeout(300)

STEPS = 6
POLICIES = ["baseline", "mini-batch", "off-policy", "both", "both+stream"]


@cache
def whole(policy: str) -> tuple[dict[str, Any], Counter[str], Counter[str]]:
    """Facts of a run that is not killed, what it asked, and what it trained on."""
    with tempfile.TemporaryDirectory() as directory:
        place = ToyPlace(Path(directory), policy, STEPS)
        place.work()  # in this process, so that those which it forks have all modules
        return place.facts(), place.log("asked"), place.log("trained")


@pytest.mark.heavy
@settings(max_examples=4, deadline=None)
@given(policy=st.sampled_from(POLICIES), kills=st.lists(st.integers(1, 260), min_size=1, max_size=4))
def test_weights_steps_and_requests_are_those_of_a_run_that_is_not_killed(policy: str, kills: list[int]) -> None:
    facts, asked, trained = whole(policy)
    with tempfile.TemporaryDirectory() as directory:
        place = ToyPlace(Path(directory), policy, STEPS)
        for operation in [*kills, None]:
            paid, before = place.paid(), place.log("asked")
            code = place.until(operation)
            assert code == (0 if operation is None else code)
            assert code in (0, -signal.SIGKILL)
            event("killed" if code else "ended before")
            twice = {text.partition(":")[0] for text in place.log("asked") - before} & paid
            assert not twice, "asked again, although the ledger held the answers"
        assert place.facts() == facts
        # What was trained again after a checkpoint was trained on the same groups.
        assert place.log("asked").keys() == asked.keys()
        assert place.log("trained").keys() == trained.keys()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_run_that_is_not_killed_asks_and_trains_once(policy: str) -> None:
    facts, asked, trained = whole(policy)
    assert facts["status"] == "finished"
    assert facts["steps"] == list(range(1, STEPS + 1))
    assert set(asked.values()) == {1}
    assert len(asked) == facts["requested"] == STEPS * 4 * 2
    assert set(trained.values()) == {1}
    assert len(trained) == STEPS * (2 if policy in ("mini-batch", "both", "both+stream") else 1)
