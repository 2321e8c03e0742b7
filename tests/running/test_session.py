"""Whole runs on Ray with a random tiny model: guarantees of the policies about weights, samples and endings."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dataflow.cli import main
from dataflow.samples.files import file_of, read
from dataflow.timeline import perfetto
from tests.rigs.interrupted import SLOW, interrupt
from tests.timeline.traces.trace_format import check

pytestmark = [pytest.mark.heavy, pytest.mark.draws, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
PIPELINE = str(ROOT / "pipelines" / "gsm8k_grpo.py")
SMALL = (
    "engine.rollout=hf",
    "steps=3",
    "data.prompts=8",
    "engine.n=2",
    "engine.max_tokens=8",
    "data.max_prompt_length=200",
    "data.train_size=200",
)
# A random model is never right: what makes groups differ is the length of what it says.
REWARD = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info, slowest=0.05):
    await asyncio.sleep(slowest * (37 * len(solution_str) % 11) / 10)
    return len(solution_str) / 100
"""


def keys_in(place: Path, model: Path) -> tuple[str, ...]:
    (place / "reward.py").write_text(REWARD)
    reward = f"custom_reward_function.path={place / 'reward.py'}"
    return (*SMALL, f"model.path={model}", reward, f"runs={place / 'runs'}", "data.val_size=8")


@pytest.fixture
def keys(tmp_path: Path, tiny_qwen: Path) -> tuple[str, ...]:
    return keys_in(tmp_path, tiny_qwen)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory, tiny_qwen: Path) -> dict[str, Any]:
    """A run on Ray with two ranks that several tests read."""
    keys = (*keys_in(tmp_path_factory.mktemp("streamed"), tiny_qwen), "trainer.world_size=2", "policy=both+stream")
    return run(keys, "val.every=2", "samples.most=10", "algorithm.use_kl_loss=true")


def run(keys: tuple[str, ...], *more: str, code: int = 0) -> dict[str, Any]:
    """Runs in this process; returns the run's summary."""
    name = f"r{time.monotonic_ns()}"
    assert main(["run", PIPELINE, *keys, *more, f"name={name}", "--quiet"]) == code
    runs = next(Path(k.partition("=")[2]) for k in keys if k.startswith("runs="))
    summary = json.loads((runs / name / "summary.json").read_text())
    return {**summary, "directory": runs / name}


def learned(found: dict[str, Any]) -> str:
    """Returns the hash of a run's weights, which says nothing about a run whose gradients were all zero."""
    rows = [json.loads(line) for line in (found["directory"] / "metrics.jsonl").read_text().splitlines()]
    norms = [row["actor/grad_norm"] for row in rows if "actor/grad_norm" in row]
    assert len(norms) == found["steps"]
    assert min(norms) > 0, norms
    return str(found["weights_sha256"])


def test_mini_batch_by_index_gives_the_weights_of_baseline_bit_for_bit(keys: tuple[str, ...]) -> None:
    keys = (*keys, "executor=inline", "val.every=0", "policy.order=index")
    first = run(keys, "policy=baseline")
    second = run(keys, "policy=mini-batch")
    assert learned(first) == learned(second)
    streamed = run(keys, "policy=mini-batch+stream")
    assert learned(streamed) == learned(first)
    assert streamed["max_staleness"] == 0
    assert first["weights_sha256"] != run(keys, "policy=mini-batch", "seed=1")["weights_sha256"]


def test_a_seed_decides_the_weights_whatever_the_order_of_rewards(keys: tuple[str, ...]) -> None:
    keys = (*keys, "policy=both", "policy.order=index", "val.every=0", "executor=inline")
    fast = run(keys, "custom_reward_function.reward_kwargs={slowest: 0.0}")
    slow = run(keys, "custom_reward_function.reward_kwargs={slowest: 0.5}")
    assert learned(fast) == learned(slow)


