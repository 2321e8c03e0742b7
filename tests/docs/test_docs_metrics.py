"""docs/metrics.md names the metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

from dataflow.running.reporting.timings import FIELDS, TIMINGS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_stages_are_those_with_names_of_verl() -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith("| `timing_s/*`"))
    assert set(re.findall(r"`(\w+)`", row)) == {*FIELDS.values(), *TIMINGS.values(), "testing"}


def test_the_projects_own_are_logged() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in (PAGE.parents[1] / "dataflow").rglob("*.py"))
    for name in ("overlap/exposed_wait_s", "overlap/gpu_busy_frac", "perf/response_tokens", "timing_s/reward"):
        assert f"`{name}`" in TEXT
        assert name in code


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (PAGE.parent / target).exists(), target
    for file in re.findall(r"`(tests/[\w/.]+)`", TEXT):
        assert (PAGE.parents[1] / file).is_file(), file
