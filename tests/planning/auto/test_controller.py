"""When a run plans, and when it changes its policy: seconds in, a decision out."""

from __future__ import annotations

import json
from dataclasses import asdict

from dataflow.planning.auto.controller import Controller, Switch
from dataflow.policy import SchedulingPolicy

BASELINE, SPLIT = SchedulingPolicy(), SchedulingPolicy(4)
STALE, BOTH = SchedulingPolicy(1, 1), SchedulingPolicy(4, 1)
ALL = [BASELINE, SPLIT, STALE, BOTH]


def controller(replan: int = 5, gain: float = 0.03) -> Controller:
    return Controller(ALL, BASELINE, replan, gain)


def times(baseline: float, split: float, stale: float, both: float) -> dict[SchedulingPolicy, float]:
    return dict(zip(ALL, (baseline, split, stale, both), strict=True))


def planned(run: Controller, steps: int, seconds: float = 10.0, predicted: float = 10.0) -> list[int]:
    """Returns the steps after which a run of steady steps plans, and stays as it is."""
    found = []
    for step in range(1, steps + 1):
        if run.ended(step, seconds * step):
            found.append(step)
            assert run.decide(step, dict.fromkeys(ALL, predicted)) is None
    return found


def test_the_first_plans_follow_sooner_on_one_another() -> None:
    assert planned(controller(), 22) == [3, 6, 11, 16, 21]
    assert planned(controller(replan=1), 6) == [3, 4, 5, 6]


def test_a_step_that_takes_another_time_than_predicted_is_planned_upon() -> None:
    run = controller(replan=10)
    planned(run, 8)
    assert not run.ended(9, 90.0)
    assert run.ended(10, 120.0), "20 s instead of 10"


def test_it_takes_the_least_stale_of_those_about_as_fast_and_most_parts_of_equals() -> None:
    assert controller().decide(3, times(10, 8.02, 8, 8)) == SPLIT
    assert controller().decide(3, times(10, 9, 8, 8)) == BOTH
    assert controller().decide(3, times(10, 9, 8, 7.5)) == BOTH
    assert controller().decide(3, times(10, 10, 10, 10)) is None


def test_small_gains_count_once_several_plans_in_a_row_predict_them() -> None:
    run = controller()
    assert run.decide(3, times(10.2, 10.2, 10.2, 10)) is None
    assert run.decide(6, times(10, 10, 10, 10)) is None
    assert run.decide(11, times(10.2, 10.2, 10.2, 10)) is None, "not in a row"
    assert run.decide(16, times(10.2, 10.2, 10.2, 10)) == BOTH


def test_a_policy_that_was_left_must_be_better_by_twice_as_much() -> None:
    run = controller()
    known = times(10, 9.8, 8, 7)
    assert run.decide(3, known) == BOTH
    change = run.switched(5, BOTH, known)
    assert (change.step, change.before, change.after, change.before_s, change.after_s) == (5, BASELINE, BOTH, 10, 7)
    assert change.gain > 0.4
    assert run.decide(8, times(10, 11, 11, 10.5)) is None, "5%, of the policy that was left"
    assert controller().decide(8, times(10.5, 11, 11, 10)) == BOTH
    assert run.decide(13, times(10, 11, 11, 10.7)) == BASELINE, "they add up"


def test_what_came_of_a_change_is_known_some_steps_later() -> None:
    run = controller()
    known = times(10, 10, 10, 7)
    run.switched(5, BOTH, known)
    found = []
    for step in range(1, 14):
        run.ended(step, 10.0 * min(step, 6) + 7.5 * max(0, step - 6))
        found.append(run.outcome(step))
    (change,) = [each for each in found if each is not None]
    assert change.measured_s == 7.5
    assert found.index(change) + 1 == 10