def test_staleness_never_exceeds_the_policy_and_files_are_whole(streamed: dict[str, Any]) -> None:
    summary = streamed
    directory = summary["directory"]
    assert {f.name for f in directory.iterdir()} >= {
        "config.yaml", "trace.json", "metrics.jsonl", "tensorboard", "summary.json", "timeline.png", "timeline.html",
    }  # fmt: skip
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    stale = [m["staleness/max"] for m in metrics if "staleness/max" in m]
    assert len(stale) == 3
    assert max(stale) == 1
    named = set().union(*metrics)
    assert {"actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean", "timing_s/gen"} <= named
    assert {
        "timing_s/step",
        "response_length/mean",
        "overlap/exposed_wait_s",
        "overlap/gpu_busy_frac",
        "perf/throughput",
        "timing_per_token_ms/gen",
    } <= named
    assert {"reward/latency_p95", "val-core/dataflow/problems/reward/mean@1"} <= named
    trace = perfetto.read(directory / "trace.json")
    updates = [s for s in trace.spans if s.stage == "actor_update"]
    assert len(updates) == 3 * 4
    rollouts = {s.step: s.args["weights_version"] for s in trace.spans if s.stage == "rollout"}
    assert rollouts == {1: 0, 2: 0, 3: 1}
    # 3 steps of 16 samples, and validations before, at step 2 and at the end.
    assert summary["rewards"]["requested"] == summary["rewards"]["scored"] == 3 * 16 + 3 * 8
    assert list(summary["evaluations"]) == ["0", "2", "3"]
    assert summary["score_after"] == summary["evaluations"]["3"]
    assert summary["score_mean_last_3"] is None, "there were but two"
    assert summary["total_s"] > summary["wall_s"] + summary["after_training_s"]
    assert sum(m.get("reward/requested", 0) for m in metrics) == 3 * 16


