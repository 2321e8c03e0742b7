"""The text timeline, compared with golden files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataflow.timeline.spans import USUAL, Mark, Span, Trace
from dataflow.timeline.text import LETTERS, gantt, idle_lines, letters


def both() -> Trace:
    """Two steps of ``both``: the second rollout hides the first rewards, the second update waits."""
    trace = Trace(meta={"policy": "both", "resources": {"gpu": 1, "reward": None, "controller": 1}})
    trace.add(
        Span("rollout", 1, 0, 1, "gpu", 1, 5),
        Span("reward_request", 1, 0, 1, "controller", 5, 5.1, {}, "rollout[1]"),
        Span("reward_collect", 1, 0, 2, "reward", 5.1, 9, {}, "reward_request[1]"),
        Span("reward_collect", 1, 1, 2, "reward", 5.1, 14, {}, "reward_request[1]"),
        Span("rollout", 2, 0, 1, "gpu", 5, 9, {}, "rollout[1]"),
        Span("old_log_prob", 1, 0, 1, "gpu", 9, 10),
        Span("actor_update", 1, 0, 2, "gpu", 10, 13, {}, "reward_collect[1.1]"),
        Span("actor_update", 1, 1, 2, "gpu", 14, 17, {}, "reward_collect[1.2]"),
        Span("sync_weights", 1, 0, 1, "gpu", 17, 18),
        Span("old_log_prob", 2, 0, 1, "gpu", 18, 19),
        Span("reward_collect", 2, 0, 1, "reward", 9, 24, {}, "rollout[2]"),
        Span("penalise_length", 2, 0, 1, "controller", 24, 25, {}, "reward_collect[2]"),
        Span("actor_update", 2, 0, 1, "gpu", 25, 31, {}, "penalise_length[2]"),
        Span("val_rollout", 2, 0, 1, "gpu", 31, 34, {"optional": True}, "actor_update[2]"),
    )
    for i in range(8):
        trace.add(Mark("reward", "reward", 5.1, 7 + i, {"step": 1, "group": i, "sample": 0}))
        trace.add(Mark("reward", "reward", 9, 17 + i, {"step": 2, "group": i, "sample": 0}))
    return trace


GOLDEN = """
both: 2 steps in 30.0 s, gpu busy 76.7%, exposed wait 7.00 s (rewards 6.00, controller 1.00)
gpu         R1======R2======L1=U1.1==~~U1.2==S1L2~~~~~~~~~~~~U2===========V2====
reward              C1.1====C2=============================
                    C1.2===============
controller          Q                                      P2
in flight           ▅▅▅▅▅▅▅▄█████▇▇▇▇▆▆▅▅▅▅▅▅▅▅▅▄▄▄▄▃▃▂▂▂▂▁▁
            |0 s                 |10                 |20                  |30
R rollout  Q reward_request  C reward_collect  L old_log_prob  U actor_update
S sync_weights  P penalise_length  V val_rollout  ~ gpu waits
█ 13 rewards in flight
"""


def test_the_whole_run() -> None:
    assert gantt(both(), width=80) == GOLDEN.lstrip("\n")


def test_a_run_without_tasks() -> None:
    trace = Trace(meta={"policy": "both", "status": "interrupted"})
    assert gantt(trace) == "both: 0 steps in 0.00 s (interrupted)\n(no task ran)\n"


def test_letters_of_users_stages_are_their_own_and_stay() -> None:
    own = [f"stage_{i}" for i in range(12)]
    roles = {f"{role}_{i}": role for role, of in LETTERS.items() for i in range(len(of))}
    named = letters([*own, *roles], roles)
    assert {named[stage] for stage in roles} == {*"".join(LETTERS.values())}
    assert len(set(named.values())) == len(named)
    assert letters(["penalise_length", "draw"], {"draw": "samples"})["penalise_length"] == "P"
    assert letters(["a", "b"], {"a": "samples", "b": "samples"}) == {"a": "R", "b": "B"}
    assert letters([f"s{i}" for i in range(99)], {})["s98"] == "?"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*USUAL, "own"]),
            st.floats(0, 50),
            st.floats(0, 20),
            st.sampled_from(["gpu", "io"]),
        ),
        max_size=20,
    ),
    st.integers(20, 120),
)
def test_no_line_is_wider_than_asked_for(tasks: list[tuple[str, float, float, str]], width: int) -> None:
    trace = Trace([Span(name, i, 0, 1, on, at, at + wide) for i, (name, at, wide, on) in enumerate(tasks)])
    text = gantt(trace, width=width)
    rows = [line for line in text.splitlines()[1:] if line.startswith(("gpu", "io", " "))]
    assert all(len(line) <= width for line in rows)
    assert gantt(trace, width=width) == text


def test_where_the_idle_time_went_in_a_sentence() -> None:
    trace = both()
    trace.add(
        Mark("reward", "reward", 5, 9, {"step": 1, "part": 0, "group": 2}),
        Mark("reward", "reward", 5, 14, {"step": 1, "part": 1, "group": 17, "tries": 3, "throttled": 1}),
        Mark("reward", "reward", 9, 24, {"step": 2, "part": 0, "group": 4, "queued_s": 3.0, "held_by": "slot"}),
    )
    assert idle_lines(trace) == [
        "GPU pool idle 7.00 s of 30.0 s: 6.00 s waiting for rewards (worst: 5.00 s, step 2, group 4, queued 3.0 s, "
        "at last for a free slot), 1.00 s waiting for the controller (worst: 1.00 s, step 2, penalise_length)",
        "after training 3.00 s until val_rollout[2] ended",
    ]


def test_each_pool_of_gpus_has_its_sentence() -> None:
    trace = Trace()
    trace.add(
        Span("rollout", 1, 0, 1, "rollout", 0, 4),
        Span("actor_update", 1, 0, 1, "train", 4, 6, {}, "rollout[1]"),
        Span("gather_weights", 1, 0, 1, "train", 6, 8, {}, "actor_update[1]"),
        Span("sync_weights", 1, 0, 1, "rollout", 8, 9, {}, "gather_weights[1]"),
    )
    assert idle_lines(trace) == [
        "rollout pool idle 4.00 s of 9.00 s: 2.00 s waiting for train (worst: 2.00 s, step 1, actor_update), "
        "2.00 s waiting for weights (worst: 2.00 s, step 1, gather_weights)",
        "train pool idle 5.00 s of 9.00 s: 4.00 s start-up, 1.00 s waiting for weights "
        "(worst: 1.00 s, step 1, sync_weights)",
    ]
    assert idle_lines(Trace()) == []
