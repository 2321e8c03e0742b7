"""The endpoints of reward requests on the timeline: their requests in flight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.timeline import perfetto
from dataflow.timeline.agents import servers_of
from dataflow.timeline.page.chart import chart
from dataflow.timeline.picture import draw
from dataflow.timeline.spans import Level, Mark, Span, Trace
from dataflow.timeline.text import gantt

FIRST, SECOND, OTHER = "http://127.0.0.1:8001", "http://127.0.0.1:8002", "https://judge.example/v1"


def trace() -> Trace:
    """One step, with requests to three endpoints."""
    made = Trace(meta={"policy": "baseline", "resources": {"gpu": 1, "reward": None, "style": None}})
    made.add(
        Span("rollout", 1, 0, 1, "gpu", 0, 4),
        Span("reward_collect", 1, 0, 1, "reward", 4, 16, {}, "rollout[1]"),
        Span("actor_update", 1, 0, 1, "gpu", 16, 20, {}, "reward_collect[1]"),
        Level("reward limit", 3.0, 8.0),
    )
    for group, (url, begin, end) in enumerate(
        [(FIRST, 4, 8), (SECOND, 4, 5), (FIRST, 4, 9), (FIRST, 8, 12), (FIRST, 6, 13), (SECOND, 12, 16)]
    ):
        made.add(Mark("reward", "reward", begin, end, {"step": 1, "group": group, "sample": 0, "endpoint": url}))
    made.add(Mark("reward", "style", 4, 6, {"step": 1, "group": 0, "sample": 0, "endpoint": OTHER}))
    return made


GOLDEN = """
baseline: 1 step in 20.0 s, gpu busy 40.0%, exposed wait 12.0 s (rewards 12.0)
gpu               R1========~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~U1========
reward                      C1==============================
reward in flight            ███▆▆█████████▆▆▆▆▆▆▆▆▆▆▃▃▃▃▃▃▃▃
style in flight             ██████
127.0.0.1:8001              ▆▆▆▆▆█████████▆▆▆▆▆▆▆▆▃▃
127.0.0.1:8002              ███                  ███████████
judge.example/v1            ██████
                  |0 s         |5           |10          |15
"""


def test_servers_are_named_by_their_address() -> None:
    assert {name: len(marks) for name, marks in servers_of(trace()).items()} == {
        "127.0.0.1:8001": 4,
        "127.0.0.1:8002": 2,
        "judge.example/v1": 1,
    }


@pytest.mark.slow
def test_the_picture_has_a_row_for_each_server(tmp_path: Path) -> None:
    picture = tmp_path / "run.svg"
    draw(trace(), picture)
    text = picture.read_text()
    assert all(f">{name}<" in text for name in ("127.0.0.1:8001", "127.0.0.1:8002", "judge.example/v1"))


def test_golden_text() -> None:
    drawn = gantt(trace(), 70)
    assert drawn.startswith(GOLDEN.lstrip()), drawn


def test_servers_have_rows_on_the_page() -> None:
    made = chart({"run": trace()}, {})
    names = ["gpu", "reward", "style", "127.0.0.1:8001", "127.0.0.1:8002", "judge.example/v1"]
    assert [row["name"] for row in made["rows"]] == names
    assert [band["most"] for band in made["bands"]] == [3, 1, 3, 1, 1]


def test_servers_have_counters_in_perfetto(tmp_path: Path) -> None:
    perfetto.write(trace(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    count = [
        (e["ts"], e["args"]["requests"]) for e in events if e["ph"] == "C" and e["name"] == "127.0.0.1:8002 in flight"
    ]
    assert count == [(4_000_000, 1), (5_000_000, 0), (12_000_000, 1), (16_000_000, 0)]
    assert perfetto.read(tmp_path / "trace.json") == trace()
