"""A run on Ray with two ranks, two reward agents of which one dies, and a streaming rollout; and its files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.samples.files import file_of, read
from dataflow.timeline import perfetto
from dataflow.timeline.agents import agents_of
from tests.timeline.traces.trace_format import check

pytestmark = [pytest.mark.heavy, pytest.mark.draws, pytest.mark.timeout(240)]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "two_judges.py")
STEPS, SAMPLES = 3, 4 * 2
KEYS = (
    "engine.rollout=hf", "executor=ray", f"steps={STEPS}", "data.prompts=4", "engine.n=2", "engine.max_tokens=8",
    "data.max_prompt_length=200", "data.train_size=200", "trainer.mini_batches=2", "trainer.world_size=2",
    "policy=both+stream", "val.every=0", "checkpoint.every=0", "checkpoint.export=false", "samples.every=1",
    "samples.most=4", "judge.latency=0.2", "judge.time_scale=1", "name=a", "--quiet",
)  # fmt: skip
# The first process of the agent ends as one does that the kernel kills.
DEADLY = """
import os, signal

async def compute_score(data_source, solution_str, ground_truth, extra_info, first):
    try:
        os.close(os.open(first, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return 1.0
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_qwen: Path) -> Path:
    """The directory of the run."""
    place = tmp_path_factory.mktemp("run")
    (place / "deadly.py").write_text(DEADLY)
    deadly = "rule.custom_reward_function"
    rule = (f"{deadly}.path={place / 'deadly.py'}", f"{deadly}.reward_kwargs={{first: {place / 'first'}}}")
    assert main(["run", PIPELINE, *KEYS, *rule, f"model.path={tiny_qwen}", f"runs={place / 'runs'}"]) == 0
    assert (place / "first").exists(), "the agent died"
    return place / "runs" / "a"


def test_the_death_of_one_agent_costs_no_reward_and_leaves_the_other_alone(run: Path) -> None:
    agents = json.loads((run / "summary.json").read_text())["rewards"]["agents"]
    for name in ("reward", "rule"):
        counts = agents[name]
        assert (counts["requested"], counts["scored"], counts["failed"]) == (STEPS * SAMPLES, STEPS * SAMPLES, 0), name
        assert counts["cancelled"] == 0, name
    assert agents["reward"]["cached"] == 0


def test_staleness_never_exceeds_the_policy_and_files_are_whole(run: Path) -> None:
    assert {f.name for f in run.iterdir()} >= {
        "config.yaml", "trace.json", "metrics.jsonl", "tensorboard", "summary.json", "timeline.png", "timeline.html",
        "rewards.sqlite", "rewards_rule.sqlite",
    }  # fmt: skip
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["staleness/max"] for m in metrics if "staleness/max" in m] == [0, 1, 1]
    assert {
        *("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "timing_s/gen", "timing_s/step", "perf/throughput"),
        *("response_length/mean", "overlap/exposed_wait_s", "overlap/gpu_busy_frac", "timing_per_token_ms/gen"),
    } <= set().union(*metrics)
    trace = perfetto.read(run / "trace.json")
    check(json.loads((run / "trace.json").read_text()))
    assert agents_of(trace) == ["reward", "rule"]
    assert sum(s.stage == "actor_update" for s in trace.spans) == STEPS * 2
    rollouts = {s.step: s.args["weights_version"] for s in trace.spans if s.stage == "rollout"}
    assert rollouts == {1: 0, 2: 0, 3: 1}


def test_samples_and_their_page_say_what_the_model_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = perfetto.read(run / "trace.json")
    asked = [m for m in trace.marks if m.resource == "reward" and "group" in m.args]
    marks = {(m.args["step"], m.args["group"], m.args["sample"]): m for m in asked}
    for step in range(1, STEPS + 1):
        rows = read(file_of(run / "samples", "step", step))
        assert [(row["group"], row["sample"]) for row in rows] == [(g, i) for g in range(2) for i in range(2)]
        for row in rows:
            assert (row["weights_version"], row["rule_score"]) == (max(0, step - 2), 1.0)
            assert 0 < row["length_penalty"] <= 1
            parts = 0.5 * row["judge_score"] + 0.5 * row["rule_score"] - 0.05 * row["length_penalty"]
            assert row["score"] == pytest.approx(parts, abs=1e-6)
            mark = marks[step, row["group"], row["sample"]]
            assert row["latency_s"] == pytest.approx(mark.end - mark.begin, abs=1e-5)
            assert row["latency_s"] >= 0.19, "of the judge, though the rule came first"
    page = re.search(r'id="samples">(.*?)</script>', (run / "samples.html").read_text())
    assert page is not None
    told = json.loads(page[1])
    at = [told["columns"].index(name) for name in ("step", "group")]
    assert len({tuple(row[i] for i in at) for row in told["rows"]}) == STEPS * 2
    links = re.findall(r'href="samples\.html#step-\d+-group-(\d+)"', (run / "timeline.html").read_text())
    assert {int(group) for group in links} <= set(range(4))
    capsys.readouterr()
    assert main(["samples", str(run), "sort=-score", "most=1"]) == 0
    assert capsys.readouterr().out.startswith("step 3: 4 samples in 2 groups")
