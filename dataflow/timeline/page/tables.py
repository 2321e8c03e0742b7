"""The text and tables of the page. Pure; all text from a trace passes through ``html.escape``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

from dataflow.drawing.duration import seconds
from dataflow.drawing.page import card, table
from dataflow.drawing.style import cause_colours
from dataflow.errors import counted
from dataflow.timeline.agents import agents_of, reward_causes_of
from dataflow.timeline.causes.culprits import Culprit, culprits, place_of
from dataflow.timeline.compare import Facts, cells, compared, evaluated, evaluated_in, fastest, note
from dataflow.timeline.downtime import Axis
from dataflow.timeline.page.chart import versions
from dataflow.timeline.spans import Trace, called
from dataflow.timeline.text import extent

_LONGEST = 5
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
Numbers = Mapping[str, Any]
"""The result of :func:`dataflow.timeline.causes.attribution.summary` for a run."""


def comparison(traces: Mapping[str, Trace], facts: Facts) -> str:
    """Returns the table that compares runs with the first; the fastest is marked."""
    rows = compared(traces, facts)
    head, *lines = cells(rows)
    best = fastest(rows)
    shown = [[f"<b>{escape(name)}</b>{_status(traces[name])}", *map(escape, rest)] for name, *rest in lines]
    said = f'<p class="hint">{escape(words)}</p>' if (words := note(rows)) else ""
    marks = ["best" if row is best else "" for row in rows]
    return f'<section class="compared">{table(head, shown, marks)}{said}</section>'


def _status(trace: Trace) -> str:
    status = str(trace.meta.get("status", "finished"))
    kind = status if status in _STATUS else "other"
    return "" if status in ("finished", "predicted") else f' <mark class="{kind}">{escape(status)}</mark>'


def warnings(trace: Trace, name: str) -> str:
    """Returns notes to show first: the run did not finish, or its trace is cut off; with the run's name unless ""."""
    status, cut = str(trace.meta.get("status", "finished")), str(trace.meta.get("cut") or "")
    said = [(status, _STATUS.get(status, "")), ("cut", f"{escape(cut[:1].upper() + cut[1:])}." if cut else "")]
    of = f"<b>{escape(name)}:</b> " if name else ""
    return "".join(f'<p class="note {kind}" role="status">{of}{text}</p>' for kind, text in said if text)


def headline(trace: Trace, numbers: Numbers) -> str:
    """Returns a summary of a run in a few sentences: its time, busy share and waits."""
    wall = numbers["wall_s"]
    words = [f"<b>{counted(trace.steps, 'step')}</b> in <b>{seconds(wall)}</b>, {seconds(numbers['step_s'])} a step."]
    if trace.pools and wall > 0:
        busy = " and ".join(f"<b>{escape(p)}</b> busy <b>{numbers['busy'][p]:.0%}</b>" for p in trace.pools)
        waits = [(c, s) for c, s in numbers["exposed_wait_by_cause"].items() if s >= 0.005 * wall]
        listed = ", ".join(f"{escape(cause)} {seconds(s)}" for cause, s in waits[:3])
        mean = " on average" if len(trace.pools) > 1 else ""
        words.append(f"{busy} of the time;")
        words.append(f"idle <b>{seconds(numbers['exposed_wait_s'])}</b>{mean}{f' ({listed})' if listed else ''}.")
    if (bound := numbers.get("lower_bound_s")) and wall > 0:
        words.append(f"No order of these tasks takes less than {seconds(bound)}: this is {wall / bound - 1:.0%} above.")
    return f'<p class="headline">{" ".join(words)}</p>'


def cards(trace: Trace, numbers: Numbers, facts: Mapping[str, Any]) -> str:
    """Returns a run's tables; ``facts`` are those that its trace does not contain."""
    parts = [
        _about(trace, numbers, facts),
        longest_waits(trace, str(facts.get("samples", ""))),
        _busy(numbers),
        _causes(trace, numbers),
        _staleness(trace),
    ]
    return f'<section class="panel">{"".join(parts)}</section>'


