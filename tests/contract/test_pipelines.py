"""A pipeline of one's own: stages, services and calls by the names of ``import dataflow``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import dataflow
from dataflow import Batch, Carried, Hosted, Latest, Pipeline, expand, preset, simulate, stage
from tests.contract.rig import ROOT, Command, Record, command, until

pytestmark = pytest.mark.timeout(120)

MINE = """
import os, time
from pathlib import Path
from dataflow import Hosted, Latest, Pipeline, stage

HOLD = Path(__file__).with_name("hold")

class Model:
    weight = 0.0

@stage(writes="drawn", on="gpu", role="samples")
def draw(prompts, mean: Latest, *, task):
    while HOLD.exists():
        time.sleep(0.05)
    task.log({"drawn_in": os.getpid()})
    return [prompt + (mean or 0.0) for prompt in prompts]

@stage(writes="mean", on="gpu", role="trains")
def train(drawn, mean: Latest, *, model, task, rate=0.5):
    if task.step == 3 and rate > 1:
        raise ValueError("the rate is too high")
    model.weight = (mean or 0.0) + rate * (sum(drawn) / len(drawn) - (mean or 0.0))
    task.log({"mean": model.weight, "trained_in": os.getpid()})
    return model.weight

def pipeline(config):
    return Pipeline([draw, train.bind(model=Hosted("model", Model), rate=RATE)], inputs=["prompts"])

def inputs(config):
    return {"prompts": lambda step: [step, step + 1]}
