"""What a log lacks or has too much of is said, and a log without oddities gets no sentence."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dataflow.planning.plan import make_plan
from dataflow.planning.sources.oddities import exception, oddities
from dataflow.planning.sources.scalars import Scalars

NEEDED = ("prompts=8", "responses=2", "mini_batches=2", "log.concurrency=4")
STEPS = range(1, 11)
USUAL = {"gen": 40.0, "reward": 0.5, "old_log_prob": 8.0, "adv": 30.0, "update_actor": 20.0}


def log(extra: Mapping[str, Mapping[int, float]] = {}, without: Mapping[str, set[int]] = {}) -> Scalars:
    """A log whose steps take the sum of their timings; ``extra`` counts in the step, what is ``without`` does not."""
    columns: dict[str, dict[int, float]] = {
        f"timing_s/{name}": {step: seconds for step in STEPS if step not in without.get(name, ())}
        for name, seconds in USUAL.items()
    }
    columns |= {f"timing_s/{name}": dict(of) for name, of in extra.items() if name != "step"}
    added = extra.get("step", {})
    whole = {step: sum(of.get(step, 0.0) for of in columns.values()) + added.get(step, 0.0) for step in STEPS}
    return Scalars("a log", {**columns, "timing_s/step": whole})


def test_a_log_without_oddities_gets_no_sentence() -> None:
    rare = {"testing": {0: 50.0, 5: 50.0, 10: 50.0}, "save_checkpoint": {10: 900.0}}
    for each in (log(), log(rare), Scalars("none", {}), log(extra={"step": {1: 5000.0}})):
        assert (list(oddities(each)), exception(each)) == ([], "")


@pytest.mark.parametrize(
    ("without", "said"),
    [
        ({"gen": {2, 4, 6}}, "3 of 10 steps lack timing_s/gen, the first of them step 2; others stand in."),
        ({"adv": {10}}, "1 step lacks timing_s/adv, the first of them step 10; others stand in."),
    ],
)
def test_steps_that_lack_a_timing_are_counted(without: Mapping[str, set[int]], said: str) -> None:
    assert list(oddities(log(without=without))) == [said]


def test_time_that_no_stage_has_is_named() -> None:
    found = log({"my_filter": dict.fromkeys(STEPS, 30.0), "start_profile": dict.fromkeys(STEPS, 0.01)})
    assert list(oddities(found)) == [
        "a step of the log takes 30 s more than the stages of this plan, which lacks them (the log also has "
        "timing_s/my_filter 30 s)."
    ]
    (unnamed,) = oddities(log({"step": dict.fromkeys(STEPS, 30.0)}))
    assert unnamed == "a step of the log takes 30 s more than the stages of this plan, which lacks them."


@pytest.mark.parametrize("where", ["reward", "update_actor", "step"])
def test_an_exceptional_step_is_a_caution(where: str) -> None:
    longer = {step: USUAL.get(where, 0.0) + 3600.0 * (step == 7) for step in STEPS}
    assert exception(log({where: longer})).startswith("step 7 took 3698 s, where half of the steps took 98.5 s or less")
    assert not exception(log({where: {step: 1.5 * s for step, s in longer.items() if step != 7}}))


def written(found: Scalars, path: Path) -> str:
    names = list(found.columns)
    rows = [["step", *names]]
    rows += [[str(at), *(str(found.columns[name].get(at, "")) for name in names)] for at in STEPS]
    path.write_text("\n".join(map(",".join, rows)) + "\n")
    return str(path)


def test_a_plan_has_them(tmp_path: Path) -> None:
    filtered = {"my_filter": dict.fromkeys(STEPS, 30.0), "adv": {at: 30.0 + 3600.0 * (at == 7) for at in STEPS}}
    plan = make_plan(written(log(filtered), tmp_path / "log.csv"), NEEDED)
    assert "step 7 took 3728 s" in plan.workload.caution
    assert any("timing_s/my_filter 30 s" in sentence for sentence in plan.workload.assumptions)


@pytest.mark.parametrize("zero", [["step"], ["step", *USUAL]])
def test_a_log_whose_steps_take_no_time_is_planned_without_a_replay(zero: list[str], tmp_path: Path) -> None:
    columns: dict[str, Any] = dict(log().columns) | {f"timing_s/{name}": dict.fromkeys(STEPS, 0.0) for name in zero}
    plan = make_plan(written(Scalars("a log", columns), tmp_path / "log.csv"), [*NEEDED, "log.latency=3"])
    assert plan.replay is None
    assert "policy" in plan.text()


def test_a_loop_stops_for_its_checkpoints_where_it_has_no_validation(tmp_path: Path) -> None:
    saved = log({"save_checkpoint": {5: 200.0, 10: 200.0}})
    plan = make_plan(written(saved, tmp_path / "log.csv"), NEEDED)
    assert plan.replay is not None
    assert plan.replay.step_s == pytest.approx(plan.logged_step_s, rel=0.02)
