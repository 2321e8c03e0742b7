"""`dataflow timeline`: one run's overlap in the terminal, as a picture, a page or JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dataflow.commands.trace import read_trace
from dataflow.files import replaced
from dataflow.timeline import causes, files
from dataflow.timeline.compare import facts_of
from dataflow.timeline.text import gantt, idle_lines


def timeline(options: argparse.Namespace) -> int:
    """Prints or draws what the command asks for; returns its exit code."""
    files.check(options.out, ".txt")
    trace = read_trace(options.run)
    text = "\n".join([gantt(trace, 140), *idle_lines(trace)]) + "\n"
    if options.out is None:
        pass
    elif Path(options.out).suffix.lower() == ".txt":
        with replaced(options.out) as temporary:
            temporary.write_text(text, encoding="utf-8")
    else:
        name = str(trace.meta.get("policy", "run"))
        files.draw({name: trace}, options.out, files.title_of(options.run), {name: facts_of(options.run, options.out)})
    if options.json:
        worst = [each.as_dict() for each in causes.culprits(trace)[:5]]
        print(json.dumps({**causes.summary(trace), "worst_waits": worst}, indent=1))
    else:
        print(options.out or text, end="\n" if options.out else "")
    return 0
