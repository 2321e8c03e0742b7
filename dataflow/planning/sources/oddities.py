"""What in a log of verl's may mislead a plan: steps that lack a timing, time that no stage has, an exceptional step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from dataflow.drawing.duration import figure
from dataflow.planning.sources.logs.needed import EACH_STEP, NOW_AND_THEN, SECONDS, WHOLE
from dataflow.planning.sources.overlaps import mean
from dataflow.planning.sources.scalars import Scalars

_MUCH = 0.05
"""Share of the steps' time that is worth a sentence."""
_EXCEPTION = 4.0
"""How many times as long as the median an exceptional step takes, at least."""
_LISTED = 3


def oddities(log: Scalars) -> Iterator[str]:
    """Yields sentences on what the plan lacks, or fills in."""
    steps = {step for name in EACH_STEP for step in log.series(SECONDS + name)}
    for name in EACH_STEP:
        series = log.series(SECONDS + name)
        # Step 0 is that of a validation before training.
        if series and (missing := sorted(steps - series.keys() - {0})):
            they = "step lacks" if len(missing) == 1 else f"of {len(steps - {0})} steps lack"
            yield f"{len(missing)} {they} {SECONDS}{name}, the first of them step {missing[0]}; others stand in."
    if left := _left_over(log):
        yield left


def _left_over(log: Scalars) -> str:
    """Returns a sentence on the time of the steps that none of the plan's stages has; "" if there is little."""
    whole = log.series(SECONDS + WHOLE)
    timed = {name: log.series(SECONDS + name) for name in (*EACH_STEP, *NOW_AND_THEN)}
    complete = [step for step in whole if all(step in timed[name] for name in EACH_STEP if timed[name])]
    rests = [whole[step] - sum(of.get(step, 0.0) for of in timed.values()) for step in complete]
    rest = statistics.median(rests) if rests else 0.0
    usual = statistics.median(whole.values()) if whole else 0.0
    if rest <= _MUCH * usual:
        return ""
    others = {
        name: seconds
        for name in log.columns
        if name.startswith(SECONDS) and name.removeprefix(SECONDS) not in (*timed, WHOLE)
        if usual * _MUCH / 5 < (seconds := mean(log, name)) <= rest * 1.02
    }
    listed = [f"{name} {figure(others[name], 3)} s" for name in sorted(others, key=others.__getitem__, reverse=True)]
    named = f" (the log also has {', '.join(listed[:_LISTED])})" if listed else ""
    return f"a step of the log takes {figure(rest, 3)} s more than the stages of this plan, which lacks them{named}."


def exception(log: Scalars) -> str:
    """Returns the caution that one step took far longer than the others, validation and checkpoint apart; "" if none
    did."""
    extra = [log.series(SECONDS + name) for name in NOW_AND_THEN]
    whole = {step: s - sum(of.get(step, 0.0) for of in extra) for step, s in log.series(SECONDS + WHOLE).items()}
    later = {step: seconds for step, seconds in whole.items() if step != min(whole)}  # the first has the warm-up
    if len(later) < _LISTED:
        return ""
    usual = statistics.median(later.values())
    longest = max(later, key=later.__getitem__)
    if usual <= 0 or later[longest] < _EXCEPTION * usual or later[longest] - usual <= _MUCH * sum(later.values()):
        return ""
    return (
        f"step {longest} took {figure(later[longest])} s, where half of the steps took {figure(usual)} s or less, and "
        "this plan spreads that time over all steps; if it was an exception, leave it out of the log."
    )
