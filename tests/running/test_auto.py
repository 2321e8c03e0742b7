"""`policy=auto` in a run: what it writes, that a resume goes on with the same policies, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dataflow.cli import main
from dataflow.config.base import PolicyConfig
from dataflow.errors import RunError
from dataflow.planning.auto.controller import Controller
from dataflow.planning.auto.forecast import Forecast
from dataflow.planning.auto.window import window
from dataflow.planning.backtest import backtest
from dataflow.policy import PolicySchedule, SchedulingPolicy
from dataflow.running import auto
from dataflow.running.auto import limit_in_force, listed, load_schedule, within
from dataflow.timeline import perfetto
from dataflow.timeline.spans import Level, Mark, Trace

pytestmark = pytest.mark.timeout(300)

TOY = str(Path(__file__).parents[1] / "faults" / "rig" / "toy_run.py")
STEPS = 16
KEYS = (
    "policy=auto",
    "policy.order=index",
    "policy.replan=3",
    "groups=4",
    "mini_batches=4",
    "checkpoint.every=4",
    "checkpoint.keep_last=9",
)

Plan = Callable[[tuple[Any, ...]], Any]


def scripted(*wanted: SchedulingPolicy) -> Plan:
    """Returns forecasts in which each policy in turn is the fastest, then the last one for ever."""
    left = list(wanted)

    async def forecast(question: tuple[Any, ...]) -> Forecast:
        window, policies, _current, _adapted = question
        assert window.spans
        fastest = left.pop(0) if len(left) > 1 else left[0]
        return Forecast([1.0 if policy == fastest else 2.0 for policy in policies], (128, 0.5))

    return forecast


def policy(split: int, staleness: int) -> SchedulingPolicy:
    return SchedulingPolicy(split, staleness, "index")


def begin(directory: Path, *more: str, code: int = 0, steps: int = STEPS) -> Path:
    keys = [*KEYS, *more, f"steps={steps}", f"runs={directory}", "name=auto"]
    assert main(["run", TOY, *keys, "--quiet"]) == code
    return directory / "auto"


@pytest.fixture(autouse=True)
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy's rewards take microseconds, which change from step to step: no plan is made for that."""
    monkeypatch.setenv("TOY_LOGS", str(tmp_path))
    monkeypatch.setattr(auto, "latency_changed", lambda *_trace, whole: False)


