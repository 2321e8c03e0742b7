"""The timeline as text, for terminals and golden tests: a row per resource, a letter per stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from dataflow.drawing.duration import seconds as duration
from dataflow.errors import DataError, counted
from dataflow.timeline.causes import Culprit, culprits, exposed_waits, summary
from dataflow.timeline.spans import POOLS, Span, Trace, in_flight, lanes, looks

LETTERS = {
    "samples": "R",
    "requests": "Q",
    "collects": "C",
    "trains": "U",
    "syncs": "GS",
    "validates": "Vv",
    "saves": "Kkw",
}
"""Letters of the stages with a role; a stage's first choice is the one that its name begins with."""

_SPARE = "BDEHJKMNPTWXYZabcdefghijkmnpqrstuwxyz"  # O, I, o and l look like digits
_BARS = "▁▂▃▄▅▆▇█"
_GAP = "/"


def letters(stages: Iterable[str], roles: Mapping[str, str]) -> dict[str, str]:
    """Returns a letter for each stage: that of its role, else a free one from its name, else any free one.

    >>> letters(["draw", "penalise_length"], {"draw": "samples"})
    {'draw': 'R', 'penalise_length': 'P'}
    """
    stages, named = list(stages), dict[str, str]()
    free = {role: [*of] for role, of in LETTERS.items()}
    for stage in stages:
        if of := free.get(roles.get(stage, "")):
            named[stage] = stage[0].upper() if stage[0].upper() in of else of[0]
            of.remove(named[stage])
    used = set("".join(LETTERS.values()))
    for stage in stages:
        if stage in named:
            continue
        wanted = [*stage.upper(), *stage.lower(), *_SPARE]
        named[stage] = next((c for c in wanted if c.isalpha() and c.isascii() and c not in {*used, *"OIol"}), "?")
        used.add(named[stage])
    return {stage: named[stage] for stage in stages}


def gantt(trace: Trace, width: int = 100) -> str:
    """Returns a title, a row for each lane of each resource, rewards in flight for each agent, an axis and a legend.

    A task is drawn as its letter, its step (and part) if they fit, then "="; the GPU's waits as "~"; "/" marks where
    the run was killed and resumed. The text is as wide as ``width`` columns.
    """
    if not trace.spans:
        return f"{title(trace)}\n(no task ran)\n"
    begin, end = extent(trace)
    bars = [(name if i == 0 else "", lane) for name in trace.resources for i, lane in enumerate(lanes(trace.on(name)))]
    flights = {name: in_flight(m for m in trace.marks if m.resource == name) for name in trace.resources}
    flights = {name: levels for name, levels in flights.items() if levels}
    rows = {name: f"{name} in flight" if len(flights) > 1 else "in flight" for name in flights}
    left = max(len(name) for name in [*(name for name, _ in bars), *rows.values()]) + 2
    columns = max(10, width - left)
    scale = columns / (end - begin) if end > begin else 0.0

    def column(time: float) -> int:
        return min(columns, max(0, round((time - begin) * scale)))

    def line(name: str, row: Sequence[str]) -> str:
        cells = list("".join(row).ljust(columns))
        for gap in trace.gaps:
            cells[min(columns - 1, column(gap.at))] = _GAP
        return f"{name:<{left}}{''.join(cells).rstrip()}"

    letter, lines = letters(*looks([trace])), [title(trace)]
    for name, lane in bars:
        cells = [" "] * columns
        for wait in exposed_waits(trace, name) if name in POOLS else ():
            a, b = column(wait.begin), column(wait.end)
            cells[a:b] = "~" * (b - a)
        for span in lane:
            a, b = column(span.begin), column(span.end)
            cells[a:b] = _bar(letter[span.stage], span, b - a) if b > a else ""
        for span in lane:
            # Shorter than a column: shown only where the column is empty.
            a = min(column(span.begin), columns - 1)
            if column(span.end) <= a and cells[a] == " ":
                cells[a] = letter[span.stage]
        lines.append(line(name, cells))
    legend = [f"{letter[stage]} {stage}" for stage in trace.stages] + [f"~ {' or '.join(trace.pools) or 'gpu'} waits"]
    for agent, levels in flights.items():
        most, highest = max(level for _, level in levels), [0] * columns
        for (time, level), (until, _) in zip(levels, [*levels[1:], (end, 0)], strict=True):
            a, b = max(0, math.floor((time - begin) * scale)), min(columns, math.ceil((until - begin) * scale))
            highest[a:b] = [max(level, other) for other in highest[a:b]]
        # In eighths of the run's maximum.
        lines.append(line(rows[agent], [_BARS[math.ceil(n / most * len(_BARS)) - 1] if n else " " for n in highest]))
        legend.append(f"█ {most} rewards{f' of {agent}' if len(flights) > 1 else ''} in flight")
    lines.append(line("", _axis(end - begin, columns)))
    words, *more = [*legend, *(f"{_GAP} {gap.words}" for gap in trace.gaps)]
    for word in more:
        fits = len(words) - words.rfind("\n") + 1 + len(word) <= width
        words += f"  {word}" if fits else f"\n{word}"
    return "\n".join([*lines, words]) + "\n"


