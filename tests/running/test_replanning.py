"""`policy=auto` in a run: what it writes, that a resume goes on with the same policies, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataflow.cli import main
from dataflow.config.base import PolicyConfig
from dataflow.errors import RunError
from dataflow.planning import auto as planning
from dataflow.planning.auto import window
from dataflow.policy import PolicySchedule, SchedulingPolicy
from dataflow.running import replanning as auto
from dataflow.running.replanning import limit_in_force, load_schedule, within
from dataflow.timeline import perfetto
from dataflow.timeline.spans import Level, Trace

pytestmark = pytest.mark.timeout(300)

TOY = str(Path(__file__).parents[1] / "faults" / "rig" / "toy_run.py")
STEPS = 24
KEYS = ("policy.order=index", "groups=4", "mini_batches=4", "checkpoint.every=4", "checkpoint.keep_last=9")
REAL_FORECAST = auto.forecast


def policy(split: int, staleness: int) -> SchedulingPolicy:
    return SchedulingPolicy(split, staleness, "index")


def scripted(*wanted: SchedulingPolicy) -> Callable[[tuple[Any, ...]], Any]:
    """Returns forecasts in which each policy in turn is the fastest, then the last one for ever."""
    left = list(wanted)

    async def forecast(question: tuple[Any, ...]) -> list[float | None]:
        found, policies, _limit = question
        assert found.spans
        fastest = left.pop(0) if len(left) > 1 else left[0]
        return [1.0 if policy == fastest else 2.0 for policy in policies]

    return forecast


def begin(directory: Path, *more: str, code: int = 0, name: str = "auto") -> Path:
    keys = [f"policy={name}", *KEYS, *more, f"steps={STEPS}", f"runs={directory}", f"name={name}"]
    assert main(["run", TOY, *keys, "--quiet"]) == code
    return directory / name


@pytest.fixture(autouse=True, scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The toy's steps and rewards take milliseconds, which change from step to step: no plan is made for that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOY_LOGS", str(tmp_path_factory.mktemp("logs")))
        patch.setattr(planning, "latency_changed", lambda *_trace: False)
        patch.setattr(planning, "OFF", 1e9)
        yield


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that changed its policy twice, to read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "forecast", scripted(policy(1, 0), policy(2, 1)))
        return begin(tmp_path_factory.mktemp("changed"))


def of_policies(run: Path) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["staleness/rollout"] <= 1 for row in rows if "staleness/rollout" in row)
    return [(row["policy/split"], row["policy/max_staleness"]) for row in rows if "policy/split" in row]


@pytest.mark.slow
def test_each_change_is_in_the_metrics_the_trace_and_the_file(changed: Path) -> None:
    schedule = load_schedule(changed)
    assert schedule is not None
    (first, begun), (second, most), (third, less), (fourth, more) = schedule.changes
    assert (first, begun, second, most) == (1, policy(1, 0), 2, policy(4, 1))
    assert (less, more) == (policy(1, 0), policy(2, 1))
    expected = [(schedule.at(s).split, schedule.at(s).max_staleness) for s in range(1, STEPS + 1)]
    assert of_policies(changed) == expected
    trace = perfetto.load(str(changed))
    assert [change["step"] for change in trace.meta["policies"]] == [1, 2, third, fourth]
    assert [level.value for level in trace.levels if level.name == "policy split"] == [4.0, 1.0, 2.0]
    summary = json.loads((changed / "summary.json").read_text())
    assert (summary["policy"], summary["split"], summary["max_staleness"]) == ("auto", 2, 1)
    assert "split 2, max staleness 1" in (changed / "timeline.html").read_text()


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_policies_and_ends_with_the_same_weights(
    changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tmp_path / "auto"
    shutil.copytree(changed, again)
    for directory in (again / "checkpoints").glob("step_*"):
        if int(directory.name.removeprefix("step_")) > 8:
            shutil.rmtree(directory)
    (again / "summary.json").unlink()
    monkeypatch.setattr(auto, "forecast", scripted(policy(2, 1)))
    assert main(["resume", str(again), "policy.order=arrival", "resume.allow=[policy]", "--quiet"]) == 2
    assert main(["resume", str(again), "--quiet"]) == 0
    assert of_policies(again) == of_policies(changed)
    one, other = (json.loads((run / "summary.json").read_text()) for run in (changed, again))
    assert one["weights_sha256"] == other["weights_sha256"]


@pytest.mark.slow
def test_changes_of_split_alone_end_with_the_weights_of_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "forecast", scripted(policy(1, 0), policy(2, 0)))
    runs = [begin(tmp_path, "policy.max_staleness=0"), begin(tmp_path, name="baseline")]
    assert {(1.0, 0.0), (4.0, 0.0), (2.0, 0.0)} == set(of_policies(runs[0]))
    one, other = (json.loads((run / "summary.json").read_text())["weights_sha256"] for run in runs)
    assert one == other


def test_a_resume_keeps_the_limits_that_it_is_given() -> None:
    schedule = PolicySchedule(((1, policy(1, 0)),)).switched(5, policy(4, 2)).switched(9, policy(2, 1))
    assert within(schedule, PolicyConfig(preset="auto", max_staleness=2), 7) == schedule
    strict = within(schedule, PolicyConfig(preset="auto", max_staleness=0), 7)
    assert [strict.at(step).max_staleness for step in (4, 5, 6, 7, 9, 12)] == [0, 1, 2, 0, 0, 0]
    assert [strict.at(step).split for step in (6, 7, 9)] == [4, 4, 2]
    streams = within(schedule, PolicyConfig(preset="auto", max_staleness=2, stream_rollout=True), 9)
    assert [streams.at(step).stream_rollout for step in (8, 9)] == [False, True]


def test_the_limit_in_force_is_the_last_or_none() -> None:
    levels = [Level("reward limit", 0.0, 9), Level("reward limit", 1.0, 8), Level("style limit", 1.0, 4)]
    assert limit_in_force(Trace(levels=levels)) == 8
    assert limit_in_force(Trace()) is None


@pytest.mark.slow
def test_a_plan_that_fails_leaves_the_policy_as_it_is_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def fail(question: object) -> None:
        raise RunError("the planning process ended with code 1 (no memory)")

    monkeypatch.setattr(auto, "forecast", fail)
    assert set(of_policies(begin(tmp_path))) == {(1.0, 0.0), (4.0, 1.0)}
    assert capfd.readouterr().err.count("its policy stays: the planning process ended with code 1 (no memory)") == 1


def test_auto_streams_only_what_can_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(tmp_path, "policy.stream_rollout=true", code=2)
    assert "policy.stream_rollout=true: no stage of this pipeline streams; leave it out." in capsys.readouterr().err
    assert not (tmp_path / "auto").exists()


def test_a_broken_file_of_policies_is_named(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text(json.dumps({"policies": [{"step": 1, "split": 0}]}))
    with pytest.raises(RunError, match=r"policy\.json cannot be read"):
        load_schedule(tmp_path)


@pytest.mark.slow
def test_a_plan_is_made_in_a_process_of_its_own(changed: Path) -> None:
    trace = perfetto.load(str(changed))
    trace.meta["job"]["responses"] = 2
    found = window(trace, 2, STEPS)
    seconds = asyncio.run(REAL_FORECAST((found, [policy(1, 0), policy(4, 1), policy(3, 0)], None)))
    assert seconds[2] is None, "3 parts do not divide 4 mini-batches"
    assert all(s is not None and s > 0 for s in seconds[:2])
    del trace.meta["job"]
    with pytest.raises(RunError, match=r"ended with code 1 .*does not say what its pipeline"):
        asyncio.run(REAL_FORECAST((window(trace, 2, STEPS), [policy(1, 0)], None)))
