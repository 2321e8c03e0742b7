"""`dataflow timeline`: one run's overlap in the terminal, as a picture, a page, JSON, or for Perfetto with profiles."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from dataflow.commands.trace import read_trace
from dataflow.errors import ConfigError
from dataflow.files import replaced
from dataflow.timeline import files
from dataflow.timeline.causes import attribution
from dataflow.timeline.causes.culprits import worst_waits
from dataflow.timeline.compare import facts_of
from dataflow.timeline.profiles import profile_lines, profiles_of
from dataflow.timeline.spans import Trace
from dataflow.timeline.text import gantt, idle_lines


def timeline(options: argparse.Namespace) -> int:
    """Prints or draws what the command asks for; returns its exit code."""
    if options.follow:
        return _follow(options)
    kind = Path(options.out).suffix.lower() if options.out is not None else None
    merges = options.merge is not None or kind == ".json"
    if merges:
        from dataflow.timeline.merge import check_out

        check_out(options.out)
    else:
        files.check(options.out, ".txt", ".json")
    profiles = [*profiles_of(options.run), *(options.merge or ())]
    _check_apart(options.out, [options.run, Path(options.run) / "trace.json", *profiles])
    trace = read_trace(options.run)
    if merges:
        from dataflow.timeline.merge import merge

        merge(trace, profiles, options.out)
    elif kind == ".txt":
        with replaced(options.out) as temporary:
            temporary.write_text(_text(trace), encoding="utf-8")
    elif kind is not None:
        name = str(trace.meta.get("policy", "run"))
        files.draw({name: trace}, options.out, files.title_of(options.run), {name: facts_of(options.run, options.out)})
    if options.json:
        print(json.dumps({**attribution.summary(trace), "worst_waits": worst_waits(trace)}, indent=1))
    elif kind is not None:
        print(options.out)
    else:
        print(_text(trace), end="")
    return 0


def _check_apart(out: str | None, read: Sequence[str | Path]) -> None:
    """Raises a ConfigError if the file to write is one that is read: the run would lose its own trace."""
    if out is None or not os.path.exists(out):
        return
    if any(os.path.samefile(out, each) for each in read if os.path.exists(each)):
        raise ConfigError(f"-o {out}: the command reads this file; give another name.")


def _text(trace: Trace) -> str:
    return "\n".join([gantt(trace, 140), *idle_lines(trace), *profile_lines(trace)]) + "\n"


def _follow(options: argparse.Namespace) -> int:
    from dataflow.timeline.page.follow import follow

    if options.out or options.json or options.merge:
        raise ConfigError("timeline --follow serves a page and writes nothing; leave -o, --json and --merge out.")
    follow(options.run, options.port, lambda url: print(f"timeline: {url} (Ctrl-C ends it)", flush=True))
    return 0
