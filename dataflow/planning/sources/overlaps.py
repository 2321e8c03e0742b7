"""Tells from the waits of a verl log whether its run is a baseline or overlaps rewards with other work. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dataflow.planning.sources.scalars import Scalars

# After a shorter wait the latency cannot be fitted: the rewards arrived during the log-probs.
HIDDEN_S = 1.0
TAKEN = "the log is taken for that of a baseline, whose loop waits for all rewards of a step before the update"
# Warm-up lengthens a first step by less; in the published runs the ratio is 1.3 and 1.7 with overlap, 1.0 without.
_OVERLAPPED = 1.15
_EARLY = 10
"""Steps with which the first one is compared; later ones may differ since responses get longer or shorter."""
_SLOW_FIRST_S = 5.0
"""Seconds by which a first step must wait longer, whatever the ratio."""
_FEWEST = 12
"""Steps from which the waits are compared with the updates."""
_BLOCK = 100
"""Steps, at least, over which a trend is taken for straight."""
_FAR = 4.0
"""Standard deviations from which a step's updates are an outlier: a checkpoint, or a node that stalled."""
_HIDDEN_SHARE = 0.3
"""Share of the updates that hides rewards from which a log is suspected."""
_TWO_HALVES = 0.5
"""Least share that hides rewards where a run updates on mini-batches: that of two."""
_ERRORS = 3.0
"""Standard errors of many steps by which the slope must differ; 1 baseline in 700 does so by chance."""


@dataclass(frozen=True)
class Signs:
    """What the waits of a log show of its run; at most one of the sentences is given.

    Attributes:
        overlap: that it used samples before all rewards of its step were there; the latency cannot be fitted.
        doubt: that it may have done so; how long rewards take settles it.
        baseline: what they show if neither, or what they leave open.
    """

    overlap: str = ""
    doubt: str = ""
    baseline: str = ""


def signs(log: Scalars) -> Signs:
    """Returns what the waits of a log show of its run."""
    if blocks(log) and mean(log, "timing_s/reward") > HIDDEN_S:
        return Signs(baseline=f"{TAKEN}: it does so within its reward function (timing_s/reward).")
    waits = log.series("timing_s/adv")
    later = [seconds for step, seconds in waits.items() if step > 1]
    usual = statistics.median(later) if later else waits.get(1, 0.0)
    hidden = usual < HIDDEN_S
    if len(later) >= 3:
        first = _slow_first(waits, statistics.median(later[:_EARLY]))
        after = [waits[step + 1] for step in log.series("timing_s/testing") if step and step + 1 in waits]
        if not hidden and after and statistics.median(after) < usual / 2:
            found = [first] if first else []
            found.append(f"those after a validation {statistics.median(after):.0f} s")
            return Signs(
                "this log is of a run that overlaps steps already, not of a baseline: steps usually wait "
                f"{usual:.0f} s for rewards (timing_s/adv), {' and '.join(found)}. Its waits do not show how long "
                "rewards take."
            )
        if first:
            return Signs(
                doubt="this log may not be of a baseline, but of a run that overlaps steps already (off-policy): steps "
                f"usually wait {usual:.1f} s for rewards (timing_s/adv), {first}. A service that was slow at first "
                "looks the same."
            )
        if not hidden and (share := _shorter(log)):
            return Signs(
                doubt="this log is likely not of a baseline, but of a run that updates on mini-batches as their "
                f"rewards arrive: a step waits about {share:.1f} s less for rewards (timing_s/adv) for each second "
                "more of its updates. Anything else that makes both differ so looks the same."
            )
    return Signs(baseline=_baseline(log, hidden))


def blocks(log: Scalars) -> bool:
    """Returns whether the loop waits for its rewards before the log-probs.

    A reward function that is not launched asynchronously is timed in `reward` itself.
    """
    return mean(log, "timing_s/reward") > mean(log, "timing_s/adv")


def mean(log: Scalars, name: str) -> float:
    """Returns the mean of a scalar; 0 if it was never logged."""
    series = log.series(name)
    return math.fsum(series.values()) / len(series) if series else 0.0


def _baseline(log: Scalars, hidden: bool) -> str:
    if hidden:
        return (
            f"{TAKEN}: it shows no waits for rewards, so neither how long they take nor whether the run overlaps them "
            "with other work."
        )
    slope, error, _freedom = _slope(log, _beside(log))
    if abs(slope) + 2 * error < _TWO_HALVES:
        return f"{TAKEN}: its waits do not get shorter with longer updates, as they would with mini-batches."
    return (
        f"{TAKEN}; its waits do not show whether that is so, and a run that updates on mini-batches as they arrive "
        "looks like one with quicker rewards."
    )


