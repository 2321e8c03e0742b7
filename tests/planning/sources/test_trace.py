"""A run's trace as a workload: what was simulated from costs is predicted again from its own trace."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from dataflow.distribution import Distribution
from dataflow.errors import ConfigError, DataError
from dataflow.graph import Pipeline
from dataflow.planning.config import PlanConfig
from dataflow.planning.planner import parse_sweep
from dataflow.planning.simulation import Outcome, simulate
from dataflow.planning.sources.read import read_workload
from dataflow.planning.sources.trace import of_trace
from dataflow.planning.workload import Measured, Modelled, Workload
from dataflow.policy import SchedulingPolicy, preset
from dataflow.stage import SAMPLED
from dataflow.stages.checkpoint import checkpoint_stages
from dataflow.timeline import perfetto
from dataflow.timeline.spans import Level, Trace
from tests.rigs.critic import hosted
from tests.rigs.simulated import job, run

SAVES = {"stage_checkpoint": 0.5, "keep_samples": 0.25, "write_checkpoint": 4.0}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["baseline", "mini-batch", "off-policy", "both"])
def test_a_baselines_trace_foretells_every_policy(policy: str) -> None:
    workload = job(steps=40)
    found = of_trace(run(workload), "a run", PlanConfig())
    assert found.dispatch_s["old_log_prob"] == pytest.approx(0.01)
    assert found.dispatch_s["actor_update"] == pytest.approx(0.01)
    assert total(found, policy) == pytest.approx(total(workload, policy), rel=0.02)


class Slower(Workload):
    """Rewards take six times as long in the second half of the steps."""

    def latencies(self, step: int, agent: str = "reward") -> list[float]:
        return [s * (6.0 if step > self.steps // 2 else 1.0) for s in super().latencies(step, agent)]


@pytest.mark.parametrize("policy", ["mini-batch", "both"])
def test_a_service_that_was_slow_in_some_steps_is_slow_in_these(policy: str) -> None:
    plain = job(steps=8)
    changing = Slower(**{each.name: getattr(plain, each.name) for each in fields(plain)})
    trace = run(changing)
    found = of_trace(trace, "a run", PlanConfig())
    for step in range(1, 9):
        assert list(found.latencies(step)) == pytest.approx(changing.latencies(step))
    assert [found.latencies(step) for step in (9, 10)] == [found.latencies(2), found.latencies(3)]
    assert total(found, policy) == pytest.approx(total(changing, policy), rel=0.02)

    trace.marks = [m for m in trace.marks if m.args["step"] != 6 or m.args["group"] or m.args.get("validation")]
    fewer = of_trace(trace, "a run", PlanConfig())  # as if a group had been dropped
    assert len(fewer.latencies(6)) == len(found.latencies(6))
    assert set(fewer.latencies(6)) < set(found.latencies(6))


def test_what_a_trace_holds_is_read() -> None:
    found = of_trace(run(job(), "both"), "a run", PlanConfig())
    assert (found.steps, found.prompts, found.responses, found.mini_batches) == (8, 8, 4, 4)
    assert found.roles == job().roles
    assert found.rewards.concurrency == 8
    assert len(found.rewards.latency.values) == 8 * 32
    assert found.validation is not None
    assert (found.validation.every, found.validation.samples) == (4, 6)
    assert found.logged is not None
    assert found.logged[0] == "both"
    update = found.times["actor_update"]
    assert isinstance(update, Measured)
    assert update.steps[3] == pytest.approx((0.5,) * 4)
    assert update.seconds(3, 0, 2) == pytest.approx(1.0)


def test_a_library_that_the_first_step_imports_delays_no_later_one() -> None:
    trace, slow = run(job()), run(job())
    late = min(s.begin for s in slow.spans if s.stage == "advantage")
    slow.spans = [s if s.begin < late else replace(s, begin=s.begin + 60, end=s.end + 60) for s in slow.spans]
    found, delayed = (of_trace(each, "a run", PlanConfig()).dispatch_s for each in (trace, slow))
    assert delayed["advantage"] == pytest.approx(found["advantage"], abs=0.1)


def test_the_time_in_which_a_process_was_rebuilt_is_no_work() -> None:
    trace = run(job())
    again = next(s for s in trace.spans if (s.stage, s.step) == ("sync_weights", 3))
    trace.spans[trace.spans.index(again)] = replace(again, end=again.end + 60.0, args={**again.args, "restarted": 1})
    found = of_trace(trace, "a run", PlanConfig())
    assert found.times["sync_weights"].mean == pytest.approx(0.25)
    trace.spans = [s for s in trace.spans if s.stage != "sync_weights" or s.step == 3]
    assert of_trace(trace, "a run", PlanConfig()).times["sync_weights"].mean == pytest.approx(60.25), (
        "no other is known"
    )


def test_answers_that_a_resumed_run_took_from_its_ledger_are_no_latencies_of_the_service() -> None:
    trace = run(job())
    known = [m for m in trace.marks if m.args.get("step") == 5]
    paid = [m for m in trace.marks if m.args.get("step") != 5 and not m.args.get("validation")]
    trace.marks = [replace(m, end=m.begin, args={**m.args, "how": "ledger"}) if m in known else m for m in trace.marks]
    cached = of_trace(trace, "a run", PlanConfig())  # a run whose cache answers goes on to do so
    assert min(cached.rewards.latency.values) == 0.0
    trace.meta |= {"gaps": [[60.0, 1.0, "resumed from step 4"]], "resumed": [4]}
    found = of_trace(trace, "a run", PlanConfig())
    assert found.rewards.latency.values == tuple(m.end - m.begin for m in paid)


def test_when_groups_ended_in_the_run_a_streaming_rollout_would_hand_them_on() -> None:
    trace = run(job())
    assert of_trace(trace, "a run", PlanConfig()).ends == ()
    assert any("evenly" in said for said in of_trace(trace, "a run", PlanConfig()).assumptions)
    rollouts = [s for s in trace.spans if s.stage == "rollout"]
    for s in rollouts:
        long = 0.5 + 0.1 * (s.step % 2)  # steps differ; the mean counts
        shares = [long * k / 7 for k in range(7)] + [1.0]
        trace.levels += [Level(SAMPLED, s.begin + share * (s.end - s.begin), k) for k, share in enumerate(shares, 1)]
    found = of_trace(trace, "a run", PlanConfig())
    assert found.ends == pytest.approx((*(0.55 * k / 7 for k in range(7)), 1.0))
    evenly = replace(found, ends=())
    early, late = (total(load, "baseline+stream") for load in (found, evenly))
    assert early < late
    # A restarted rollout has its groups twice: such a run is not used.
    trace.levels.append(Level(SAMPLED, rollouts[0].begin, 1))
    assert of_trace(trace, "a run", PlanConfig()).ends == ()


@pytest.mark.parametrize("whole", [1, 3])
def test_a_run_that_was_interrupted_logged_the_time_of_its_whole_steps(whole: int) -> None:
    trace = run(job())
    last = max(s.end for s in trace.spans if s.step == whole and not s.optional)
    begun = [s for s in trace.spans if s.begin < last]  # tasks of the next step among them
    stopped = Trace(begun, trace.marks, meta={**trace.meta, "status": "interrupted"})
    load = of_trace(stopped, "run", PlanConfig())
    assert load.logged is not None
    seconds, steps = load.logged.seconds, load.logged.steps
    assert (load.steps, steps) == (whole, whole)
    assert seconds == pytest.approx(last - min(s.begin for s in begun))


def saving(policy: str = "both") -> Trace:
    """The trace of a run that saves a checkpoint every two steps, by the stages of a real run."""
    plain = job()
    stages = checkpoint_stages(hosted(plain.pipeline.stages), every=2, store=None, steps=plain.steps)  # type: ignore[arg-type]
    pipeline = Pipeline([*plain.pipeline.stages, *stages], plain.pipeline.inputs, plain.pipeline.resources)
    times = {name: Modelled(Distribution("constant", s)) for name, s in SAVES.items()}
    return run(replace(plain, pipeline=pipeline, times={**plain.times, **times}), policy)


@pytest.mark.parametrize("policy", ["baseline", "both+stream"])
def test_checkpoints_are_planned_as_they_were_saved(policy: str) -> None:
    found = of_trace(saving(), "a run", PlanConfig())
    assert {name: found.times[name].mean for name in SAVES} == pytest.approx(SAVES)
    told, _ = simulate(found, preset(policy, 4))
    spans = [s for s in told.spans if s.stage in SAVES]
    staleness = preset(policy, 4).max_staleness
    assert {s.step for s in spans if s.stage == "write_checkpoint"} == {2, 4, 6, 8}
    assert {s.step for s in spans if s.stage == "keep_samples"} == ({3, 5, 7} if staleness else set())
    # The copy takes the GPUs, the files do not.
    assert {s.stage for s in spans if s.resource == "gpu"} == {"stage_checkpoint"}
    plain = replace(found, times={name: time for name, time in found.times.items() if name not in SAVES})
    with_it, bare = (Outcome.of(load, preset(policy, 4)) for load in (found, plain))
    assert with_it.work_s["gpu"] - bare.work_s["gpu"] == pytest.approx(3 * SAVES["stage_checkpoint"]), (
        "not the last one"
    )
    assert with_it.end - bare.end < 4 * (SAVES["stage_checkpoint"] + 2 * 0.01) + 0.5


def test_other_intervals_of_checkpoints_are_planned(tmp_path: Path) -> None:
    perfetto.write(saving(), tmp_path / "trace.json")
    for every, steps in ((0, set()), (3, {3, 6, 8})):
        workload, _ = read_workload(str(tmp_path), [f"checkpoint.every={every}"])
        told, _ = simulate(workload, preset("both", 4))
        writes = [s for s in told.spans if s.stage == "write_checkpoint"]
        assert {s.step for s in writes} == steps
        assert all(s.end - s.begin == pytest.approx(4.0) for s in writes)
    perfetto.write(run(job()), tmp_path / "trace.json")
    with pytest.raises(ConfigError, match=r"checkpoint.every=4: .* made no checkpoint, so the time of one is not"):
        read_workload(str(tmp_path), ["checkpoint.every=4"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.meta.pop("job"), "does not say what its pipeline and its steps were; give a run"),
        (lambda t: t.meta["job"].pop("prompts"), "does not say what its pipeline and its steps were"),
        (lambda t: t.spans.clear(), "holds no whole step of"),
        (lambda t: t.spans.__delitem__(slice(5, None)), "holds no whole step of"),
    ],
)
def test_a_trace_that_cannot_be_planned_from_is_said(change: object, message: str) -> None:
    trace = run(job())
    change(trace)  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        of_trace(trace, "a run", PlanConfig())


def test_validations_take_the_latency_of_their_own_requests() -> None:
    trace = run(job())
    trace.marks = [replace(m, end=m.begin + 0.25) if m.args.get("validation") else m for m in trace.marks]
    found = of_trace(trace, "a run", PlanConfig())
    assert set(found.val_requests(4).seconds) == {0.25}
    assert min(found.latencies(4)) > 0.25
    given = of_trace(trace, "a run", PlanConfig.model_validate({"reward": {"latency": "3"}}))
    assert set(given.val_requests(4).seconds) == {3.0}


@pytest.mark.parametrize(
    ("policies", "name"),
    [
        ([preset("baseline", 4)], "baseline"),
        ([SchedulingPolicy(2, 3)], "split=2 staleness=3"),
        ([SchedulingPolicy(4, 0, "index", stream_rollout=True)], "mini-batch+stream"),
        ([preset("baseline", 4), preset("both", 4)], "auto"),
    ],
)
def test_a_run_that_planned_itself_is_called_by_the_policy_that_it_kept(
    policies: list[SchedulingPolicy], name: str
) -> None:
    trace = run(job())
    trace.meta |= {"policy": "auto", "policies": [{"step": at, **asdict(each)} for at, each in enumerate(policies, 1)]}
    found = of_trace(trace, "a run", PlanConfig())
    assert found.logged is not None
    assert found.logged[0] == name


@pytest.mark.parametrize("key", ["prompts=4", "log.concurrency=4"])
def test_keys_that_would_not_fit_what_was_measured_are_refused(tmp_path: Path, key: str) -> None:
    perfetto.write(run(job()), tmp_path / "trace.json")
    with pytest.raises(ConfigError, match="says what it was; "):
        read_workload(str(tmp_path), [key])


def test_keys_are_what_ifs_of_a_run_too(tmp_path: Path) -> None:
    perfetto.write(run(job()), tmp_path / "trace.json")
    keys = ["stages.rollout=3", "validation.every=2", "reward.latency=7", "reward.rpm=60", "reward.concurrency=2"]
    found, _ = read_workload(str(tmp_path), keys)
    assert found.times["rollout"].mean == 3
    assert found.validation is not None
    assert found.validation.every == 2
    assert (found.rewards.latency.mean, found.rewards.rpm, found.rewards.concurrency) == (7, 60, 2)
    assert found.ran_with == "reward.concurrency=8"
    own = read_workload(str(tmp_path))[0]
    assert found.loop is not None
    assert replace(found.loop, pipeline=own.pipeline) == own
    none, _ = read_workload(str(tmp_path), ["validation.every=0"])
    assert none.validation is None
    assert not none.pipeline.with_role("validates")
    with pytest.raises(ConfigError, match=r"stages\.rolout: no stage .* has that name; did you mean"):
        read_workload(str(tmp_path), ["stages.rolout=3"])


def asking_itself() -> Trace:
    """The trace of a run whose collector asks for its rewards itself."""
    trace = run(job())
    for facts in trace.meta["job"]["pipeline"]["stages"]:
        if facts["role"] == "requests":
            facts["role"] = None
    return trace


def total(workload: Workload, policy: str) -> float:
    return Outcome.of(workload, preset(policy, 4)).total_s


def unrecorded() -> Trace:
    """The trace of a run whose own stages ask a judge of the user's: it has no request."""
    trace = run(job())
    trace.marks = []
    return trace