"""


def mine(folder: Path, rate: float = 0.5) -> Path:
    """Writes a pipeline file whose third step fails if the rate is above 1."""
    file = folder / "mine.py"
    file.write_text(MINE.replace("RATE", str(rate)))
    return file


@stage(writes="responses", on="gpu", role="samples")
def rollout(prompts, version: Carried): ...


@stage(writes="rewards", on="reward", role="collects")
async def reward(responses): ...


@stage(writes="actor", on="gpu", role="trains", per_mini_batch=True)
def update(responses, rewards, actor: Latest): ...


@stage(writes="version", on="gpu", role="syncs")
def sync(actor): ...


GRPO = (rollout, reward, update, sync)


def test_the_twenty_lines_of_the_readme_are_a_pipeline() -> None:
    """The first thing that a reader copies would not work."""
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    names: dict[str, Any] = dict.fromkeys(("MyTrainer", "MyEngine", "MyAgent"), object)
    exec(block, names)
    trace = simulate(names["graph"], dict.fromkeys(("rollout", "reward", "log_probs", "update", "sync"), 1.0))
    updates = [span for span in trace.spans if span.stage == "update"]
    assert len(updates) == 100 * 4
    assert trace.wall < 100 * 5


def test_simulate_gives_the_time_of_each_policy() -> None:
    """Nobody could tell what a policy brings before renting a GPU; the seconds are worked out by hand."""
    costs = {"rollout": 10, "reward": 20, "update": 8, "sync": 1}
    for policy, seconds in {"baseline": 390, "mini-batch": 350, "off-policy": 214, "both": 203}.items():
        graph = expand(Pipeline(GRPO, inputs=["prompts"]), preset(policy, 2), steps=10, mini_batches=2, groups=4)
        assert simulate(graph, costs).wall == pytest.approx(seconds), policy


def test_plan_predicts_each_policy_from_costs() -> None:
    """The way from seconds that were measured elsewhere to a decision would be closed to a script."""
    rows = {row.policy: row.step_s for row in dataflow.plan(ROOT / "examples" / "costs.yaml", steps=3).rows}
    assert list(rows)[:4] == ["baseline", "mini-batch", "off-policy", "both"]
    assert rows["both"] < min(rows["mini-batch"], rows["off-policy"]) < rows["baseline"]
    fast = dataflow.plan(ROOT / "examples" / "costs.yaml", steps=3, reward={"concurrency": 4096}).rows
    assert min(row.step_s for row in fast) < rows["both"]


def test_import_needs_no_heavy_package() -> None:
    """Planner, timeline and every command would take seconds to start, and not work where training is not installed."""
    code = "import sys, dataflow; print(*{'torch', 'ray', 'verl', 'vllm', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout.split()) == (0, []), found.stderr


def renamed(**fields: str) -> Pipeline:
    return Pipeline([rollout, reward.bind(renamed=fields), update, sync], inputs=["prompts"])


@stage(writes="left", on="gpu")
def left(right): ...


@stage(writes="right", on="gpu")
def right(left): ...


MISTAKES = {
    "a field that nobody writes": (lambda: renamed(rewards="reward"), ["update", "'rewards'", "'reward'"]),
    "two writers": (lambda: Pipeline([*GRPO, sync.bind(name="other")], inputs=["prompts"]), ["'version'", "'other'"]),
    "a circle": (lambda: Pipeline([left, right]), ["left", "right"]),
    "no such resource": (lambda: Pipeline([left.bind(on="gpus")], inputs=["right"]), ["'gpus'", "gpu"]),
    "a split that does not divide": (
        lambda: expand(
            Pipeline(GRPO, inputs=["prompts"]), dataflow.SchedulingPolicy(split=3), steps=2, mini_batches=4, groups=4
        ),
        ["3", "4"],
    ),
    "too stale": (lambda: dataflow.SchedulingPolicy(max_staleness=5), ["5", "4"]),
    "no such policy": (lambda: preset("bothh", 4), ["bothh", "both"]),
}


def test_a_mistake_is_an_error_before_anything_runs() -> None:
    """A wrong graph would fail in the middle of a run, or train on something else."""
    for mistake, (make, words) in MISTAKES.items():
        with pytest.raises(dataflow.DataflowError) as error:
            make()
        assert "\n" not in str(error.value), mistake
        assert all(word in str(error.value) for word in words), f"{mistake}: {error.value}"


def test_latest_is_of_the_step_before_and_carried_of_staleness_more(tmp_path: Path) -> None:
    """A stage would read a value of another step than it declares."""
    seen: list[tuple[str, int, Any]] = []

    @stage(writes="drawn", on="gpu", role="samples")
    def draw(prompts, mean: Carried, *, task):
        seen.append(("carried", task.step, mean))

    @stage(writes="mean", on="gpu", role="trains")
    def train(drawn, mean: Latest, absent=None, *, task):
        seen.append(("latest", task.step, mean))
        assert absent is None
        return task.step

    @stage(on="io")
    def look(prompts, mean: Latest, *, task):
        seen.append(("beside", task.step, mean))

    pipeline = Pipeline([draw, train, look], inputs=["prompts"])
    for staleness in (0, 2):
        dataflow.run(
            pipeline,
            "policy=baseline",
            f"policy.max_staleness={staleness}",
            inputs={"prompts": lambda step: step},
            steps=5,
            runs=str(tmp_path / str(staleness)),
        )
        read = {(kind, step): value for kind, step, value in seen}
        for kind in ("latest", "beside"):
            assert [read[kind, step] for step in range(1, 6)] == [None, 1, 2, 3, 4]
        older = [max(step - 1 - staleness, 0) or None for step in range(1, 6)]
        assert [read["carried", step] for step in range(1, 6)] == older


def test_a_service_is_built_once_and_bound_where_it_is_needed(tmp_path: Path) -> None:
    """A model or an engine would be loaded for each task, or the wrong one be used."""
    built: list[int] = []

    class Counter:
        def __init__(self, first: int) -> None:
            built.append(first)
            self.value = first

    @stage(writes="counted", on="gpu", role="samples")
    def count(prompts, trained: Carried, *, counter, by=1):
        counter.value += by

    @stage(writes="trained", on="gpu", role="trains")
    def train(counted, other, *, counter, task):
        task.log({"value": counter.value})

    one, two = Hosted("one", Counter, {"first": 10}), Hosted("two", Counter, {"first": 100})
    stages = [
        count.bind(counter=one, by=5),
        count.bind(name="again", renamed={"counted": "other"}, counter=two),
        train.bind(counter=one),
    ]
    done = dataflow.run(
        Pipeline(stages, inputs=["prompts"]),
        "policy=baseline",
        inputs={"prompts": lambda step: step},
        steps=3,
        runs=str(tmp_path),
    )
    assert sorted(built) == [10, 100]
    assert [row["value"] for row in done.metrics if "value" in row] == [15, 20, 25]


def test_a_run_gives_its_summary_metrics_and_trace(tmp_path: Path) -> None:
    """A notebook could not look at what it ran; a saved trace would not be the one that was loaded."""
    done = dataflow.run(str(mine(tmp_path)), steps=3, runs=str(tmp_path / "runs"))
    assert (done.summary["status"], done.summary["steps"]) == ("finished", 3)
    assert [row["mean"] for row in done.metrics if "mean" in row] == [0.75, 2.0, 3.75]
    saved = done.trace.save(tmp_path / "copy.json")
    assert [span.task for span in dataflow.Trace.load(saved).spans] == [span.task for span in done.trace.spans]
    assert "<html" in done.trace.save(tmp_path / "page.html").read_text().lower()
    assert "gpu" in done.trace.save(tmp_path / "chart.txt").read_text()


def test_a_batch_keeps_the_rows_of_a_group_together() -> None:
    """A stage of one's own would score or train on rows of other samples."""
    batch = Batch([3, 3, 1, 1], {"number": [1, 2, 3, 4]})
    chosen = batch.select([1])
    assert (list(chosen.ids), list(chosen["number"])) == ([1], [3, 4])
    assert list(chosen.like(score=[0.5, 1.0])["score"]) == [0.5, 1.0]


