"""What the waits of a log show of its run: drift, outliers and slow starts of a baseline are no overlap."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dataflow.planning.sources.overlaps import Signs, signs
from dataflow.planning.sources.scalars import Scalars, read_scalars

PUBLISHED = Path(__file__).parents[3].parent / "shared" / "data" / "traces"
Change = Callable[[int, float], float]


def log(
    steps: int = 100,
    hidden: float = 0.0,
    waits: Change = lambda step, wait: wait,
    updates: Change = lambda step, update: update,
    beside: Change = lambda update, seconds: seconds,
    seed: int = 0,
) -> Scalars:
    """Returns the log of a run whose updates hide a share of their time; the changes get the step, or the updates."""
    draw = random.Random(seed)
    columns: dict[str, dict[int, float]] = {}
    for step in range(1, steps + 1):
        update = updates(step, 140 + draw.gauss(0, 5))
        wait = waits(step, 300 + draw.gauss(0, 5) - hidden * update)
        row = {"gen": 40.0, "old_log_prob": beside(update, 45.0), "adv": wait, "update_actor": update}
        for name, seconds in row.items():
            columns.setdefault(f"timing_s/{name}", {})[step] = seconds
    return Scalars("log", columns)


def kind(found: Signs) -> str:
    given = [name for name in ("overlap", "doubt", "baseline") if getattr(found, name)]
    assert len(given) == 1
    return "open" if "do not show" in found.baseline or "shows no waits" in found.baseline else given[0]


@pytest.mark.parametrize("seed", range(5))
def test_mini_batches_are_likely_where_waits_get_shorter_with_longer_updates(seed: int) -> None:
    assert kind(signs(log(seed=seed))) == "baseline"
    assert kind(signs(log(hidden=0.75, seed=seed))) == "doubt"
    # Few steps: 3 standard errors of 9 degrees of freedom are no sign.
    assert kind(signs(log(steps=14, seed=seed))) in ("open", "baseline")


@pytest.mark.parametrize(("waits", "updates"), [(-60, 40), (-30, 40), (60, -40)])
@pytest.mark.parametrize("steps", [40, 100, 300])
def test_waits_and_updates_that_drift_are_no_sign(waits: float, updates: float, steps: int) -> None:
    drifting = {
        "waits": lambda step, wait: wait + waits * step / steps,
        "updates": lambda step, update: update + updates * step / steps,
    }
    assert kind(signs(log(steps, **drifting))) in ("baseline", "open")
    if steps > 40:
        assert kind(signs(log(steps, hidden=0.75, **drifting))) == "doubt"


def test_a_few_steps_with_long_updates_and_short_waits_are_no_sign() -> None:
    slow = {
        "updates": lambda step, update: update + 100 * (step % 25 == 0),
        "waits": lambda step, wait: wait - 60 * (step % 25 == 0),
    }
    assert kind(signs(log(**slow))) == "baseline"


def test_log_probs_that_vary_with_the_updates_are_no_sign() -> None:
    assert kind(signs(log(beside=lambda update, seconds: seconds - 0.9 * (update - 140)))) != "doubt"


def test_a_slow_first_step_alone_is_a_doubt_also_where_later_waits_are_hidden() -> None:
    cold = signs(log(waits=lambda step, wait: 400 if step == 1 else wait))
    assert "usually wait 299.2 s for rewards (timing_s/adv), its first step 400 s" in cold.doubt
    hidden = signs(log(waits=lambda step, wait: 120 if step == 1 else 0.3))
    assert "its first step 120 s" in hidden.doubt
    assert not signs(log(waits=lambda step, wait: 3 if step == 1 else 0.3)).doubt
    # Waits that shrink over the run are longest in the first step, as in the steps after it.
    assert not signs(log(waits=lambda step, wait: wait - 1.5 * step)).doubt


def test_a_log_without_waits_shows_nothing() -> None:
    found = signs(log(waits=lambda step, wait: 0.3))
    assert found.baseline.endswith("neither how long they take nor whether the run overlaps them with other work.")


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published logs are not beside this checkout")
@pytest.mark.parametrize(
    ("policy", "shown"),
    [("baseline", "baseline"), ("mini-batch", "doubt"), ("off-policy", "overlap"), ("both", "overlap")],
)
def test_the_published_logs_are_told_apart(policy: str, shown: str) -> None:
    assert kind(signs(read_scalars(PUBLISHED / f"qwen2-7b_megatron_{policy}.csv"))) == shown