def test_what_a_judge_of_the_users_own_ran_with_is_asked_for(tmp_path: Path) -> None:
    perfetto.write(unrecorded(), tmp_path / "trace.json")
    with pytest.raises(ConfigError) as error:
        read_workload(str(tmp_path))
    assert str(error.value) == (
        "the trace has no reward request, as the run's own stages asked for those of 'reward_collect': "
        f"{tmp_path} does not say log.latency and log.concurrency; give log.latency=uniform:1:4 log.concurrency=64 or "
        "what they are."
    )
    own = ["log.latency=6", "log.concurrency=8"]
    found, _ = read_workload(str(tmp_path), own)
    assert (found.rewards.latency.mean, found.rewards.concurrency, found.ran_with) == (6, 8, "log.concurrency=8")
    changed, _ = read_workload(str(tmp_path), [*own, "reward.latency=3", "reward.concurrency=32"])
    assert (changed.rewards.latency.mean, changed.rewards.concurrency) == (3, 32)
    assert changed.loop is not None
    assert changed.loop.rewards == found.rewards
    with pytest.raises(ConfigError, match=r"stages\.reward_collect: no stage that takes time of its own has that name"):
        read_workload(str(tmp_path), [*own, "stages.reward_collect=9"])


def test_a_run_whose_collector_asks_itself_is_planned_and_its_service_is_no_knob() -> None:
    found = of_trace(asking_itself(), "a run", PlanConfig())
    assert found.times["reward_collect"].mean > 1
    assert parse_sweep("mini_batches:1:4", found)
    with pytest.raises(ConfigError, match=r"no knob is named 'reward.concurrency' \(knobs: mini_batches\)"):
        parse_sweep("reward.concurrency:1:4", found)
    with pytest.raises(ConfigError, match=r"reward\.rpm: no stage of a run sends reward requests"):
        of_trace(asking_itself(), "a run", PlanConfig.model_validate({"reward": {"rpm": 60}}))


def test_what_is_nothing_to_plan_from_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match="cannot be planned from; give a run's directory"):
        read_workload(str(tmp_path / "notes.txt"))
    with pytest.raises(DataError, match=r"nothing to plan from at .*; give "):
        read_workload(str(tmp_path / "note.txt"))
