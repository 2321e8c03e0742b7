"""The text and tables of the page: a run's headline, its tables, and the table that compares runs. Pure.

All text from a trace passes through ``html.escape``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dataflow.drawing.duration import seconds
from dataflow.drawing.page import card, table
from dataflow.drawing.style import cause_colours
from dataflow.errors import counted
from dataflow.timeline.agents import agents_of, causes_of
from dataflow.timeline.causes.culprits import Culprit, culprits, place_of
from dataflow.timeline.downtime import Axis
from dataflow.timeline.page.versions import Versions
from dataflow.timeline.spans import Trace, called
from dataflow.timeline.text import extent

LONGEST = 5
"""Number of waits listed."""
_MEANING = {
    "rewards": "reward requests were still out",
    "weights": "new weights were on their way to the engine",
    "dispatch": "the next task was known, and was being passed on",
    "controller": "a task on the controller's CPU was not done",
    "io": "something was read or written",
    "start-up": "before the first task on these GPUs",
}
_STATUS = {
    "interrupted": "This run was interrupted; all is shown that had ended by then.",
    "failed": "This run failed; all is shown that had ended by then.",
    "running": "This run had not ended when this was written.",
}


def change(value: float) -> str:
    """Returns a change as a share, with a sign: ``−12.3%``."""
    return f"{value:+.1%}".replace("-", "−")


BOUNDS = (
    "Lower bounds differ since each is made of its own run's tasks and requests, as they were measured: other samples, "
    "delays and speed of the machine."
)


def differ(bounds: Sequence[float]) -> bool:
    """True if lower bounds are so far apart that a reader wonders why."""
    return len(bounds) > 1 and max(bounds) > 1.01 * min(bounds)


EVALUATED = ("before", "after", "mean_last_3")
"""Figures of evaluations in a summary, behind ``accuracy_`` or, where it is none, ``score_``."""
Numbers = Mapping[str, Any]
"""The result of :func:`dataflow.timeline.causes.attribution.summary` for a run."""


def compared(
    traces: Mapping[str, Trace], numbers: Mapping[str, Numbers], facts: Mapping[str, Mapping[str, Any]]
) -> str:
    """Returns a table that compares runs with the first; the fastest is marked."""
    whole = {name: of["step_s"] for name, of in numbers.items() if of["step_s"]}  # the others have no whole step
    first = next(iter(whole), None)
    head = ["run", "steps", "wall time", "a step", "change", "GPU busy", "exposed wait", "lower bound"]
    evaluated = [_evaluated(facts.get(name, {})) for name in numbers]
    mean = [mean_of(facts.values())] if any(shown != "–" for shown in evaluated) else []
    best = min(whole, key=lambda name: whole[name]) if len(whole) > 1 else None
    rows: list[list[str]] = []
    for name, of in numbers.items():
        wall, bound = of["wall_s"], of.get("lower_bound_s")
        busy = of["gpu_busy_s"] / wall if wall else 0.0
        rows.append([
            f"<b>{escape(name)}</b>{_status(traces[name])}"
            + (" <small>fastest</small>" if name == best else ""),
            str(traces[name].steps),
            seconds(wall),
            seconds(whole[name]) if name in whole else "–",
            "–" if name == first or name not in whole or first is None else change(whole[name] / whole[first] - 1),
            _meter(busy),
            f"{seconds(of['exposed_wait_s'])} <small>{of['exposed_wait_s'] / wall if wall else 0:.0%}</small>",
            "–" if bound is None else seconds(bound),
            *([evaluated[len(rows)]] if mean else []),
        ])  # fmt: skip
    looks = ["best" if name == best else "" for name in numbers]
    bounds = [of["lower_bound_s"] for of in numbers.values() if of.get("lower_bound_s")]
    why = f'<p class="hint">{escape(BOUNDS)}</p>' if differ(bounds) else ""
    return f'<section class="compared">{table([*head, *mean], rows, looks)}{why}</section>'


def _status(trace: Trace) -> str:
    status = str(trace.meta.get("status", "finished"))
    return "" if status in ("finished", "predicted") else f' <mark class="{_class(status)}">{escape(status)}</mark>'


def _class(status: str) -> str:
    return status if status in _STATUS else "other"


def evaluated_in(facts: Mapping[str, Any]) -> tuple[str, dict[str, float | None]]:
    """Returns what the mean of an evaluation is, ``accuracy`` or ``score``, and its figures of a summary.

    Args:
        facts: of a summary.
    """
    mean = "score" if any(facts.get(f"score_{when}") is not None for when in EVALUATED) else "accuracy"
    return mean, {when: facts.get(f"{mean}_{when}") for when in EVALUATED}


def mean_of(facts: Iterable[Mapping[str, Any]]) -> str:
    """Returns what the means of several runs are: accuracies, if they are of all that have any."""
    return "score" if any(evaluated_in(each)[0] == "score" for each in facts) else "accuracy"


def _evaluated(facts: Mapping[str, Any]) -> str:
    _, evaluated = evaluated_in(facts)
    before, after, mean = evaluated["before"], evaluated["after"], evaluated["mean_last_3"]
    if after is None:
        return "–"
    text = f"{after:.3f}" if before is None else f"{before:.3f} → {after:.3f}"
    return text if mean is None else f"{text} <small>mean of the last 3 evaluations {mean:.3f}</small>"


def legend(causes: Sequence[str]) -> str:
    """Returns the colours of waits by their causes."""
    if not causes:
        return ""
    shown = "".join(f"<span>{_swatch(cause, causes)}{escape(cause)}</span>" for cause in causes)
    return f'<p class="legend" aria-label="causes of exposed waits"><span>waits for</span>{shown}</p>'


def _swatch(cause: str, causes: Sequence[str]) -> str:
    light, dark = cause_colours(causes)[cause]
    return f'<span class="swatch" style="--light: {light}; --dark: {dark}"></span>'


def notes(trace: Trace) -> str:
    """Returns notes to show first: the run did not finish, or its trace is cut off."""
    status, cut = str(trace.meta.get("status", "finished")), trace.meta.get("cut")
    shown = _STATUS.get(status, "")
    text = f'<p class="note {_class(status)}" role="status">{shown}</p>' if shown else ""
    if not cut:
        return text
    shown = str(cut)
    return f'{text}<p class="note cut" role="status">{escape(shown[:1].upper() + shown[1:])}.</p>'


def headline(trace: Trace, numbers: Numbers) -> str:
    """Returns a summary of a run in a few sentences: its time, busy share and waits."""
    wall, steps = numbers["wall_s"], trace.steps
    words = [f"<b>{counted(steps, 'step')}</b> in <b>{seconds(wall)}</b>, {seconds(numbers['step_s'])} a step."]
    pools = trace.pools
    if pools and wall > 0:
        busy = " and ".join(f"<b>{escape(p)}</b> busy <b>{numbers['busy'][p]:.0%}</b>" for p in pools)
        words.append(f"{busy} of the time;")
        waits = [(c, s) for c, s in numbers["exposed_wait_by_cause"].items() if s >= 0.005 * wall]
        listed = ", ".join(f"{escape(cause)} {seconds(s)}" for cause, s in waits[:3])
        mean = " on average" if len(pools) > 1 else ""
        words.append(f"idle <b>{seconds(numbers['exposed_wait_s'])}</b>{mean}{f' ({listed})' if listed else ''}.")
    if (bound := numbers.get("lower_bound_s")) and wall > 0:
        over = wall / bound - 1
        words.append(f"No order of these tasks takes less than {seconds(bound)}: this one is {over:.0%} above.")
    return f'<p class="headline">{" ".join(words)}</p>'


def panel(trace: Trace, numbers: Numbers, facts: Mapping[str, Any]) -> str:
    """Returns a run's tables.

    Args:
        trace: of the run.
        numbers: its summary.
        facts: from its summary.json: :data:`EVALUATED` of ``accuracy_`` or ``score_``, ``total_s``;
            ``samples``, the address of the page of its samples.
    """
    parts = [
        _about(trace, numbers, facts),
        _waits(trace, str(facts.get("samples", ""))),
        _busy(numbers),
        _causes(trace, numbers),
        _staleness(trace),
    ]
    return f'<section class="panel">{"".join(parts)}</section>'


def _changed(policy: Mapping[str, Any]) -> str:
    streams = ", stream rollout" if policy.get("stream_rollout") else ""
    return f"split {policy.get('split')}, max staleness {policy.get('max_staleness')}{streams}"


def _about(trace: Trace, numbers: Numbers, facts: Mapping[str, Any]) -> str:
    meta, steps = trace.meta, trace.steps
    of = meta.get("steps")
    policy = str(meta.get("policy", "–"))
    knobs = [f"{name.replace('_', ' ')} {meta[name]}" for name in ("split", "max_staleness", "order") if name in meta]
    rows = [
        ["policy", f"{escape(policy)}{_status(trace)}"],
        ["", f"<small>{escape(', '.join(knobs))}</small>"] if knobs else [],
        *([f"from step {each['step']}", escape(_changed(each))] for each in meta.get("policies") or ()),
        ["steps", f"{steps} of {of}" if isinstance(of, int) and of != steps else str(steps)],
        ["wall time", f"{seconds(numbers['wall_s'])}, {seconds(numbers['step_s'])} a step"],
        ["exposed wait", seconds(numbers["exposed_wait_s"])],
    ]
    if (total := facts.get("total_s")) is not None:
        rows.append(["", f"<small>{seconds(total)} in all, with start, evaluations and end</small>"])
    for down in trace.downtimes:
        words = down.why or ("" if down.step is None else f"resumed from step {down.step}")
        rows.append(["not running", f"{seconds(down.seconds)} <small>{escape(words)}</small>"])  # which wraps
    if (after := numbers.get("after_training_s", 0.0)) >= 0.05:
        idle = seconds(numbers["after_training_idle_s"])
        rows.append(["after training", f"{seconds(after)} <small>GPUs idle for {idle} of it</small>"])
    if (bound := numbers.get("lower_bound_s")) is not None:
        asked = bound > numbers["gpu_busy_s"] or numbers.get("reward_service_s") == bound
        by = "the reward requests at full concurrency" if asked else "the GPUs' own work"
        rows.append(["lower bound", f"{seconds(bound)} <small>{by}</small>"])
    if (evaluated := _evaluated(facts)) != "–":
        rows.append([mean_of([facts]), evaluated])
    agents = agents_of(trace)
    for agent in agents:
        asked = [m for m in trace.marks if m.resource == agent and not m.args.get("validation")]
        if not asked:
            continue
        # An answer from the ledger takes no time, and what was given up says nothing of the service.
        times = sorted(m.end - m.begin for m in asked if called(m.args))
        again = sum(m.args.get("tries", 1) > 1 for m in asked)
        listed = f"{len(asked)}" + (f", {again} tried again" if again else "")
        rows.append(["reward requests" if len(agents) == 1 else f"requests to {escape(agent)}", listed])
        if times:
            middle, slow = times[len(times) // 2], times[min(len(times) - 1, int(len(times) * 0.99))]
            rows.append(["", f"<small>half within {seconds(middle)}, 99% within {seconds(slow)}, "
                         f"the slowest {seconds(times[-1])}</small>"])  # fmt: skip
    return card("run", table([], [row for row in rows if row]))


def _waits(trace: Trace, samples: str = "") -> str:
    axis = Axis(trace.downtimes, *extent(trace))
    found = culprits(trace)[:LONGEST]
    if not found:
        return card("longest waits", "<p>The GPUs never waited.</p>" if trace.pools else "")
    several = len(trace.pools) > 1
    rows = [_wait(c, axis, several, samples) for c in found]
    return card("longest waits", table(["waited", "at", "for", "who came last", "then ran"], rows), "wide")


def _wait(found: Culprit, axis: Axis, several: bool, samples: str) -> list[str]:
    wait = found.wait
    begin, end = axis.at(wait.begin), axis.at(wait.end)
    where = f' data-from="{begin:.6f}" data-to="{end:.6f}"'
    go = f'<button type="button" class="go" title="show it on the chart"{where}>{seconds(wait.seconds)}</button>'
    cause = f"{escape(wait.cause)} <small>({escape(found.pool)})</small>" if several else escape(wait.cause)
    who = f'<span class="words">{escape(found.words) or "–"}</span>'
    if samples and found.request is not None and (place := place_of(found.request)) is not None:
        step, group = place
        address = escape(f"{samples}#step-{step}-group-{group}")
        who = f'<a class="text" target="samples" title="read what it said" href="{address}">{who}</a>'
    return [
        go,
        f"{begin:.1f} s",
        cause,
        who,
        escape(wait.task) or "–",
    ]


def _causes(trace: Trace, numbers: Numbers) -> str:
    wall = numbers["wall_s"]
    meaning = dict.fromkeys(causes_of(trace), _MEANING["rewards"]) | _MEANING
    listed = list(numbers["exposed_wait_by_cause"])
    rows = [
        [
            f"{_swatch(cause, listed)}{escape(cause)}",
            seconds(s),
            _meter(s / wall if wall else 0.0),
            f"<small>{meaning.get(cause, '')}</small>",
        ]
        for cause, s in numbers["exposed_wait_by_cause"].items()
    ]
    text = table(["waited for", "time", "share of all", ""], rows) if rows else "<p>The GPUs never waited.</p>"
    return card("exposed wait by cause", text, "wide")


def _busy(numbers: Numbers) -> str:
    rows = [[escape(name), _meter(share)] for name, share in numbers["busy"].items()]
    return card("busy", table(["resource", "share of the time"], rows))


def _staleness(trace: Trace) -> str:
    versions, trains = Versions(trace), trace.with_role("trains")
    counts: dict[int, int] = {}
    for span in trace.spans:
        if span.stage in trains and (stale := versions.staleness(span)) is not None:
            counts[stale] = counts.get(stale, 0) + 1
    if not counts:
        return ""
    total = sum(counts.values())
    rows = [[f"{counted(n, 'step')} old", str(counts[n]), _meter(counts[n] / total)] for n in sorted(counts)]
    return card("staleness", table(["samples were", "updates", "share"], rows))


def _meter(share: float) -> str:
    percent = "&lt;0.1%" if 0 < share < 0.001 else f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"
    return f'<meter min="0" max="1" value="{min(1.0, max(0.0, share)):.4f}"></meter> {percent}'
