"""A verl log as a workload: reading, fitting, messages; and the predictions of the published runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dataflow.errors import ConfigError, UserError
from dataflow.planning.plan import make_plan
from dataflow.planning.planner import predict
from dataflow.planning.simulation import Outcome
from dataflow.planning.sources.read import read_workload
from dataflow.planning.workload import Measured, Workload
from dataflow.policy import SchedulingPolicy, preset

PUBLISHED = Path(__file__).parents[3].parent / "shared" / "data" / "traces"
NEEDED = ("prompts=8", "responses=2", "mini_batches=2", "log.concurrency=4")


def write(path: Path, columns: Mapping[str, list[object]]) -> str:
    """Writes a verl CSV of as many steps as the columns are long."""
    names = list(columns)
    steps = range(1, max(map(len, columns.values())) + 1)
    lines = [",".join(["global_step", *(f"timing_s/{name}" for name in names)])]
    lines += [",".join([str(step), *(str(columns[name][step - 1]) for name in names)]) for step in steps]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def log(tmp_path: Path) -> str:
    # 16 requests, 4 in flight, 10 s each: 40 s from the request to the last, 8 s of it behind the log-probs.
    return write(
        tmp_path / "base.csv",
        {
            "gen": [20, 10, 10, 10],
            "reward": [0.5, 0.5, 0.5, 0.5],
            "old_log_prob": [5, 5, 5, 5],
            "ref": [3, 3, 3, 3],
            "adv": [32, 32, 32, 32],
            "update_actor": [6, 4, 4, 4],
            "testing": ["", 15, "", 15],
            "save_checkpoint": ["", "", "", 2],
            "step": [66.5, 69.5, 54.5, 71.5],
        },
    )


def total(workload: Workload, policy: str) -> float:
    return Outcome.of(workload, preset(policy, workload.mini_batches)).total_s


def test_a_baseline_is_predicted_as_it_was_logged(log: str) -> None:
    workload, _config = read_workload(log, [*NEEDED, "log.latency=10", "reward.agent=per-step"])
    assert workload.steps == 4
    assert workload.logged == ("baseline", 262.0, 4, SchedulingPolicy())
    assert workload.validation is not None
    assert (workload.validation.every, workload.validation.overlap) == (2, False)
    # Only the half second in which an idle agent looks for the next step is not in the log.
    assert total(workload, "baseline") == pytest.approx(262.0 + 4 * 0.5)


def test_the_latency_is_fitted_to_the_waits_and_said(log: str) -> None:
    given, _ = read_workload(log, [*NEEDED, "log.latency=9"])
    assert given.rewards.latency.mean == pytest.approx(10.0)
    assert any("so log.latency=9 (average 9.00 s) is scaled to it" in sentence for sentence in given.assumptions)
    unknown, _ = read_workload(log, NEEDED)
    assert any("a request on average; they are taken to spread evenly" in sentence for sentence in unknown.assumptions)
    assert total(unknown, "baseline") == pytest.approx(total(given, "baseline"), rel=0.15)


def same(a: Workload | None, b: Workload | None) -> None:
    assert a is not None
    assert b is not None
    assert a.pipeline.explain() == b.pipeline.explain()
    assert replace(a, pipeline=b.pipeline) == b


WHAT_IFS: dict[str, dict[str, object]] = {
    "reward.concurrency=8": {"concurrency": 8},
    "reward.latency=3": {"latency": 3.0},
    "reward.rpm=60": {"rpm": 60.0},
    "reward.agent=per-step": {"agent": "per-step"},
    "balance_batch=false": {"scattered": False},
}


@pytest.mark.parametrize("key", WHAT_IFS)
def test_a_key_changes_what_is_planned_and_not_what_the_log_ran_with(log: str, key: str) -> None:
    logged, _ = read_workload(log, NEEDED)
    workload, _ = read_workload(log, [*NEEDED, key])
    for name, value in WHAT_IFS[key].items():
        found = getattr(workload.rewards, name)
        assert (found.mean if name == "latency" else found) == value
    if "latency" not in key:
        assert workload.rewards.latency == logged.rewards.latency
    same(workload.loop, logged.loop)
    assert workload.ran_with == "log.concurrency=4"


def test_rewards_that_never_made_the_log_wait_come_at_once(tmp_path: Path) -> None:
    columns = {"gen": [9], "reward": [0.1], "old_log_prob": [5], "adv": [0.2], "update_actor": [4]}
    workload, _ = read_workload(write(tmp_path / "a.csv", columns), NEEDED)
    assert workload.rewards.latency.mean == 0
    assert any("shows no wait for rewards" in sentence for sentence in workload.assumptions)
    assert any("no reference log-probs" in sentence for sentence in workload.assumptions)
    assert workload.logged is None


def test_the_latency_is_asked_for_where_no_wait_is_logged(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", {"gen": [9, 9], "reward": [0.5, 0.5], "update_actor": [4, 4]})
    with pytest.raises(ConfigError, match=r"does not say 'log.latency'; give log.latency=.* timing_s/adv"):
        read_workload(path, NEEDED)
    workload, _ = read_workload(path, [*NEEDED, "log.latency=7"])
    assert workload.rewards.latency.mean == 7


def test_a_validation_is_generation_and_scoring(log: str) -> None:
    keys = [*NEEDED, "log.latency=10"]
    plain, _ = read_workload(log, keys)
    apart, _ = read_workload(log, [*keys, "validation.samples=4"])
    assert plain.times["val_rollout"].mean == 15
    assert apart.times["val_rollout"].mean == pytest.approx(5)
    none, _ = read_workload(log, [*keys, "validation.every=0", "checkpoint.every=0"])
    assert none.validation is None
    assert "checkpoint" not in none.times


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            NEEDED[1:2],
            "does not say prompts, mini_batches and log.concurrency; give prompts=1024 mini_batches=4 log.conc",
        ),
        ((*NEEDED, "log.latency=unifrom:1:40"), "no distribution is named 'unifrom'; did you mean 'uniform'?"),
        ((*NEEDED, "log.rpm=1"), "requests a step cannot be answered in the 40 s"),
        (
            (*NEEDED[:3], "reward.concurrency=4"),
            "does not say 'log.concurrency'; give log.concurrency=256 or what it is.",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_said(log: str, keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        read_workload(log, keys)
    assert message in str(error.value)


def test_the_log_of_a_resumed_run_begins_with_its_first_step(tmp_path: Path) -> None:
    columns = {"gen": [20, 10, 10], "adv": [9, 9, 9], "update_actor": [4, 4, 4], "testing": ["", 7, ""]}
    path = write(tmp_path / "a.csv", columns)
    lines = (tmp_path / "a.csv").read_text().splitlines()
    later = [lines[0], *(f"{60 + n}{line[1:]}" for n, line in enumerate(lines[1:], start=1))]
    (tmp_path / "a.csv").write_text("\n".join(later))
    workload, _ = read_workload(path, NEEDED)
    rollout = workload.times["rollout"]
    assert isinstance(rollout, Measured)
    assert [rollout.seconds(step, 0, 1) for step in (1, 2, 3)] == [20, 10, 10]
    assert workload.validation is not None
    assert workload.validation.every == 2


@pytest.mark.parametrize(
    ("first", "last", "tested", "every"),
    [
        (1, 33, [10, 20, 30, 33], 10),  # and after the last step
        (51, 105, [60, 80, 100], 20),
        (61, 63, [62], 2),
        (1, 9, [5, 7], 2),  # by hand, at no interval
        (1, 9, [], 0),
    ],
)
def test_the_interval_of_validation_is_that_of_the_whole_run(
    tmp_path: Path, first: int, last: int, tested: list[int], every: int
) -> None:
    path = tmp_path / "a.csv"
    rows = [f"{step},1,1,1,{7 if step in tested else ''}" for step in range(first, last + 1)]
    path.write_text("\n".join(["global_step,timing_s/gen,timing_s/adv,timing_s/update_actor,timing_s/testing", *rows]))
    workload, _ = read_workload(str(path), NEEDED)
    assert (workload.validation.every if workload.validation else 0) == every


FACTS = (
    "steps=105", "prompts=1024", "responses=5", "mini_batches=4", "log.latency=uniform:1:40",
    "log.concurrency=256", "reward.agent=per-step", "validation.every=5", "validation.samples=1319",
    "checkpoint.every=20",
)  # fmt: skip


@pytest.mark.heavy
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published logs are not beside this checkout")
def test_an_agent_that_never_idles_meets_the_lower_bound_within_1_percent() -> None:
    keys = [key for key in FACTS if key != "reward.agent=per-step"]
    workload, _ = read_workload(str(PUBLISHED / "qwen2-7b_megatron_baseline.csv"), [*keys, "validation.pool=own"])
    assert workload.validation is not None
    assert workload.validation.overlap
    row = predict(workload, {"both": preset("both", 4)})[0]
    assert row.total_s <= 1.01 * row.lower_bound_s


def steps_of(path: Path, **more: list[object]) -> str:
    """Writes a log of ten steps of 98.5 s, with more timings in them."""
    usual: dict[str, list[object]] = {"gen": [40.0] * 10, "reward": [0.5] * 10, "old_log_prob": [8.0] * 10}
    columns = {**usual, "adv": [30.0] * 10, "update_actor": [20.0] * 10, **more}
    whole: list[object] = [sum(float(str(column[at] or 0)) for column in columns.values()) for at in range(10)]
    return write(path, {**columns, "step": whole})


def test_a_loop_stops_for_its_checkpoints_where_it_has_no_validation(tmp_path: Path) -> None:
    path = steps_of(tmp_path / "a.csv", save_checkpoint=["", "", "", "", 200.0, *[""] * 4, 200.0])
    plan = make_plan(path, NEEDED)
    assert plan.replay is not None
    assert plan.replay.step_s == pytest.approx(plan.logged_step_s, rel=0.02)
    assert "it waits for what" not in plan.text()
