"""The timeline as an interactive page: one HTML file that loads nothing and opens offline.

What is drawn is data for ``page.js``: vertical places are pixels from the top, horizontal ones seconds from the run's
first task; the words of a thing are a headline, then a line ``name<TAB>value`` for each fact.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from dataflow.drawing.duration import seconds
from dataflow.drawing.page import card, embedded, shell, table
from dataflow.drawing.style import cause_colours, colours, contrast
from dataflow.errors import DataError, counted
from dataflow.files import replaced
from dataflow.timeline.agents import agents_of, reward_causes_of
from dataflow.timeline.causes import critical_path, culprits, summary
from dataflow.timeline.compare import Facts, cells, compared, evaluated, evaluated_in, fastest, note
from dataflow.timeline.spans import POOLS, Span, Trace, called, in_flight, lanes, looks
from dataflow.timeline.text import extent, named

_HEAD, _GAP = 22, 6  # pixels: a run's name, between two rows
_POOL, _LANE, _LANES, _BAND = 42, 15, 120, 84  # a GPU pool, a lane of another row, all of them, requests in flight
_POINTS = 2000  # of a band: about the pixels across a screen
_WORD = 80  # characters of one fact, at most
_LONGEST = 5  # waits in the table
_GREY = {"#4D4D4D": "#8C8C8C"}
"""Colours of stages that are too dark for a dark page, and what replaces them."""
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
"""The result of :func:`dataflow.timeline.causes.summary` for a run."""


def page(
    traces: Mapping[str, Trace] | Trace,
    path: str | os.PathLike[str],
    title: str | None = None,
    facts: Facts | None = None,
) -> None:
    """Writes a page of one run, or of several on one time axis, of which the others are compared with the first.

    The path ends in ``.html`` and is replaced atomically; the same traces give the same file. The default title is the
    names of the runs.
    """
    if Path(path).suffix.lower() != ".html":
        raise DataError(f"page {path}: no such kind, '{Path(path).suffix}'; give a name in .html.")
    runs, facts = named(traces, f"page {path}"), facts or {}
    drawn = chart(runs, {name: str(of["samples"]) for name, of in facts.items() if "samples" in of})
    several = len(runs) > 1
    *others, last = runs
    title = title or (f"{', '.join(others)} and {last}" if others else last)
    top, below = [_warnings(trace, name if several else "") for name, trace in runs.items()], list[str]()
    for name, trace in runs.items():
        numbers, known = summary(trace), facts.get(name, {})
        (below if several else top).append((f"<h2>{escape(name)}</h2>" if several else "") + _headline(trace, numbers))
        cards = [_about(trace, numbers, known), _waits(trace, str(known.get("samples", ""))), _causes(trace, numbers)]
        below.append(f'<section class="panel">{"".join(cards)}</section>')
    if several:
        top.append(_comparison(runs, facts))
    stages = "".join(f"<span>{_swatch(*tints[:2])}{escape(name)}</span>" for name, tints in drawn["stages"].items())
    causes = "".join(f"<span>{_swatch(*tints)}{escape(cause)}</span>" for cause, tints in drawn["causes"].items())
    body = Template(_asset("page.html")).substitute(
        title=escape(title), top="\n".join(top), stages=stages, causes=causes, below="\n".join(below),
        data=embedded("data", drawn), script=_asset("page.js"),
    )  # fmt: skip
    with replaced(path) as temporary:
        temporary.write_text(shell(title, body), encoding="utf-8")


def _asset(name: str) -> str:
    return (files("dataflow.timeline") / name).read_text(encoding="utf-8")


# --- what is drawn ----------------------------------------------------------------------------------------------------


def chart(traces: Mapping[str, Trace], samples: Mapping[str, str]) -> dict[str, Any]:
    """Returns what ``page.js`` draws, JSON-able.

    Each run has at least one task; ``samples`` has the address of the page of its samples, if there is one.
    """
    made: dict[str, Any] = {name: [] for name in ("runs", "rows", "bands", "waits", "bars", "path", "gaps")}
    made |= {"height": 0.0, "length": 0.0}
    for name, trace in traces.items():
        _draw(made, trace, name if len(traces) > 1 else "", samples.get(name, ""), 1.0 if len(traces) < 3 else 0.5)
    fill = colours(*looks(traces.values()))
    made["stages"] = {name: [c, _GREY.get(c, c), contrast(c)] for name, c in fill.items()}
    made["causes"] = cause_colours(wait["cause"] for wait in made["waits"])
    made["length"] = made["length"] * 1.005 or 1.0
    return made


def _draw(made: dict[str, Any], trace: Trace, name: str, samples: str, tall: float) -> None:
    """Adds one run below those that are there."""
    begin, end = extent(trace)
    head = f"{name}: " if name else ""
    top = made["height"]
    made["height"] += _HEAD
    made["runs"].append({"name": name, "y": top + _HEAD / 2})
    made["length"] = max(made["length"], end - begin)

    def place(one: Span | Any, where: tuple[float, float]) -> dict[str, Any]:
        return {"x": [round(at - begin, 6) for at in (one.begin, one.end)], "y": [round(y, 1) for y in where]}

    def spent(one: Span | Any) -> dict[str, str]:
        times = {"began": one.begin - begin, "ended": one.end - begin}
        return {"took": seconds(one.end - one.begin)} | {word: f"{at:.2f} s" for word, at in times.items()}

    bars: dict[str, tuple[float, float]] = {}  # task -> (top, bottom)
    rows: dict[str, tuple[float, float]] = {}  # resource -> (top, bottom)
    for resource in trace.resources:
        above, tracks = made["height"], lanes(trace.on(resource))
        lane = _POOL if resource in POOLS and len(tracks) == 1 else _LANE
        high = min(lane * tall, _LANES * tall / max(1, len(tracks)))
        for i, spans in enumerate(tracks):
            for span in spans:
                where = bars[span.task] = above + i * high, above + (i + 1) * high - (1 if high > 4 else 0)
                facts = spent(span) | {"waited for": span.waited_for} | span.args
                if times := facts.pop("emitted_s", ()):
                    facts["emitted"] = f"in {counted(len(times), 'chunk')}, from {seconds(times[0] - begin)} on"
                if facts.pop("optional", False):
                    facts["training"] = "does not wait for it"
                made["bars"].append({**place(span, where), "stage": span.stage, "label": span.label,
                                     "task": head + span.task, "tip": _tip(head + span.task, facts)})  # fmt: skip
        made["height"] += high * len(tracks)
        if levels := in_flight(mark for mark in trace.marks if mark.resource == resource):
            points = [[round(time - begin, 6), level] for time, level in thin(levels, _POINTS)]
            band = [made["height"] + 2, made["height"] + 2 + _BAND * tall]
            most = max(level for _, level in levels)
            made["bands"].append({"y": band, "points": points, "most": most, "head": head})
            made["height"] = band[1]
        rows[resource] = above, made["height"]
        made["rows"].append({"name": resource, "top": above, "bottom": made["height"]})
        made["height"] += _GAP
    for found in culprits(trace):
        if found.pool not in rows:
            continue
        wait = found.wait
        address = f"{samples}#step-{found.place[0]}-group-{found.place[1]}" if samples and found.place else ""
        facts = {"came last": found.words, "then ran": wait.task, "click": "opens its text" if address else ""}
        tip = _tip(f"{head}{found.pool} waits for {wait.cause}", spent(wait) | facts)
        words = f"{wait.cause} {seconds(wait.seconds)}"
        made["waits"].append({**place(wait, rows[found.pool]), "cause": wait.cause, "task": head + wait.task,
                              "words": words, "address": address, "tip": tip})  # fmt: skip
    for span in critical_path(trace):
        # A chunk of a streaming task has no bar of its own; the path runs over the task's bar.
        whole = Span(span.stage, span.step, 0, 1, span.resource, 0, 0).task
        where = bars.get(span.task) or bars.get(whole) or rows[span.resource]
        made["path"].append({**place(span, where), "stage": span.stage, "task": head + span.task})
    for gap in trace.gaps:
        made["gaps"].append({"x": gap.at - begin, "top": top + _HEAD, "bottom": made["height"] - _GAP,
                             "tip": head + gap.words})  # fmt: skip


def _tip(head: str, facts: Mapping[str, Any]) -> str:
    lines = [head]
    for name, value in facts.items():
        if value is not None and value != "":
            text = " ".join((f"{value:.6g}" if isinstance(value, float) else str(value)).split())
            words = " ".join(name.replace("_", " ").split())[:_WORD]
            lines.append(f"{words}\t{text if len(text) <= _WORD else text[: _WORD - 1] + '…'}")
    return "\n".join(lines)


def thin(levels: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """Returns about ``most`` of the (seconds, level) at most, each with the highest level until the next.

    >>> thin([(0, 1), (1, 5), (2, 3), (3, 4), (9, 0)], 2)
    [(0, 5), (3, 4), (9, 0)]
    """
    size = -(-len(levels) // most)
    shares = [levels[i : i + size] for i in range(0, len(levels) - 1, size)]
    return [*((share[0][0], max(level for _, level in share)) for share in shares), levels[-1]]


# --- the text and tables; all text from a trace passes through html.escape --------------------------------------------


def _comparison(traces: Mapping[str, Trace], facts: Facts) -> str:
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


def _warnings(trace: Trace, name: str) -> str:
    """Returns notes to show first: the run did not finish, or its trace is cut off; with the run's name unless ""."""
    status, cut = str(trace.meta.get("status", "finished")), str(trace.meta.get("cut") or "")
    said = [(status, _STATUS.get(status, "")), ("cut", f"{escape(cut[:1].upper() + cut[1:])}." if cut else "")]
    of = f"<b>{escape(name)}:</b> " if name else ""
    return "".join(f'<p class="note {kind}" role="status">{of}{text}</p>' for kind, text in said if text)


