"""`dataflow run ... dry=true`: what a start would check and find, as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from dataflow.config.loading.saved import load
from dataflow.errors import counted
from dataflow.running.dry import dry_run
from dataflow.running.preparing.check import Finding
from dataflow.running.session import prepare_logging

_SHOWN = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM", "not checked": "not checked"}


def check(pipeline: str, arguments: Sequence[str], as_json: bool) -> int:
    """Prints what the checks of a run found.

    Args:
        pipeline: its file, a recipe or the configuration of a run.
        arguments: ``key=value``.
        as_json: JSON in place of the table.

    Returns:
        The exit code: 0 if a start would find no problem, else 2.
    """
    prepare_logging()
    findings = dry_run(partial(load, pipeline), arguments)
    print(json.dumps([asdict(each) for each in findings], indent=1) if as_json else table(findings))
    return 2 if any(each.state == "problem" for each in findings) else 0


def table(findings: Sequence[Finding], started: bool = False) -> str:
    """Returns a line for each finding, and one about all of them.

    Args:
        findings: at least one.
        started: whether something was started for them.
    """
    name = max(len(each.what) for each in findings)
    state = max(len(_SHOWN[each.state]) for each in findings)
    lines = [f"{_SHOWN[each.state]:<{state}}  {each.what:<{name}}  {each.message}" for each in findings]
    problems = sum(each.state == "problem" for each in findings)
    warnings, later = (sum(each.state == state for each in findings) for state in ("warning", "not checked"))
    message = "1 problem" if problems == 1 else f"{problems or 'no'} problems"
    message += f", {counted(warnings, 'warning')}" if warnings else ""
    message += f", {later} not checked" if later else ""
    return "\n".join([*lines, "", message if started else f"{message}; nothing was started"])
