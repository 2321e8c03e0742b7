"""A whole run on Ray with a random tiny model: its files, and what a failure leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dataflow.cli import main
from dataflow.errors import StageFailed
from dataflow.running.session import Session
from dataflow.samples.files import file_of, read
from dataflow.timeline import perfetto
from tests.timeline.traces.trace_format import check

pytestmark = [pytest.mark.heavy, pytest.mark.draws, pytest.mark.timeout(240)]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "gsm8k_grpo.py")
SMALL = (
    "engine.rollout=hf", "steps=3", "data.prompts=8", "engine.n=2", "engine.max_tokens=8", "data.max_prompt_length=200",
    "data.train_size=200", "data.val_size=8",
)  # fmt: skip
# A random model is never right: what makes groups differ is the length of what it says.
REWARD = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.05 * (37 * len(solution_str) % 11) / 10)
    return len(solution_str) / 100
"""


def keys_in(place: Path, model: Path) -> tuple[str, ...]:
    (place / "reward.py").write_text(REWARD)
    reward = f"custom_reward_function.path={place / 'reward.py'}"
    return (*SMALL, f"model.path={model}", reward, f"runs={place / 'runs'}", "name=a", "--quiet")


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory, tiny_qwen: Path) -> Path:
    """The directory of a run on Ray with two ranks."""
    place = tmp_path_factory.mktemp("streamed")
    own = ("trainer.world_size=2", "policy=both+stream", "val.every=2", "samples.most=10", "algorithm.use_kl_loss=true")
    assert main(["run", PIPELINE, *keys_in(place, tiny_qwen), *own]) == 0
    return place / "runs" / "a"


def test_staleness_never_exceeds_the_policy_and_files_are_whole(streamed: Path) -> None:
    assert {f.name for f in streamed.iterdir()} >= {
        "config.yaml", "trace.json", "metrics.jsonl", "tensorboard", "summary.json", "timeline.png", "timeline.html",
    }  # fmt: skip
    summary = json.loads((streamed / "summary.json").read_text())
    metrics = [json.loads(line) for line in (streamed / "metrics.jsonl").read_text().splitlines()]
    assert [m["staleness/max"] for m in metrics if "staleness/max" in m] == [0, 1, 1]
    assert {
        *("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean", "timing_s/gen", "timing_s/step"),
        *("response_length/mean", "overlap/exposed_wait_s", "overlap/gpu_busy_frac", "perf/throughput"),
        *("timing_per_token_ms/gen", "reward/latency_p95", "val-core/dataflow/problems/reward/mean@1"),
    } <= set().union(*metrics)
    trace = perfetto.read(streamed / "trace.json")
    check(json.loads((streamed / "trace.json").read_text()))
    assert sum(s.stage == "actor_update" for s in trace.spans) == 3 * 4
    rollouts = {s.step: s.args["weights_version"] for s in trace.spans if s.stage == "rollout"}
    assert rollouts == {1: 0, 2: 0, 3: 1}
    # 3 steps of 16 samples, and validations before, at step 2 and at the end.
    assert summary["rewards"]["requested"] == summary["rewards"]["scored"] == 3 * 16 + 3 * 8
    assert sum(m.get("reward/requested", 0) for m in metrics) == 3 * 16
    assert list(summary["evaluations"]) == ["0", "2", "3"]
    assert summary["score_after"] == summary["evaluations"]["3"]
    assert summary["score_mean_last_3"] is None, "there were but two"
    assert summary["total_s"] > summary["wall_s"] + summary["after_training_s"]


def test_samples_say_what_the_model_said(streamed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {f.name for f in (streamed / "samples").iterdir()}
    steps, evaluations = (1, 2, 3), (0, 2, 3)
    assert names == {f"step_{s:06d}.parquet" for s in steps} | {f"val_{s:06d}.parquet" for s in evaluations}
    trace = perfetto.read(streamed / "trace.json")
    asked = [m for m in trace.marks if "group" in m.args and not m.args.get("validation")]
    marks = {(m.args["step"], m.args["group"], m.args["sample"]): m for m in asked}
    for step in steps:
        rows = read(file_of(streamed / "samples", "step", step))
        assert [(row["group"], row["sample"]) for row in rows] == [(g, i) for g in range(5) for i in range(2)]
        assert {row["weights_version"] for row in rows} == {max(0, step - 2)}
        for row in rows:
            assert row["score"] == pytest.approx(len(row["response"]) / 100)
            assert row["prompt"]
            mark = marks[step, row["group"], row["sample"]]
            assert row["latency_s"] == pytest.approx(mark.end - mark.begin, abs=1e-5)
        for first, second in zip(rows[::2], rows[1::2], strict=True):
            higher = first["score"] > second["score"]
            assert (first["advantage"] > second["advantage"]) is higher
    (span,) = (s for s in trace.spans if s.stage == "write_samples" and s.step == 3)
    assert (span.args["written"], span.args["left_out"], span.args["optional"]) == (10, 6, True)
    page = re.search(r'id="samples">(.*?)</script>', (streamed / "samples.html").read_text())
    assert page is not None
    told = json.loads(page[1])
    at = [told["columns"].index(name) for name in ("step", "group")]
    assert len({tuple(row[i] for i in at) for row in told["rows"]}) == 3 * 5
    links = re.findall(r'href="samples\.html#step-\d+-group-(\d+)"', (streamed / "timeline.html").read_text())
    assert {int(group) for group in links} <= set(range(8))
    capsys.readouterr()
    assert main(["samples", str(streamed), "sort=-score", "most=1"]) == 0
    assert capsys.readouterr().out.startswith("step 3: 10 samples in 5 groups")


def test_the_traceback_of_another_process_is_in_a_file_that_the_error_names(tmp_path: Path) -> None:
    session: Any = Session.__new__(Session)
    session.directory, error = tmp_path, StageFailed("reward_collect[step 2] failed")
    session._keep_traceback(error)
    assert not hasattr(error, "__notes__")
    error.__cause__ = ValueError("the judge is on holiday")
    error.__cause__.add_note("Traceback (most recent call last): ...")
    session._keep_traceback(error)
    assert error.__notes__ == [f"its traceback is in {tmp_path / 'error.log'}"]
    assert (tmp_path / "error.log").read_text() == "Traceback (most recent call last): ...\n"
    assert not error.__cause__.__notes__
