"""The plan as a user sees it: table, JSON, advice, command line."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.policy import preset
from dataflow.timeline import perfetto
from tests.rigs.simulated import job, run


@pytest.mark.slow
def test_the_json_matches_the_documentation(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", costs, "--json", "sweep=mini_batches:1:4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"source", "steps", "assumptions", "policies", "advice", "sweeps"}
    assert [row["policy"] for row in found["policies"]] == [
        "baseline",
        "mini-batch",
        "off-policy",
        "both",
        "both+stream",
    ]
    for row in found["policies"]:
        assert set(row) == {
            "policy", "step_s", "total_s", "change", "gpu_idle", "exposed_wait_s", "exposed_wait_by_cause",
            "lower_bound_s", "bound_by", "bounds_s",
        }  # fmt: skip
        assert row["total_s"] == pytest.approx(6 * row["step_s"])
        assert row["exposed_wait_s"] == pytest.approx(sum(row["exposed_wait_by_cause"].values()))
        assert row["gpu_idle"] == pytest.approx(row["exposed_wait_s"] / row["step_s"])
    assert found["sweeps"][0]["values"] == [1, 2, 4]
    assert len(found["sweeps"][0]["policies"]) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reward.concurrency=0"], "reward.concurrency=0: Input should be greater than 0"),
        (["policy=bothe"], "unknown policy 'bothe'; did you mean 'both'?"),
        (["policy="], "policy=: the name is missing"),
        (["policy.split=3"], "policy.split=3 does not divide mini_batches=4"),
        (["sweep=reward.concurency:1:4"], "did you mean 'reward.concurrency'?"),
        (["-o", "plan.pdf"], "no such kind, '.pdf'; give a name in .html, .png, .svg"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    costs: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", costs, *arguments]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert "\n" not in err


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "train.log"
    timings = "timing_s/gen:20.0 - timing_s/old_log_prob:5.0 - timing_s/adv:30.0 - timing_s/update_actor:6.0"
    path.write_text("".join(f"step:{step} - {timings} - timing_s/step:61.0\n" for step in (1, 2, 3)))
    return str(path)


@pytest.mark.slow
def test_a_loop_that_waits_for_its_rewards_first_is_replayed_like_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = "gen:10 - timing_s/reward:30 - timing_s/old_log_prob:5 - timing_s/ref:4 - timing_s/adv:0.1"
    line = f"timing_s/{times} - timing_s/update_actor:10 - timing_s/step:59.1"
    (tmp_path / "verl.log").write_text("".join(f"step:{step} - {line}\n" for step in range(1, 5)))
    keys = ["prompts=8", "responses=2", "mini_batches=2", "log.concurrency=4", "log.latency=7"]
    assert main(["plan", str(tmp_path / "verl.log"), *keys]) == 0
    out = capsys.readouterr().out
    found = re.search(r"^as logged: predicted ([\d.]+) s a step, logged 59.1 s", out, re.MULTILINE)
    assert found is not None
    assert float(found[1]) == pytest.approx(59.1, rel=0.02)


@pytest.mark.slow
def test_a_run_that_changed_its_policy_is_not_replayed_and_says_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = run(job())
    policies = [{"step": at, **asdict(preset(name, 4))} for at, name in ((1, "baseline"), (5, "both"))]
    trace.meta |= {"policy": "auto", "policies": policies}
    perfetto.write(trace, tmp_path / "trace.json")
    assert main(["plan", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "not replayed: its policy changed during the run" in out


@pytest.mark.slow
def test_the_page_says_what_the_text_says(log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    keys = ["prompts=8", "responses=2", "mini_batches=2", "log.concurrency=4", "log.latency=30"]
    assert main(["plan", log, *keys, "sweep=mini_batches:1:2", "-o", str(page)]) == 0
    out = capsys.readouterr().out
    text, _, said = out.rpartition("\n\n")
    assert said == f"page: {page}\n"
    assert text in html.unescape(page.read_text())
    assert out.index("\nas logged: predicted") < out.index("\npolicy ") < out.index("\nas logged  ")
    assert out.index("\nas logged  ") < out.index("\nbaseline  ")
    assert "logged 61 s, " in out
    assert "seconds a step over mini_batches" in out
