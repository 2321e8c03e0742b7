"""A run that was killed after its third step and resumed, for the tests of its pictures and texts."""

from __future__ import annotations

from dataflow.timeline.spans import Mark, Span, Trace

WHY = "resumed from step 2, and 2.5 s of work after it were lost"


def resumed(hours: float = 3.2, killed: bool = True) -> Trace:
    """Returns three steps of 13 s, with so many hours between the second and the third.

    Args:
        hours: between the kill and the resume.
        killed: False for the same run without a kill.
    """
    trace = Trace(
        meta={
            "policy": "both",
            "status": "finished",
            "resources": {"gpu": 1, "reward": None, "controller": 1, "io": 1},
        }
    )
    at = 0.0
    for step in range(1, 4):
        if step == 3 and killed:
            trace.meta |= {"gaps": [[at, hours * 3600, WHY]], "resumed": [2]}
        trace.add(
            Span("rollout", step, 0, 1, "gpu", at, at + 4, {}, f"sync_weights[{step - 1}]" if step > 1 else ""),
            Span("reward_collect", step, 0, 1, "reward", at + 4, at + 8, {}, f"rollout[{step}]"),
            Span("advantage", step, 0, 1, "controller", at + 8, at + 8.5, {}, f"reward_collect[{step}]"),
            Span("actor_update", step, 0, 1, "gpu", at + 8.5, at + 11, {}, f"advantage[{step}]"),
            Span("sync_weights", step, 0, 1, "gpu", at + 11, at + 12, {}, f"actor_update[{step}]"),
            Span("save_checkpoint", step, 0, 1, "io", at + 12, at + 13, {}, f"sync_weights[{step}]"),
            *(Mark("reward", "reward", at + 4, at + 5 + i, {"step": step, "group": i, "sample": 0}) for i in range(4)),
        )
        at += 13
    return trace
