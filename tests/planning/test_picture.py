"""A plan's picture and page are complete; their look is not tested."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dataflow.planning.plan import Plan
from dataflow.planning.planner import ROWS, Prediction, Sweep
from tests.rigs.simulated import job

pytestmark = pytest.mark.slow

STEPS = 10


def prediction(policy: str, waits: dict[str, float], bound: float = 300.0, gpu: float = 200.0) -> Prediction:
    step = gpu + sum(waits.values())
    return Prediction(
        policy=policy,
        step_s=step,
        total_s=step * STEPS,
        change=step / 500 - 1,
        gpu_idle=1 - gpu / step,
        exposed_wait_s=sum(waits.values()),
        exposed_wait_by_cause=waits,
        lower_bound_s=bound * STEPS,
        bound_by="reward service",
        bounds_s={"GPU pool": gpu * STEPS, "reward service": bound * STEPS, "critical path": 250.0 * STEPS},
    )


WAITS = dict(zip(ROWS, (300.0, 220.0, 150.0, 130.0, 130.0), strict=True))
PLAN = [prediction(policy, {"rewards": s - 5, "start-up": 5.0}) for policy, s in WAITS.items()]


def swept(knob: str, values: Sequence[float], policies: Sequence[str] = ROWS) -> Sweep:
    rows = [tuple(prediction(p, {"rewards": WAITS[p] * values[0] / v}, 200 + 9 / v) for p in policies) for v in values]
    return Sweep(knob, tuple(values), tuple(rows))


SWEEPS = [swept("reward.concurrency", (64, 128, 256, 512)), swept("mini_batches", (1, 2, 4, 8, 16))]
TITLE = "predicted: $a_run$ <1>"


def test_a_picture_and_a_page_name_what_they_show_and_the_page_loads_nothing(tmp_path: Path) -> None:
    plan = Plan(replace(job(), assumptions=("<beware>",)), PLAN, ["do & say"], SWEEPS)
    drawn = {"GPU work", "exposed wait: rewards", "exposed wait: start-up", "lower bound", "500.0 s", "512"}
    drawn |= {"predicted: $a_run$ &lt;1&gt;", "420.0 s (-16.0%)", "reward.concurrency", "predicted seconds a step"}
    written = {"&lt;beware&gt;", "8 steps of 8 x 4 samples", "do &amp; say", "seconds a step over mini_batches"}
    for kind, said in (("svg", drawn), ("html", written)):
        path = tmp_path / f"plan.{kind}"
        plan.save(path, TITLE)
        text = path.read_text()
        if kind == "html":
            assert not re.search(r'(?:src|href)="(?!data:|#)', text)
        squeezed = re.sub(r"\s+", " ", text)
        assert [word for word in (*said, *ROWS) if word not in squeezed] == []
        plan.save(path, TITLE)
        assert path.read_text() == text, "the same plan gives the same file"
    plan.save(tmp_path / "plan.png")
    width, _height = struct.unpack(">II", (tmp_path / "plan.png").read_bytes()[16:24])
    assert width == 1400