def title(trace: Trace) -> str:
    """Returns one line with the run's policy, steps, wall time, and busy share and waits of the GPUs."""
    facts = summary(trace)
    status = trace.meta.get("status", "finished")
    count = trace.steps
    text = f"{trace.meta.get('policy', 'run')}: {counted(count, 'step')} in {_s(facts['wall_s'])} s"
    if status != "finished":
        text += f" ({status})"
    if facts["not_running_s"]:
        text += f", not running {duration(facts['not_running_s'])}"
    if trace.pools:
        busy = ", ".join(f"{pool} busy {facts['busy'][pool]:.1%}" for pool in trace.pools)
        text += f", {busy}, exposed wait {_s(facts['exposed_wait_s'])} s"
    causes = ", ".join(f"{k} {_s(v)}" for k, v in facts["exposed_wait_by_cause"].items() if v >= 0.005)
    return text + (f" ({causes})" if causes else "")


_WAITS = {
    "rewards": "waiting for rewards",
    "weights": "waiting for weights",
    "controller": "waiting for the controller",
    "io": "waiting for files",
    "dispatch": "starting tasks",
    "start-up": "start-up",
}


def idle_lines(trace: Trace) -> list[str]:
    """Returns a sentence for each GPU pool: how long it idled, by cause, and the longest wait of each cause.

    There is one, too, for what ran on after training (a late validation), and for each gap of a resumed run.
    """
    lines = [_idle_line(trace, pool) for pool in trace.pools]
    if (after := trace.end - trace.window[1]) >= 0.005:
        last = max(trace.spans, key=lambda s: s.end)
        lines.append(f"after training {_s(after)} s until {last.task} ended")
    return [*lines, *(gap.words for gap in trace.gaps)]


def _idle_line(trace: Trace, pool: str) -> str:
    by_cause: dict[str, list[Culprit]] = {}
    for culprit in culprits(trace, [pool]):
        by_cause.setdefault(culprit.wait.cause, []).append(culprit)
    total = {cause: sum(c.wait.seconds for c in found) for cause, found in by_cause.items()}
    words = []
    for cause in sorted(total, key=lambda c: (-total[c], c)):
        worst = by_cause[cause][0]
        named = worst.words and cause != "dispatch"
        worst_words = f" (worst: {_s(worst.wait.seconds)} s, {worst.words})" if named else ""
        words.append(f"{_s(total[cause])} s {_WAITS.get(cause, f'waiting for {cause}')}{worst_words}")
    line = f"{'GPU' if pool == 'gpu' else pool} pool idle {_s(sum(total.values()))} s of {_s(trace.wall)} s"
    return f"{line}: {', '.join(words)}" if words else line


def _s(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}"


def named(traces: Mapping[str, Trace] | Trace, what: str) -> dict[str, Trace]:
    """Returns runs by name; a single trace is named after its policy.

    A run without a task is an error, in which ``what`` is the drawing.
    """
    runs = {str(traces.meta.get("policy", "run")): traces} if isinstance(traces, Trace) else dict(traces)
    for name, trace in runs.items():
        if not trace.spans:
            raise DataError(f"{what}: run '{name}' has no task, so there is nothing to show.")
    return runs


def extent(trace: Trace) -> tuple[float, float]:
    """Returns (begin, end) in seconds of the whole trace."""
    begin, end = min((s.begin for s in trace.spans), default=0.0), max((s.end for s in trace.spans), default=0.0)
    # A time axis shorter than a nanosecond cannot be drawn.
    return begin, end if end - begin >= 1e-9 else begin


def tick(span: float, most: int) -> float:
    """Returns the smallest 1, 2 or 5 times a power of ten that divides ``span`` into at most ``most`` pieces.

    >>> tick(37.0, 8), tick(0.9, 8)
    (5.0, 0.2)
    """
    least = span / max(1, most)
    if least <= 0:
        return 1.0
    power = math.floor(math.log10(least))
    sizes = [float(f"{factor}e{power + more}") for more in (0, 1) for factor in (1, 2, 5)]
    return next(size for size in sizes if size >= least)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of text as aligned columns: the first left-aligned, the others right-aligned.

    >>> print(table([["policy", "wall s"], ["both", "9.5"]]))
    policy  wall s
    both       9.5
    """
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [f"{row[0]:<{wide[0]}}", *(f"{cell:>{w}}" for cell, w in zip(row[1:], wide[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _bar(letter: str, span: Span, room: int) -> str:
    fits = [text for text in (letter + span.label, f"{letter}{span.step}", letter) if len(text) <= room]
    # Without its part, the label would look like that of the whole step; then only the letter is drawn.
    text = fits[0] if span.parts == 1 or fits[0] == letter + span.label else letter
    return text.ljust(room, "=")


def _axis(seconds: float, columns: int) -> str:
    size, text = tick(seconds, columns // 10), ""
    for i in range(int(seconds / size + 1e-9) + 1):
        at = round(i * size / seconds * columns) if seconds > 0 else 0
        word = f"|{i * size:g}" + (" s" if i == 0 else "")
        if at + len(word) <= columns:
            text = text.ljust(at) + word
    return text