def _headline(trace: Trace, numbers: Numbers) -> str:
    """Returns a summary of a run in a few sentences: its time, busy share and waits."""
    wall = numbers["wall_s"]
    words = [f"<b>{counted(trace.steps, 'step')}</b> in <b>{seconds(wall)}</b>, {seconds(numbers['step_s'])} a step."]
    if trace.pools and wall > 0:
        busy = " and ".join(f"<b>{escape(p)}</b> busy <b>{numbers['busy'][p]:.0%}</b>" for p in trace.pools)
        mean = " on average" if len(trace.pools) > 1 else ""
        words.append(f"{busy} of the time; idle <b>{seconds(numbers['exposed_wait_s'])}</b>{mean}.")
    if (bound := numbers.get("lower_bound_s")) and wall > 0:
        words.append(f"No order of these tasks takes less than {seconds(bound)}: this is {wall / bound - 1:.0%} above.")
    return f'<p class="headline">{" ".join(words)}</p>'


def _about(trace: Trace, numbers: Numbers, facts: Mapping[str, Any]) -> str:
    meta = trace.meta
    knobs = [f"{name.replace('_', ' ')} {meta[name]}" for name in ("split", "max_staleness", "order") if name in meta]
    rows = [["policy", f"{escape(str(meta.get('policy', '–')))}{_status(trace)} {_small(', '.join(knobs))}"]]
    for each in meta.get("policies") or ():
        streams = ", stream rollout" if each.get("stream_rollout") else ""
        text = f"split {each.get('split')}, max staleness {each.get('max_staleness')}{streams}"
        rows.append([f"from step {each['step']}", escape(text)])
    rows.append(["steps", f"{trace.steps} of {escape(str(meta.get('steps', trace.steps)))}"])
    if (total := facts.get("total_s")) is not None:
        rows.append(["in all", f"{seconds(total)} {_small('with start, evaluations and end')}"])
    rows += [["not running", f"{seconds(gap.seconds)} {_small(gap.why)}"] for gap in trace.gaps]
    if (after := numbers["after_training_s"]) >= 0.05:
        rows.append(["after training", f"{seconds(after)} {_small('until the last task ended')}"])
    if (bound := numbers.get("lower_bound_s")) is not None:
        asked = bound > numbers["gpu_busy_s"] or numbers.get("reward_service_s") == bound
        by = "the reward requests at full concurrency" if asked else "the GPUs' own work"
        rows.append(["lower bound", f"{seconds(bound)} {_small(by)}"])
    if words := evaluated(facts):
        rows.append([evaluated_in(facts)[0], escape(words)])
    agents = agents_of(trace)
    for agent in agents:
        asked_of = [m for m in trace.marks if m.resource == agent and not m.args.get("validation")]
        # An answer from the ledger takes no time, and what was given up says nothing of the service.
        times = sorted(m.end - m.begin for m in asked_of if called(m.args))
        if times:
            again = sum(m.args.get("tries", 1) > 1 for m in asked_of)
            middle, slow = times[len(times) // 2], times[int(len(times) * 0.99)]
            text = f"half within {seconds(middle)}, 99% within {seconds(slow)}, the slowest {seconds(times[-1])}"
            listed = f"{len(asked_of)}" + (f", {again} tried again" if again else "")
            name = "reward requests" if len(agents) == 1 else f"requests to {escape(agent)}"
            rows.append([name, f"{listed} {_small(text)}"])
    return card("run", table([], rows))


def _small(text: str) -> str:
    return f"<small>{escape(text)}</small>"


def _waits(trace: Trace, samples: str) -> str:
    """Returns the table of the longest waits; ``samples`` is the address of the page of the run's samples."""
    begin, found = extent(trace)[0], culprits(trace)[:_LONGEST]
    if not found:
        return card("longest waits", "<p>The GPUs never waited.</p>" if trace.pools else "")
    rows = []
    for each in found:
        wait = each.wait
        where = f' data-from="{wait.begin - begin:.6f}" data-to="{wait.end - begin:.6f}"'
        go = f'<button type="button" class="go" title="show it on the chart"{where}>{seconds(wait.seconds)}</button>'
        who = f'<span class="words">{escape(each.words) or "–"}</span>'
        if samples and each.place:
            address = escape(f"{samples}#step-{each.place[0]}-group-{each.place[1]}")
            who = f'<a class="text" target="samples" title="read what it said" href="{address}">{who}</a>'
        pool = f" {_small(f'({each.pool})')}" if len(trace.pools) > 1 else ""
        rows.append([go, f"{wait.begin - begin:.1f} s", escape(wait.cause) + pool, who, escape(wait.task) or "–"])
    return card("longest waits", table(["waited", "at", "for", "who came last", "then ran"], rows), "wide")


def _causes(trace: Trace, numbers: Numbers) -> str:
    wall, by_cause = numbers["wall_s"], numbers["exposed_wait_by_cause"]
    if not by_cause:
        return ""
    meaning = dict.fromkeys(reward_causes_of(trace), _MEANING["rewards"]) | _MEANING
    tints = cause_colours(by_cause)
    rows = []
    for cause, waited in by_cause.items():
        named = f"{_swatch(*tints[cause])}{escape(cause)}"
        share = f"{waited / wall if wall else 0.0:.1%}"
        rows.append([named, seconds(waited), share, _small(meaning.get(cause, ""))])
    return card("exposed wait by cause", table(["waited for", "time", "share of all", ""], rows), "wide")


def _swatch(light: str, dark: str) -> str:
    return f'<span class="swatch" style="--light: {light}; --dark: {dark}"></span>'