@pytest.mark.slow
def test_the_command_runs_a_file_and_leaves_its_record(tmp_path: Path) -> None:
    """The first command of the documentation would not work, or leave nothing to look at."""
    done = command("run", mine(tmp_path), "steps=3", "name=a", cwd=tmp_path)
    assert done.code == 0, done.err
    record = Record(tmp_path / "runs" / "a")
    assert record.summary["status"] == "finished"
    assert {"config.yaml", "trace.json", "metrics.jsonl", "summary.json", "timeline.html"} <= {
        file.name for file in record.directory.iterdir()
    }
    assert [(t.stage, t.step) for t in record.tasks] == [(s, n) for n in (1, 2, 3) for s in ("draw", "train")]
    assert json.loads((record.directory / "trace.json").read_text()), "one JSON document, as Perfetto reads it"
    shown = command("show", mine(tmp_path), cwd=tmp_path)
    assert shown.code == 0
    assert re.search(r"reads\s+mean from train \(of the step before\)", shown.out), shown.out


@pytest.mark.slow
def test_wrong_input_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    """A typing error would start a run, or end in a stack of calls."""
    done = command("run", mine(tmp_path), "stesp=3", "name=a", cwd=tmp_path)
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert "stesp" in done.err
    assert "'steps'" in done.err
    assert not (tmp_path / "runs" / "a").exists()


@pytest.mark.slow
def test_a_stage_that_raises_ends_the_run_with_its_name_and_its_record(tmp_path: Path) -> None:
    """A failed run would hang, be taken for a finished one, or lose what it had recorded."""
    done = command("run", mine(tmp_path, rate=2.0), "steps=5", "name=a", cwd=tmp_path)
    assert done.code == 1
    assert "train[step 3]" in done.err
    assert "the rate is too high" in done.err
    record = Record(tmp_path / "runs" / "a")
    assert (record.summary["status"], record.meta["status"]) == ("failed", "failed")
    assert record.has("train", 2)
    assert sorted(record.metrics) == [1, 2]


@pytest.mark.heavy
def test_on_ray_a_service_has_a_process_of_its_own_and_none_is_left(tmp_path: Path) -> None:
    """What runs in one process would not run on a cluster; and a finished run would leave processes behind."""
    (tmp_path / "hold").touch()
    running = Command("run", mine(tmp_path), "steps=3", "name=a", "executor=ray", "ray.num_cpus=2", cwd=tmp_path)
    record = Record(tmp_path / "runs" / "a")
    until(lambda: record.directory.exists() and len(running.processes()) > 4, "the run's processes")
    started = running.processes()
    (tmp_path / "hold").unlink()
    done = running.done()
    assert done.code == 0, done.err
    assert [record.metrics[step]["mean"] for step in (1, 2, 3)] == [0.75, 2.0, 3.75]
    assert record.metrics[1]["drawn_in"] != record.metrics[1]["trained_in"]
    _ended, left = psutil.wait_procs(started, timeout=30)
    assert not left