def _about(trace: Trace, numbers: Numbers, facts: Mapping[str, Any]) -> str:
    meta, of = trace.meta, trace.meta.get("steps")
    knobs = [f"{name.replace('_', ' ')} {meta[name]}" for name in ("split", "max_staleness", "order") if name in meta]
    rows = [["policy", f"{escape(str(meta.get('policy', '–')))}{_status(trace)}"]]
    rows += [["", _small(", ".join(knobs))]] if knobs else []
    for each in meta.get("policies") or ():
        streams = ", stream rollout" if each.get("stream_rollout") else ""
        text = f"split {each.get('split')}, max staleness {each.get('max_staleness')}{streams}"
        rows.append([f"from step {each['step']}", escape(text)])
    rows += [
        ["steps", f"{trace.steps} of {of}" if isinstance(of, int) and of != trace.steps else str(trace.steps)],
        ["wall time", f"{seconds(numbers['wall_s'])}, {seconds(numbers['step_s'])} a step"],
        ["exposed wait", seconds(numbers["exposed_wait_s"])],
    ]
    if (total := facts.get("total_s")) is not None:
        rows.append(["", _small(f"{seconds(total)} in all, with start, evaluations and end")])
    for down in trace.downtimes:
        rows.append(["not running", f"{seconds(down.seconds)} {_small(down.why)}"])
    if (after := numbers["after_training_s"]) >= 0.05:
        idle = _small(f"GPUs idle for {seconds(numbers['after_training_idle_s'])} of it")
        rows.append(["after training", f"{seconds(after)} {idle}"])
    if (bound := numbers.get("lower_bound_s")) is not None:
        asked = bound > numbers["gpu_busy_s"] or numbers.get("reward_service_s") == bound
        by = "the reward requests at full concurrency" if asked else "the GPUs' own work"
        rows.append(["lower bound", f"{seconds(bound)} {_small(by)}"])
    if words := evaluated(facts):
        rows.append([evaluated_in(facts)[0], escape(words)])
    agents = agents_of(trace)
    for agent in agents:
        asked_of = [m for m in trace.marks if m.resource == agent and not m.args.get("validation")]
        if not asked_of:
            continue
        # An answer from the ledger takes no time, and what was given up says nothing of the service.
        times = sorted(m.end - m.begin for m in asked_of if called(m.args))
        again = sum(m.args.get("tries", 1) > 1 for m in asked_of)
        listed = f"{len(asked_of)}" + (f", {again} tried again" if again else "")
        rows.append(["reward requests" if len(agents) == 1 else f"requests to {escape(agent)}", listed])
        if times:
            middle, slow = times[len(times) // 2], times[int(len(times) * 0.99)]
            text = f"half within {seconds(middle)}, 99% within {seconds(slow)}, the slowest {seconds(times[-1])}"
            rows.append(["", _small(text)])
    return card("run", table([], rows))


def _small(text: str) -> str:
    return f"<small>{escape(text)}</small>"


def longest_waits(trace: Trace, samples: str = "") -> str:
    """Returns the table of the longest waits; ``samples`` is the address of the page of the run's samples."""
    axis, found = Axis(trace.downtimes, *extent(trace)), culprits(trace)[:_LONGEST]
    if not found:
        return card("longest waits", "<p>The GPUs never waited.</p>" if trace.pools else "")
    rows = [_wait(culprit, axis, len(trace.pools) > 1, samples) for culprit in found]
    return card("longest waits", table(["waited", "at", "for", "who came last", "then ran"], rows), "wide")


def _wait(found: Culprit, axis: Axis, several: bool, samples: str) -> list[str]:
    wait = found.wait
    begin, end = axis.at(wait.begin), axis.at(wait.end)
    where = f' data-from="{begin:.6f}" data-to="{end:.6f}"'
    go = f'<button type="button" class="go" title="show it on the chart"{where}>{seconds(wait.seconds)}</button>'
    cause = escape(wait.cause) + (f" {_small(f'({found.pool})')}" if several else "")
    who = f'<span class="words">{escape(found.words) or "–"}</span>'
    place = place_of(found.request) if found.request else None
    if samples and place:
        address = escape(f"{samples}#step-{place[0]}-group-{place[1]}")
        who = f'<a class="text" target="samples" title="read what it said" href="{address}">{who}</a>'
    return [go, f"{begin:.1f} s", cause, who, escape(wait.task) or "–"]


def _causes(trace: Trace, numbers: Numbers) -> str:
    wall, by_cause = numbers["wall_s"], numbers["exposed_wait_by_cause"]
    if not by_cause:
        return card("exposed wait by cause", "<p>The GPUs never waited.</p>", "wide")
    meaning = dict.fromkeys(reward_causes_of(trace), _MEANING["rewards"]) | _MEANING
    rows = []
    for cause, s in by_cause.items():
        named = f"{_swatch(cause, by_cause)}{escape(cause)}"
        rows.append([named, seconds(s), _meter(s / wall if wall else 0.0), _small(meaning.get(cause, ""))])
    return card("exposed wait by cause", table(["waited for", "time", "share of all", ""], rows), "wide")


def legend(causes: Mapping[str, Any]) -> str:
    """Returns the colours of waits by their causes."""
    shown = "".join(f"<span>{_swatch(cause, causes)}{escape(cause)}</span>" for cause in causes)
    return f'<p class="legend" aria-label="causes of exposed waits"><span>waits for</span>{shown}</p>' if causes else ""


def _swatch(cause: str, causes: Mapping[str, Any]) -> str:
    light, dark = cause_colours(causes)[cause]
    return f'<span class="swatch" style="--light: {light}; --dark: {dark}"></span>'


def _busy(numbers: Numbers) -> str:
    rows = [[escape(name), _meter(share)] for name, share in numbers["busy"].items()]
    return card("busy", table(["resource", "share of the time"], rows))


def _staleness(trace: Trace) -> str:
    known, trains = versions(trace), trace.with_role("trains")
    found = Counter(stale for s in trace.spans if s.stage in trains and (stale := known[s.task][1]) is not None)
    rows = [[f"{counted(n, 'step')} old", str(found[n]), _meter(found[n] / found.total())] for n in sorted(found)]
    return card("staleness", table(["samples were", "updates", "share"], rows)) if rows else ""


def _meter(share: float) -> str:
    percent = "&lt;0.1%" if 0 < share < 0.001 else f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"
    return f'<meter min="0" max="1" value="{min(1.0, max(0.0, share)):.4f}"></meter> {percent}'
