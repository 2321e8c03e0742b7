"""The cost of the timeline's page: its size, the time to write it, and the time to open it in a headless Chromium.

    python benchmarks/page.py

Runs of 100, 1,000, 10,000 and more tasks. The time to open is from the request of the file until the frame after the
script has ended, when everything is drawn and the page responds; the best of several loads. Prints a table and writes
JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _run import ROOT, begin, table

from dataflow.timeline.page import page

sys.path.insert(0, str(ROOT / "tests" / "rigs"))
import chromium
from made_up import made_up

BOUND_MB = 6.0
BOUND_S = 2.0
TASKS_A_STEP = 17
OPENED = """() => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0)))"""


def measured(tasks: int, directory: Path, browser: Any, loads: int) -> dict[str, float]:
    """Returns size and times of the page of a run with a number of tasks."""
    trace = made_up(-(-tasks // TASKS_A_STEP))
    path = directory / f"{tasks}.html"
    begin = time.perf_counter()
    page(trace, path)
    wrote = time.perf_counter() - begin
    row = {"tasks": len(trace.spans), "requests": len(trace.marks), "mb": path.stat().st_size / 1e6, "write_s": wrote}
    if browser is not None:
        row["open_s"] = min(opened(path, browser) for _ in range(loads))
    return row


def opened(path: Path, browser: Any) -> float:
    """Returns the seconds until a page is drawn, in a new browser profile."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    try:
        tab = context.new_page()
        tab.goto(path.as_uri(), wait_until="commit")
        tab.wait_for_selector("html[data-ready=yes]", timeout=60_000)
        return float(tab.evaluate(OPENED)) / 1000
    finally:
        context.close()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=10_000, help="longest run")
    parser.add_argument("--loads", type=int, default=5, help="of each page")
    parser.add_argument("-o", dest="out", default="page.json")
    options = parser.parse_args(arguments)
    sizes = [n for n in (100, 1_000, 10_000, 100_000) if n < options.tasks] + [options.tasks]
    with tempfile.TemporaryDirectory() as directory:
        if chromium.path() is None:
            print("no chromium: only sizes")
            rows = [measured(tasks, Path(directory), None, 0) for tasks in sizes]
        else:
            with chromium.browser() as browser:
                rows = [measured(tasks, Path(directory), browser, options.loads) for tasks in sizes]
    lines = [("tasks", "requests", "MB", "write s", "open s")]
    for row in rows:
        opens = f"{row['open_s']:.2f}" if "open_s" in row else "-"
        lines.append((f"{row['tasks']:,}", f"{row['requests']:,}", f"{row['mb']:.2f}", f"{row['write_s']:.2f}", opens))
    print(table(lines))
    within = [row for row in rows if row["tasks"] <= 10_100]
    good = all(row["mb"] <= BOUND_MB and row.get("open_s", 0.0) <= BOUND_S for row in within)
    bounds = {"mb": BOUND_MB, "open_s": BOUND_S}
    Path(options.out).write_text(json.dumps({"pages": rows, "bounds": bounds}, indent=1))
    print(f"\nbounds for 10,000 tasks: {BOUND_MB:g} MB and {BOUND_S:g} s: " + ("held" if good else "MISSED"))
    return not good


if __name__ == "__main__":
    begin(main, ["--tasks", "100", "--loads", "1"])