def test_at_the_end_of_a_run_fewer_steps_say_what_came_of_a_change() -> None:
    run = controller()
    run.switched(5, BOTH, times(10, 10, 10, 7))
    for step in range(1, 9):
        run.ended(step, 10.0 * min(step, 6) + 7.5 * max(0, step - 6))
        assert run.outcome(step) is None
    assert run.outcome(7, least=1) is None, "no step since the first that shows the policy"
    change = run.outcome(8, least=1)
    assert change is not None
    assert change.measured_s == 7.5
    assert run.outcome(9, least=1) is None, "it is said once"


def test_a_run_that_resumed_says_what_came_of_the_change_before() -> None:
    change = Switch(5, BASELINE, BOTH, 10.0, 7.0)
    again = Switch.of(json.loads(json.dumps(asdict(change))))
    assert again == change
    run = Controller(ALL, BOTH, 5, 0.03, [again], since=3)
    found = []
    for step in range(3, 12):
        run.ended(step, 7.5 * step)
        found.append(run.outcome(step))
    assert [each for each in found if each is not None] == [again]
    assert found.index(again) + 3 == 10, "the same step as without the resume"


def test_a_prediction_is_confirmed_by_the_steps_that_show_the_policy() -> None:
    run = controller()
    for step in range(1, 7):
        run.ended(step, 10.0 * step)
    assert run.confirms(6, {BASELINE: 11.0})
    assert not run.confirms(6, {BASELINE: 12.0}), "20% off"
    assert not run.confirms(6, {BOTH: 10.0}), "not predicted"
    assert not run.confirms(6, {BASELINE: 10.0}, since=6), "no step since then"
    run.switched(6, BOTH, times(10, 10, 10, 7))
    assert not run.confirms(6, {BOTH: 10.0}), "no step shows it yet"


def test_a_policy_that_takes_much_longer_than_predicted_is_left() -> None:
    run = controller()
    run.switched(1, BOTH, times(10, 10, 10, 7))
    for step in range(1, 12):
        run.ended(step, 12.0 * step)
    assert run.decide(11, times(10, 10, 10, 7), since=2) == SPLIT
    assert run.decide(11, times(10, 10, 10, 7), since=9) is None, "too few steps to say so"


def test_without_a_prediction_of_the_present_policy_nothing_changes() -> None:
    assert controller().decide(3, {BOTH: 1.0}) is None


def with_a_loss(after: float, since: int = 2) -> tuple[Controller, SchedulingPolicy | None]:
    """Returns a run of 10 s a step that changed to SPLIT, predicted 9 s, and has taken ``after`` since; its decision.

    Args:
        after: seconds a step.
        since: the first step that the plan after step 9 is made from.
    """
    run, at = controller(), 0.0
    for step in range(1, 10):
        at += 10.0 if step < 5 else after
        run.ended(step, at)
        if step == 3:
            assert run.decide(step, times(10, 9, 10, 9.5), since=2) == SPLIT
            run.switched(4, SPLIT, run.known)
        run.outcome(step)
    return run, run.decide(9, times(after * 1.05, after, after, after), since)


def test_it_goes_back_if_steps_took_much_longer_after_a_change() -> None:
    run, decided = with_a_loss(15.0)
    assert decided == BASELINE
    back = run.switched(11, BASELINE, run.known)
    assert (back.before_s, back.after_s) == (15.0, 10.0), "as they were measured"
    at = run._ends[9]
    for step in range(10, 40):
        at += 10.0
        run.ended(step, at)
        run.outcome(step)
        assert run.decide(step, times(10, 9, 10, 10), since=max(2, step - 11)) is None, "it is not tried again"


def test_it_stays_after_a_change_that_was_no_loss() -> None:
    assert with_a_loss(9.0)[1] is None
    assert with_a_loss(11.0)[1] is None, "it may be chance"


def test_a_loss_does_not_count_once_the_workload_has_changed() -> None:
    assert with_a_loss(15.0, since=8)[1] is None
    run, _decided = with_a_loss(15.0)
    run.switched(11, BASELINE, run.known)
    at = run._ends[9]
    for step in range(10, 20):
        at += 20.0
        run.ended(step, at)
        run.outcome(step)
    assert run.decide(19, times(20, 12, 20, 20), since=15) == SPLIT