def confirmed(patch: pytest.MonkeyPatch) -> None:
    """Takes the scripted forecasts for right, although the toy's steps take milliseconds."""
    patch.setattr(Controller, "confirms", lambda *_asked: True)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that changed its policy twice, to read."""
    directory = tmp_path_factory.mktemp("changed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOY_LOGS", str(directory))
        patch.setattr(auto, "latency_changed", lambda *_trace, whole: False)
        patch.setattr(auto, "forecast", scripted(policy(4, 1), policy(1, 0)))
        confirmed(patch)
        return begin(directory)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def of_policies(run: Path) -> list[tuple[float, float]]:
    return [(row["policy/split"], row["policy/max_staleness"]) for row in rows(run) if "policy/split" in row]


@pytest.mark.slow
def test_each_change_is_in_the_metrics_the_trace_and_the_file(changed: Path) -> None:
    schedule = load_schedule(changed)
    assert schedule is not None
    (first, _), (second, after), (third, back) = schedule.changes
    assert (first, after, back) == (1, policy(4, 1), policy(1, 0))
    expected = [(schedule.at(s).split, schedule.at(s).max_staleness) for s in range(1, STEPS + 1)]
    assert of_policies(changed) == expected
    assert {(4, 1), (1, 0)} == set(expected)
    said = [row for row in rows(changed) if "policy/predicted_s" in row]
    assert [row["policy/switch_step"] for row in said] == [second, third]
    assert all((row["policy/predicted_s"], row["policy/predicted_before_s"]) == (1.0, 2.0) for row in said)
    assert any(row.get("policy/measured_s", 0) > 0 for row in rows(changed)), "what came of it"
    assert [row["policy/suggested_concurrency"] for row in rows(changed) if "policy/suggested_concurrency" in row] == [
        128
    ]
    trace = perfetto.load(str(changed))
    assert [change["step"] for change in trace.meta["policies"]] == [1, second, third]
    summary = json.loads((changed / "summary.json").read_text())
    assert (summary["policy"], summary["split"], summary["max_staleness"]) == ("auto", 1, 1)
    assert [change["step"] for change in summary["switches"]] == [second, third]
    page = (changed / "timeline.html").read_text()
    assert f"from step {second}" in page
    assert "split 4, max staleness 1" in page
    assert [change["after_s"] for change in trace.meta["switches"]] == [1.0, 1.0]
    assert [level.value for level in trace.levels if level.name == "policy split"] == [4.0, 1.0]
    stale = [row["staleness/rollout"] for row in rows(changed) if "staleness/rollout" in row]
    assert all(value <= 1 for value in stale)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_policies_and_ends_with_the_same_weights(
    changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = json.loads((changed / "summary.json").read_text())
    for kept in (4, 8):
        again = tmp_path / f"from-{kept}" / "auto"
        shutil.copytree(changed, again)
        for directory in (again / "checkpoints").glob("step_*"):
            if int(directory.name.removeprefix("step_")) > kept:
                shutil.rmtree(directory)
        (again / "summary.json").unlink()
        monkeypatch.setattr(auto, "forecast", scripted(policy(1, 0)))
        assert main(["resume", str(again), "--quiet"]) == 0
        assert len(json.loads((again / "summary.json").read_text())["switches"]) == 2
        assert of_policies(again) == of_policies(changed)
        last = json.loads((again / "summary.json").read_text())["switches"][-1]
        shown = [row for row in rows(again) if row.get("policy/switch_step") == last["step"]]
        assert [row["policy/predicted_s"] for row in shown] == [last["after_s"]], "the change is recorded, and once"
        levels = [level.value for level in perfetto.load(str(again)).levels if level.name == "policy split"]
        assert levels[-1] == last["after"]["split"]
        assert json.loads((again / "summary.json").read_text())["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
def test_a_run_that_begins_again_keeps_its_policies_within_the_limits(
    changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = load_schedule(changed)
    assert schedule is not None
    for number, limit in enumerate((1, 0)):
        again = tmp_path / str(number) / "auto"
        shutil.copytree(changed, again)
        shutil.rmtree(again / "checkpoints")  # it was killed before its first checkpoint
        (again / "summary.json").unlink()
        monkeypatch.setattr(auto, "forecast", scripted(policy(1, 0)))
        begin(again.parent, f"policy.max_staleness={limit}", "resume=auto", "resume.allow=[policy]")
        expected = [(schedule.at(s).split, min(limit, schedule.at(s).max_staleness)) for s in range(1, STEPS + 1)]
        assert of_policies(again) == expected
        written = load_schedule(again)
        assert written is not None
        assert [written.at(s).max_staleness for s in range(1, STEPS + 1)] == [stale for _split, stale in expected]
        assert perfetto.load(str(again)).meta["policies"] == listed(written)


@pytest.mark.slow
def test_a_change_that_cannot_be_recorded_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_self: object) -> None:
        raise RunError("policies of the run cannot be written: No space left on device; make room there.")

    monkeypatch.setattr(auto, "forecast", scripted(policy(4, 1)))
    monkeypatch.setattr(auto.AutoPolicy, "_write", full)
    confirmed(monkeypatch)
    run = begin(tmp_path, code=1)
    assert "RunError: policies of the run cannot be written: No space left" in capsys.readouterr().err
    assert not any("policy/switch_step" in row for row in rows(run))


@pytest.mark.slow
def test_the_order_of_a_run_cannot_change_with_a_resume(
    changed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "auto"
    shutil.copytree(changed, again)
    (again / "summary.json").unlink()
    assert main(["resume", str(again), "policy.order=arrival", "resume.allow=[policy]", "--quiet"]) == 2
    assert "policy.order=arrival: the run was begun with policy.order=index, which holds" in capsys.readouterr().err


def test_a_resume_keeps_the_limits_that_it_is_given() -> None:
    schedule = PolicySchedule(((1, policy(1, 0)),)).switched(5, policy(4, 2)).switched(9, policy(2, 1))
    assert within(schedule, PolicyConfig(preset="auto", max_staleness=2), 7) == schedule
    strict = within(schedule, PolicyConfig(preset="auto", max_staleness=0), 7)
    assert [strict.at(step).max_staleness for step in (4, 5, 6, 7, 9, 12)] == [0, 1, 2, 0, 0, 0]
    assert [strict.at(step).split for step in (6, 7, 9)] == [4, 4, 2]
    streams = within(schedule, PolicyConfig(preset="auto", max_staleness=2, stream_rollout=True), 9)
    assert [streams.at(step).stream_rollout for step in (8, 9)] == [False, True]


def test_the_limit_in_force_is_that_of_all_endpoints_or_none() -> None:
    marks = [Mark("reward", "reward", 0.0, 1.0, {"step": 1, "endpoint": name}) for name in "ab"]
    levels = [Level("reward limit a", 0.0, 9), Level("reward limit a", 1.0, 8), Level("reward limit b", 1.0, 4)]
    assert limit_in_force(Trace(marks=marks, levels=levels)) == 12
    assert limit_in_force(Trace(marks=marks, levels=levels[:2])) is None, "that of b is not known"
    assert limit_in_force(Trace(marks=marks)) is None


@pytest.mark.slow
def test_a_plan_that_fails_leaves_the_policy_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def fail(question: Sequence[Any]) -> None:
        raise RunError("the planning process ended with code 1 (no memory)")

    monkeypatch.setattr(auto, "forecast", fail)
    assert set(of_policies(begin(tmp_path))) == {(1.0, 0.0)}
    assert load_schedule(tmp_path / "auto") is None


@pytest.mark.slow
def test_a_run_that_ends_soon_after_a_change_says_at_its_end_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto, "forecast", scripted(policy(4, 1)))
    run = begin(tmp_path, steps=8)
    (change,) = json.loads((run / "summary.json").read_text())["switches"]
    assert change["measured_s"] > 0
    assert capfd.readouterr().err.count(f"s a step since step {change['step']}, predicted 1 s") == 1


@pytest.mark.slow
def test_why_a_run_cannot_be_planned_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def unknown(question: tuple[Any, ...]) -> Forecast:
        return Forecast([None] * len(question[1]), reason="the run holds no task.")

    monkeypatch.setattr(auto, "forecast", unknown)
    assert set(of_policies(begin(tmp_path))) == {(1.0, 0.0)}
    assert capfd.readouterr().err.count("the run is not planned, its policy stays: the run holds no task.") == 1


@pytest.mark.slow
def test_changes_of_split_alone_end_with_the_weights_of_the_baseline(
    changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "forecast", scripted(policy(4, 0), policy(2, 0)))
    split = begin(tmp_path, "policy.max_staleness=0")
    assert {(1.0, 0.0), (4.0, 0.0), (2.0, 0.0)} == set(of_policies(split))
    keys = [key for key in KEYS if key not in ("policy=auto", "policy.replan=3")]
    assert (
        main(["run", TOY, "policy=baseline", *keys, f"steps={STEPS}", f"runs={tmp_path}", "name=fixed", "--quiet"]) == 0
    )
    weights = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("auto", "fixed")]
    assert weights[0]["weights_sha256"] == weights[1]["weights_sha256"]


@pytest.mark.slow
def test_rewards_that_take_longer_are_planned_upon_before_their_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def note(trace: Trace, last: int, rewards_of: int | None = None) -> Trace | None:
        asked.append((last, rewards_of))
        return window(trace, last, rewards_of)

    monkeypatch.setattr(auto, "latency_changed", lambda _trace, step, _last, whole: step == 9 and whole)
    monkeypatch.setattr(auto, "window", note)
    monkeypatch.setattr(auto, "forecast", scripted(policy(1, 0)))
    begin(tmp_path)
    assert [last for last, rewards_of in asked if rewards_of == 9] == [8]


@pytest.mark.slow
def test_the_backtest_of_such_a_run_follows_its_policies(changed: Path) -> None:
    trace = perfetto.load(str(changed))
    trace.meta["job"]["responses"] = 2
    _rows, predicted = backtest(trace, "auto")
    parts = {(s.step, s.parts) for s in predicted.spans if s.stage == "reward_collect"}
    measured = {(s.step, s.parts) for s in trace.spans if s.stage == "reward_collect"}
    assert parts == measured


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (("policy.split=2",), "policy.split=2: policy=auto chooses the split itself; leave it out."),
        (("policy=auto+stream",), "give policy=auto, and policy.stream_rollout=true if the rollout is to stream"),
        (("policy.replan=0",), "policy.replan=0"),
        (("policy.gain=0",), "policy.gain=0"),
        (("policy.max_staleness=5",), "policy.max_staleness=5; give 0 (on-policy) to 4."),
        (
            ("policy.stream_rollout=true",),
            "policy.stream_rollout=true: no stage of this pipeline streams; leave it out.",
        ),
    ],
)
def test_what_auto_cannot_be_beside_is_one_sentence(
    keys: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [key for key in KEYS if key.split("=")[0] not in {k.split("=")[0] for k in keys}]
    assert main(["run", TOY, *given, *keys, f"runs={tmp_path}", "name=auto"]) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said
    assert "\n" not in said
    assert not (tmp_path / "auto").exists()


def test_keys_of_auto_have_no_effect_beside_another_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", TOY, "policy=both", "policy.replan=7", "groups=4", "mini_batches=4", f"runs={tmp_path}"]) == 2
    assert "policy.replan=7 has no effect under policy=both" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {"policies": []},
        {"policies": [{"step": 1, "split": 3}]},
        {"policies": [{"step": "x"}]},
        {"policies": [{"step": 1}], "switches": [{"step": 5}]},
        {"policies": [{"step": 1}], "switches": 5},
    ],
)
def test_a_broken_file_of_policies_is_named(content: object, tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match=r"policy\.json cannot be read"):
        load_schedule(tmp_path, 4)


@pytest.mark.slow
def test_a_plan_is_made_in_a_process_of_its_own(changed: Path) -> None:
    trace = perfetto.load(str(changed))
    trace.meta["job"]["responses"] = 2
    found = window(trace, STEPS)
    assert found is not None
    monkey = [policy(1, 0), policy(4, 1), policy(3, 0)]
    seconds = asyncio.run(REAL_FORECAST((found, monkey, policy(1, 0), None))).seconds
    assert seconds[2] is None, "3 parts do not divide 4 mini-batches"
    assert all(s is not None and s > 0 for s in seconds[:2])


REAL_FORECAST = auto.forecast
