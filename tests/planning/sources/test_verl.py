"""A verl log as a workload: reading, fitting, messages; and the predictions of the published runs."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dataflow.errors import ConfigError, DataError, PolicyError
from dataflow.planning.plan import make_plan
from dataflow.planning.planner import predict
from dataflow.planning.simulation.simulate import simulate
from dataflow.planning.sources.read import read_workload
from dataflow.planning.workload import Measured, Workload
from dataflow.policy import preset

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
    account, _costs = simulate(workload, preset(policy, workload.mini_batches))
    return account.end - account.begin


def test_a_baseline_is_predicted_as_it_was_logged(log: str) -> None:
    workload, _config = read_workload(log, [*NEEDED, "log.latency=10", "reward.agent=per-step"])
    assert workload.steps == 4
    assert workload.logged == ("baseline", 262.0, 4, None)
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


def test_the_seconds_of_a_stage_are_a_what_if_of_a_log_too(log: str, tmp_path: Path) -> None:
    logged, _ = read_workload(log, NEEDED)
    workload, _ = read_workload(log, [*NEEDED, "stages.rollout=1", "stages.val_rollout=2", "stages.values=3"])
    assert [workload.times[name].mean for name in ("rollout", "val_rollout", "values")] == [1, 2, 3]
    assert workload.times["actor_update"] == logged.times["actor_update"]
    same(workload.loop, logged.loop)
    path = write(tmp_path / "a.csv", {"gen": [9, 9], "adv": [9, 9], "update_actor": [4, 4]})
    added, _ = read_workload(path, [*NEEDED, "checkpoint.every=1", "stages.checkpoint=5", "stages.ref_log_prob=2"])
    assert {"checkpoint", "ref_log_prob"} < set(added.pipeline.by_name)


@pytest.mark.heavy
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published logs are not beside this checkout")
@pytest.mark.parametrize(("concurrency", "step_s"), [(128, 805.6), (512, 271.2)])
def test_more_or_fewer_requests_in_flight_than_a_published_run_had(concurrency: int, step_s: float) -> None:
    source = str(PUBLISHED / "qwen2-7b_megatron_baseline.csv")
    plan = make_plan(
        source,
        ["prompts=1024", "responses=5", "mini_batches=4", "log.concurrency=256", f"reward.concurrency={concurrency}"],
    )
    assert {row.policy: row.step_s for row in plan.rows}["both"] == pytest.approx(step_s, abs=0.1)
    assert plan.text().startswith(f"{source}: it ran with log.concurrency=256; planned are 105 steps of 1024 x 5")


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
    assert "it shows no waits for rewards" in workload.assumptions[0]


def test_a_loop_that_waits_in_its_reward_function_is_distinguished(tmp_path: Path) -> None:
    columns = {"gen": [9], "reward": [40], "old_log_prob": [5], "ref": [3], "adv": [0.2], "update_actor": [4]}
    workload, _ = read_workload(write(tmp_path / "a.csv", columns), [*NEEDED, "log.latency=10"])
    assert workload.rewards.latency.mean == pytest.approx(10.0)
    assert "reward_request" not in workload.times
    assert any("before the log-probs" in sentence for sentence in workload.assumptions)


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
        (NEEDED[1:], "does not say 'prompts'; give prompts=1024"),
        (NEEDED[:1] + NEEDED[2:], "does not say 'responses'"),
        (NEEDED[:3], "does not say 'log.concurrency'; give log.concurrency=256"),
        ((*NEEDED[:3], "log.concurrency=0"), "log.concurrency=0: give a number greater than 0"),
        ((*NEEDED, "log.latency=unifrom:1:40"), "no distribution is named 'unifrom'; did you mean 'uniform'?"),
        ((*NEEDED, "log.latncy=3"), "unknown key 'log.latncy'; did you mean 'log.latency'?"),
        (("rollout.n=5",), "unknown key 'rollout.n'; verl's 'actor_rollout_ref.rollout.n' is 'responses' in a plan."),
        (("data.train_batch_size=8",), "verl's 'data.train_batch_size' is 'prompts' in a plan."),
        (("engine.n=8",), "'engine.n' of a run is 'responses' in a plan."),
        (("train_batch_size=8",), "'train_batch_size' is 'prompts' in a plan."),
        (
            ("actor_rollout_ref.actor.ppo_mini_batch_size=8",),
            "is 'mini_batches' in a plan: data.train_batch_size / ppo_mini_batch_size.",
        ),
        ((*NEEDED, "reward.agent=per_step"), "did you mean 'per-step'?"),
        ((*NEEDED, "log.rpm=1"), "requests a step cannot be answered in the 40 s"),
        (
            (*NEEDED, "stages.rolout=3"),
            "stages.rolout: no stage has that name; did you mean 'rollout'?",
        ),
        (
            (*NEEDED[:3], "reward.concurrency=4"),
            "does not say 'log.concurrency'; give log.concurrency=256 or what it is ",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_said(log: str, keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_workload(log, keys)
    assert message in str(error.value)


def test_mini_batches_divide_the_prompts(log: str) -> None:
    with pytest.raises(PolicyError, match="mini_batches=3 does not divide 8 prompt groups"):
        read_workload(log, ["prompts=8", "responses=2", "mini_batches=3", "log.concurrency=4"])


@pytest.mark.parametrize("bad", ["-1", "nan"])
def test_timings_that_cannot_be_are_said(tmp_path: Path, bad: str) -> None:
    path = write(tmp_path / "a.csv", {"gen": [9, bad], "update_actor": [4, 4]})
    with pytest.raises(DataError, match="timing_s/gen"):
        read_workload(path, NEEDED)


def test_steps_beyond_the_log_repeat_it_without_its_warm_up(log: str) -> None:
    workload, _ = read_workload(log, [*NEEDED, "steps=9"])
    rollout = workload.times["rollout"]
    assert isinstance(rollout, Measured)
    assert [rollout.seconds(step, 0, 1) for step in range(1, 10)] == [20, *[10] * 8]


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
        (1, 30, [10, 20, 30], 10),
        (1, 33, [10, 20, 30, 33], 10),  # and after the last step
        (51, 105, [60, 80, 100, 105], 20),
        (51, 105, [60, 80, 100], 20),
        (1, 15, [10], 10),
        (61, 63, [62], 2),
        (1, 5, [1, 2, 3, 4, 5], 1),
        (1, 9, [5, 7], 1),  # by hand, at no interval
        (1, 9, [9], 9),
        (1, 9, [], 0),
        (10**11, 10**11 + 9, [10**11 + 4, 10**11 + 8], 4),
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
@pytest.mark.parametrize(
    ("policy", "pool"), [("baseline", "own"), ("mini-batch", "own"), ("off-policy", "shared"), ("both", "own")]
)
def test_the_published_runs_are_predicted_from_the_baseline_within_2_percent(policy: str, pool: str) -> None:
    workload, _ = read_workload(str(PUBLISHED / "qwen2-7b_megatron_baseline.csv"), [*FACTS, f"validation.pool={pool}"])
    with (PUBLISHED / f"qwen2-7b_megatron_{policy}.csv").open() as file:
        logged = [float(row["timing_s/step"]) for row in csv.DictReader(file) if row["timing_s/step"]]
    # Whether the last step counts, which all but the off-policy log leave out of timing_s/step, or not.
    for steps in (104, 105):
        predicted = total(replace(workload, steps=steps), policy)
        assert predicted == pytest.approx(math.fsum(logged), rel=0.02), steps


@pytest.mark.heavy
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published logs are not beside this checkout")
def test_an_agent_that_never_idles_meets_the_lower_bound_within_1_percent() -> None:
    keys = [key for key in FACTS if key != "reward.agent=per-step"]
    workload, _ = read_workload(str(PUBLISHED / "qwen2-7b_megatron_baseline.csv"), [*keys, "validation.pool=own"])
    assert workload.validation is not None
    assert workload.validation.overlap
    row = predict(workload, {"both": preset("both", 4)})[0]
    assert row.total_s <= 1.01 * row.lower_bound_s


def test_all_that_a_log_does_not_say_is_asked_for_at_once(tmp_path: Path, log: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_workload(log, ["responses=2"])
    assert str(error.value) == (
        f"{log} does not say prompts, mini_batches and log.concurrency; "
        "give prompts=1024 mini_batches=4 log.concurrency=256 or what they are."
    )
    tokens = tmp_path / "tokens.csv"
    tokens.write_text(
        "step,timing_s/gen,timing_s/update_actor,perf/total_num_tokens,prompt_length/mean,response_length/mean\n"
        "1,2,3,4000,50,200\n2,2,3,4160,50,210\n"
    )
    with pytest.raises(ConfigError, match=r"the log's tokens are those of 16 samples a step: prompts x responses"):
        read_workload(str(tokens))


OVERLAPPED: dict[str, tuple[list[float], bool]] = {  # the waits of steps, each second of which validates
    "a baseline": ([34, 33, 35, 34, 33, 34], False),
    "off-policy": ([31, 17, 2, 19, 1, 19], True),
    "both": ([19, 17, 1, 18, 2, 18, 17, 18], True),
    "no waits": ([0.5, 0.1, 0.1, 0.1, 0.1, 0.1], False),
    "a log of two steps": ([31, 17], False),
}


@pytest.mark.parametrize("name", OVERLAPPED)
def test_a_log_that_has_overlapped_is_said_to_be_no_baseline(name: str, tmp_path: Path) -> None:
    waits, overlaps = OVERLAPPED[name]
    steps = len(waits)
    columns: dict[str, list[object]] = {
        "gen": [10] * steps,
        "old_log_prob": [5] * steps,
        "adv": list(waits),
        "update_actor": [4] * steps,
        "testing": ["", 15, "", 15, "", 15, "", 15][:steps],
        "step": [60] * steps,
    }
    path = write(tmp_path / "a.csv", columns)
    if not overlaps:
        workload, _config = read_workload(path, NEEDED)
        assert not workload.caution
        assert workload.logged == ("baseline", 60.0 * steps, steps, None)
        return
    with pytest.raises(ConfigError) as error:  # its waits cannot be fitted
        read_workload(path, NEEDED[1:])
    assert str(error.value).startswith("this log is of a run that overlaps steps already, not of a baseline: ")
    assert "does not say prompts and log.latency; give prompts=1024 log.latency=uniform:1:40" in str(error.value)
    workload, _config = read_workload(path, [*NEEDED, "log.latency=7"])
    assert "overlaps steps already" in workload.caution
    assert workload.rewards.latency.mean == 7
    assert workload.logged == ("", 60.0 * steps, steps, None)
    assert workload.loop is None


def of_updates(path: Path, mini_batches: int, steps: int) -> str:
    """Writes a log whose rewards take 100 s, give or take 1, in a run that updates on mini-batches as they arrive."""
    draw = random.Random(3)
    updates = [40 + draw.uniform(-4, 4) for _ in range(steps)]
    hidden = [update * (mini_batches - 1) / mini_batches for update in updates]
    waits = [100 - 5 - each + draw.gauss(0, 1) for each in hidden]
    columns: dict[str, list[object]] = {"gen": [10] * steps, "old_log_prob": [5] * steps, "adv": [*waits]}
    return write(path, {**columns, "update_actor": [*updates], "step": [155] * steps})


@pytest.mark.parametrize(("mini_batches", "steps"), [(1, 40), (1, 9), (2, 40), (4, 40), (4, 9)])
def test_a_log_of_mini_batches_is_recognised_where_its_steps_show_it(
    mini_batches: int, steps: int, tmp_path: Path
) -> None:
    path = of_updates(tmp_path / "a.csv", mini_batches, steps)
    keys = ["prompts=8", "responses=2", f"mini_batches={mini_batches}", "log.concurrency=4"]
    if mini_batches > 1 and steps > 9:
        doubted, _config = read_workload(path, keys)
        assert "likely not of a baseline, but of a run that updates on mini-batches" in doubted.caution
        assert doubted.caution.endswith("Give log.latency=... to settle that: the waits agree with it or not.")
        assert not any("taken for that of a baseline" in sentence for sentence in doubted.assumptions)
        # Its rewards take 25 s a request.
        workload, _config = read_workload(path, [*keys, "log.latency=25"])
        assert "Its latency settles that: the log's waits are those of rewards that take" in workload.caution
        assert workload.rewards.latency.mean == 25
        assert workload.logged is not None
        assert workload.logged[0] == ""
        # A baseline of quicker rewards would have the same waits.
        quicker = f"log.latency={doubted.rewards.latency.mean:.3f}"
        settled, _config = read_workload(path, [*keys, quicker])
        assert not settled.caution
        assert settled.assumptions[0].endswith(f"its waits are as long as {quicker} makes them.")
        return
    workload, _config = read_workload(path, keys)
    assert not workload.caution
    unknown = "a run that updates on mini-batches as they arrive looks like one with quicker rewards"
    assert any(unknown in sentence for sentence in workload.assumptions) == (steps == 9)


def test_waits_too_short_for_the_latency_are_said(log: str) -> None:
    workload, _config = read_workload(log, [*NEEDED, "log.latency=13"])
    assert "the log's waits are those of rewards that take 10 s, not the 13 s of log.latency=13" in workload.caution
    assert workload.logged is not None
    assert workload.loop is not None
    assert not read_workload(log, [*NEEDED, "log.latency=10.5"])[0].caution


def tokens(path: Path, samples: int, lengths: list[int]) -> str:
    """Writes a log that has tokens, but not the length of prompts, 100 tokens each."""
    head = "step,timing_s/gen,timing_s/update_actor,timing_s/adv,perf/total_num_tokens,response_length/mean\n"
    rows = (f"{step},2,3,9,{samples * (100 + length)},{length}\n" for step, length in enumerate(lengths, 1))
    path.write_text(head + "".join(rows))
    return str(path)


@pytest.mark.parametrize(
    ("samples", "given", "offered"),
    [
        (5120, [], "prompts=1024 responses=5 mini_batches=4"),
        (512, [], "prompts=64 responses=8 mini_batches=4"),
        (512, ["prompts=128"], "give responses=4 mini_batches=4"),
        (512, ["responses=16"], "give prompts=32 mini_batches=4"),
    ],
)
def test_the_samples_of_a_log_are_offered(samples: int, given: list[str], offered: str, tmp_path: Path) -> None:
    path = tokens(tmp_path / "a.csv", samples, list(range(200, 212)))
    with pytest.raises(ConfigError) as error:
        read_workload(path, given)
    assert offered in str(error.value)
    assert f"about {samples} samples a step" in str(error.value)
    with pytest.raises(ConfigError, match=r"or what they are\.$"):  # too few steps to tell
        read_workload(tokens(tmp_path / "b.csv", samples, [200, 210]))