def _slow_first(waits: dict[int, float], usual: float) -> str:
    """Returns that the first step waits longer than is usual after it, as a clause; "" if it does not.

    In a run that trains on samples of the step before, rewards come in part beside that step's work, which the first
    step does not have.
    """
    first = waits.get(1, 0.0)
    if first > _OVERLAPPED * usual and first > usual + _SLOW_FIRST_S:
        return f"its first step {first:.0f} s"
    return ""


def _shorter(log: Scalars) -> float:
    """Returns by how much the waits are shorter per second of updates, if they clearly are; otherwise 0.

    If a step's updates begin with its first mini-batch, the wait lacks the time of all but the last: 0.75 of it with
    four mini-batches. A baseline's rewards take the same however long its updates are. Both the wait and the time from
    the requests to the last reward must show it: log-probs that vary would move either of them alone.
    """
    found = []
    for beside in ({}, _beside(log)):
        slope, error, freedom = _slope(log, beside)
        if not slope < -_HIDDEN_SHARE or not slope < -_student(_ERRORS, freedom) * error:
            return 0.0
        found.append(-slope)
    return found[-1]


def _beside(log: Scalars) -> dict[int, float]:
    """Returns the time of each step in which rewards arrive unseen: that of its log-probs and values."""
    series = [log.series(f"timing_s/{name}") for name in ("old_log_prob", "ref", "values")]
    return {step: math.fsum(of.get(step, 0.0) for of in series) for step in log.series("timing_s/adv")}


def _slope(log: Scalars, beside: dict[int, float]) -> tuple[float, float, int]:
    """Returns how a step's wait depends on its updates, the standard error, and the degrees of freedom.

    The first step, with its warm-up, is left out, and so are outliers. Responses and rewards change as training goes
    on, so that waits and updates both drift; their trends are removed first. Too few steps give an infinite error.

    Args:
        log: the log.
        beside: step -> seconds that count as waits.
    """
    updates, waits = log.series("timing_s/update_actor"), log.series("timing_s/adv")
    steps = sorted(step for step in waits if step > 1 and step in updates)
    for _ in range(2):  # the trend is that of the usual steps: outliers are found by it, and it is drawn anew
        if len(steps) < _FEWEST:
            return 0.0, math.inf, 1
        x = _without_trend(steps, [updates[step] for step in steps])
        middle = statistics.median(x)
        spread = 1.4826 * statistics.median(abs(each - middle) for each in x)  # robust standard deviation
        usual = [step for step, each in zip(steps, x, strict=True) if abs(each - middle) <= _FAR * spread]
        if len(usual) == len(steps):
            break
        steps = usual
    if len(steps) < _FEWEST:
        return 0.0, math.inf, 1
    x = _without_trend(steps, [updates[step] for step in steps])
    y = _without_trend(steps, [waits[step] + beside.get(step, 0.0) for step in steps])
    squares = math.fsum(each * each for each in x)
    freedom = len(steps) - 2 * len(_blocks_of(steps)) - 1
    if squares < 1e-9 * len(steps):
        return 0.0, math.inf, 1
    slope = math.fsum(a * b for a, b in zip(x, y, strict=True)) / squares
    rest = math.fsum((b - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / freedom / squares), freedom


def _blocks_of(steps: Sequence[int]) -> list[slice]:
    """Returns parts of steps in each of which a trend is taken for straight."""
    number = max(1, len(steps) // _BLOCK)
    bounds = [len(steps) * at // number for at in range(number + 1)]
    return [slice(*ends) for ends in itertools.pairwise(bounds)]


def _without_trend(steps: Sequence[int], values: Sequence[float]) -> list[float]:
    """Returns what is left of values after their straight trend in the number of the step is removed, part by part."""
    rest = []
    for part in _blocks_of(steps):
        slope, start = statistics.linear_regression(steps[part], values[part])
        rest += [value - start - slope * step for step, value in zip(steps[part], values[part], strict=True)]
    return rest


def _student(errors: float, freedom: int) -> float:
    """Returns Student's t of the same probability as standard errors of a normal distribution (Cornish-Fisher)."""
    z, n = errors, freedom
    terms = (
        (z**3 + z) / 4 / n,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96 / n**2,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / n**3,
    )
    return z + math.fsum(terms)