@pytest.mark.parametrize("executor", ["inline", "ray"])
def test_samples_say_what_the_model_said(
    request: pytest.FixtureRequest, keys: tuple[str, ...], executor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if executor == "ray":
        summary = request.getfixturevalue("streamed")
    else:
        summary = run(keys, "policy=both+stream", "val.every=2", "executor=inline", "samples.most=10")
    directory = summary["directory"]
    names = {f.name for f in (directory / "samples").iterdir()}
    steps, evaluations = (1, 2, 3), (0, 2, 3)
    assert names == {f"step_{s:06d}.parquet" for s in steps} | {f"val_{s:06d}.parquet" for s in evaluations}
    trace = perfetto.read(directory / "trace.json")
    asked = [m for m in trace.marks if "group" in m.args and not m.args.get("validation")]
    marks = {(m.args["step"], m.args["group"], m.args["sample"]): m for m in asked}
    for step in steps:
        rows = read(file_of(directory / "samples", "step", step))
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
    page = (directory / "samples.html").read_text()
    assert page.count('id="step-') == 3 * 5
    links = re.findall(r'href="samples\.html#step-\d+-group-(\d+)"', (directory / "timeline.html").read_text())
    assert {int(group) for group in links} <= set(range(8))
    capsys.readouterr()
    assert main(["samples", str(directory), "sort=-score", "most=1"]) == 0
    assert capsys.readouterr().out.startswith("step 3: 10 samples in 5 groups")


def test_any_policy_of_two_integers(keys: tuple[str, ...]) -> None:
    summary = run(keys, "policy.split=2", "policy.max_staleness=2", "val.every=0", "executor=inline")
    assert (summary["split"], summary["max_staleness"], summary["status"]) == (2, 2, "finished")
    assert summary["policy"] == "split=2 staleness=2"


def test_real_gsm8k_in_verls_schema(keys: tuple[str, ...], tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {i} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(12)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    problem = {"question": "What is 3 + 4?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
    (tmp_path / "val.jsonl").write_text("\n".join(json.dumps(problem) for _ in range(3)))
    files = (f"data.train={tmp_path / 'train.parquet'}", f"data.val={tmp_path / 'val.jsonl'}")
    summary = run(keys, *files, "executor=inline", "val.every=2")
    metrics = (summary["directory"] / "metrics.jsonl").read_text()
    assert "val-core/openai/gsm8k/reward/mean@1" in metrics


def test_what_was_paid_before_an_interrupt_and_after_the_resume_is_in_the_summary(
    keys: tuple[str, ...], tmp_path: Path
) -> None:
    paid, stop = tmp_path / "paid", tmp_path / "stop"
    (tmp_path / "reward.py").write_text(
        "import os, pathlib, signal\n"
        f"paid, stop = pathlib.Path('{paid}'), pathlib.Path('{stop}')\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    with paid.open('a') as file: file.write('.')\n"
        "    if paid.stat().st_size == 2 * 16 + 12 and not stop.exists():\n"
        "        stop.touch()\n"
        f"        os.kill({os.getpid()}, signal.SIGINT)\n"
        "    return {'score': len(solution_str) / 100, 'tokens': 10}\n"
    )
    keys = (*keys, "val.every=0", "checkpoint.every=1", "checkpoint.on_interrupt=false", "policy=baseline")
    first = run(keys, "executor=inline", code=130)
    assert first["steps"] == 2
    assert first["rewards"]["tokens"] >= 10 * (2 * 16 + 11)
    assert main(["resume", str(first["directory"]), "--quiet"]) == 0
    last = json.loads((first["directory"] / "summary.json").read_text())
    assert last["rewards"]["tokens"] == 10 * paid.stat().st_size
    assert paid.stat().st_size < 5 * 16, "the ledger has the answers of the step that was interrupted"


def test_a_reward_function_that_raises_ends_the_run_and_names_the_sample(
    keys: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward.py").write_text(
        "calls = 0\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == 20: raise ValueError('the judge is on holiday')\n"
        "    return 0.5\n"
    )
    summary = run(keys, "val.every=0", "executor=inline", code=1)
    assert summary["status"] == "failed"
    assert summary["step_s"] * summary["steps"] <= summary["wall_s"]
    counts = summary["rewards"]
    assert counts["requested"] == counts["scored"] + counts["failed"] + counts["cancelled"] >= 2 * 16
    assert counts["failed"] == 1
    err = capsys.readouterr().err
    assert "StageFailed: reward_collect[step 2" in err
    (last,) = [line for line in err.splitlines() if line.startswith("stopped after ")]
    assert str(summary["directory"]) in last
    assert "group" in err
    assert "sample" in err
    assert "the judge is on holiday" in err
    assert perfetto.read(summary["directory"] / "trace.json").spans
    check(json.loads((summary["directory"] / "trace.json").read_text()))


def test_a_signal_stops_within_five_seconds_and_leaves_no_process(keys: tuple[str, ...], tmp_path: Path) -> None:
    without = [k for k in keys if not k.startswith(("custom_reward", "steps", "val.every"))]
    command = [sys.executable, "-m", "dataflow", "run", PIPELINE, *without, *SLOW, "name=cut", "executor=inline"]
    # Inline there is the judge; tests/system/test_children.py interrupts a run on Ray.
    interrupt(command, signal.SIGTERM, tmp_path / "runs" / "cut", children=1)


def test_a_run_that_is_killed_leaves_a_trace_up_to_its_end(
    keys: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = ["executor=inline", "steps=500", "name=killed", "val.every=0"]
    command = [sys.executable, "-m", "dataflow", "run", PIPELINE, *[k for k in keys if k[:5] != "steps"], *long]
    begin = time.time()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 2/"):
                break
        at = time.time()
        os.killpg(process.pid, signal.SIGKILL)
        process.stderr.read()
    finally:
        process.kill()
        process.wait()
    directory = tmp_path / "runs" / "killed"
    trace = perfetto.read(directory / "trace.json")
    assert {s.step for s in trace.spans} >= {1, 2}
    assert [m for m in trace.marks if m.args["step"] == 2]
    assert trace.meta["status"] == "cut off"
    # Second 0 is unix time: what was recorded last ended just before the kill.
    assert begin < trace.meta["started"] < at
    assert abs(trace.meta["started"] + max(s.end for s in trace.spans) - at) < 5
    assert main(["timeline", str(directory)]) == 0
    shown = capsys.readouterr()
    assert "(cut off)" in shown.out
    assert f"note: {directory} is cut off after" in shown.err


def test_a_name_that_is_taken_is_refused_and_the_run_kept(
    keys: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "runs" / "mine"
    taken.mkdir(parents=True)
    (taken / "summary.json").write_text("{}")
    assert main(["run", PIPELINE, *keys, "name=mine"]) == 2
    assert "choose another name" in capsys.readouterr().err
    assert (taken / "summary.json").read_text() == "{}"
