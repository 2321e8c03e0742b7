"""Tells from the waits of a verl log whether its run is a baseline or overlaps rewards with other work. Pure."""

from __future__ import annotations

import math
import statistics

from dataflow.planning.sources.scalars import Scalars

# After a shorter wait the latency cannot be fitted: the rewards arrived during the log-probs.
HIDDEN_S = 1.0
# Warm-up lengthens a first step by less; in the published runs the ratio is 1.3 and 1.7 with overlap, 1.0 without.
_OVERLAPPED = 1.15
_FEWEST = 12
"""Steps from which the waits are compared with the updates."""
_HIDDEN_SHARE = 0.3
"""Least share of the updates that hides rewards where a run updates on mini-batches; with two of them it is a half."""
_ERRORS = 3.0
"""Standard errors by which the slope must differ; 1 baseline in 700 does so by chance."""


def overlaps(log: Scalars) -> str:
    """Returns the sign that a log's run used samples before all rewards of its step were there; "" if there is none."""
    waits = log.series("timing_s/adv")
    later = [seconds for step, seconds in waits.items() if step > 1]
    if len(later) < 3 or (usual := statistics.median(later)) < HIDDEN_S:
        return ""
    if signs := _of_stale_samples(log, usual):
        return (
            f"this log is of a run that overlaps steps already, not of a baseline: steps usually wait {usual:.0f} s "
            f"for rewards (timing_s/adv), {' and '.join(signs)}. Its waits do not show how long rewards take."
        )
    slope, error = _slope(log)
    if slope < -_HIDDEN_SHARE and slope < -_ERRORS * error:
        return (
            "this log is of a run that updates on mini-batches as their rewards arrive, not of a baseline: a step "
            f"waits {-slope:.1f} s less for rewards (timing_s/adv) for each second more of its updates. Its waits do "
            "not show how long rewards take."
        )
    return ""


def shows_baseline(log: Scalars) -> bool:
    """True if the waits show that no update runs before the last reward of its step; few steps show nothing."""
    slope, error = _slope(log)
    return slope > -_HIDDEN_SHARE + 2 * error


def _of_stale_samples(log: Scalars, usual: float) -> list[str]:
    """Returns the signs that a run trained on samples of an earlier step.

    In such a run, rewards come in part beside the work of the step before: the first step, which has none before it,
    waits longer than the others, and one that follows a validation hardly waits.

    Args:
        log: the log.
        usual: median of its steps' waits.
    """
    waits = log.series("timing_s/adv")
    after = [waits[step + 1] for step in log.series("timing_s/testing") if step and step + 1 in waits]
    signs = []
    if waits.get(1, 0.0) > _OVERLAPPED * usual:
        signs.append(f"its first step {waits[1]:.0f} s")
    if after and statistics.median(after) < usual / 2:
        signs.append(f"those after a validation {statistics.median(after):.0f} s")
    return signs


def _slope(log: Scalars) -> tuple[float, float]:
    """Returns how the time of a step's rewards, as the log shows it, depends on that of its updates, and the error.

    A baseline's rewards take the same however long its updates are: 0. If a step's updates begin with its first
    mini-batch, the wait lacks the time of all but the last: -0.75 with four mini-batches. The first step, with its
    warm-up, is left out; too few steps give an infinite error.
    """
    beside = [log.series(f"timing_s/{name}") for name in ("old_log_prob", "ref", "values")]
    updates, waits = log.series("timing_s/update_actor"), log.series("timing_s/adv")
    steps = [step for step in waits if step > 1 and step in updates]
    x = [updates[step] for step in steps]
    y = [waits[step] + math.fsum(series.get(step, 0.0) for series in beside) for step in steps]
    if len(steps) < _FEWEST or max(x) - min(x) < 1e-6:
        return 0.0, math.inf
    slope, start = statistics.linear_regression(x, y)
    rest = math.fsum((b - start - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    mean = statistics.fmean(x)
    spread = math.fsum((a - mean) ** 2 for a in x)
    return slope, math.sqrt(rest / (len(steps) - 2) / spread)
