"""A run that ends early resumes from its last checkpoint, as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dataflow.cli import main
from dataflow.running.directory import locked
from dataflow.timeline import perfetto
from tests.timeline.traces.trace_format import check

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "gsm8k_grpo.py")
STEPS = 6
SMALL = (
    "engine.rollout=hf",
    "executor=inline",
    "data.prompts=8",
    "engine.n=2",
    "engine.max_tokens=8",
    "data.max_prompt_length=200",
    "data.train_size=200",
    "data.val_size=8",
    "policy.order=index",
    "checkpoint.every=2",
    "reward.tries=1",
    "reward.share_equal=false",
)
# It logs each request and each answer, and raises after as many requests as the file says.
REWARD = """
import asyncio, json
from pathlib import Path

HERE = Path(__file__).parent

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    left, request = HERE / "left.txt", json.dumps([solution_str, ground_truth, extra_info.get("index")]) + "\\n"
    with (HERE / "asked.jsonl").open("a") as log:
        log.write(request)
    if left.exists() and len((HERE / "asked.jsonl").read_text().splitlines()) > int(left.read_text()):
        for _moment in range(1200):  # until there is a checkpoint, however slow the disk
            if list(HERE.glob("runs/stopped/checkpoints/step_*")) or (HERE / "at_once.txt").exists():
                break
            await asyncio.sleep(0.05)
        while len((HERE / "answered.jsonl").read_text().splitlines()) < int(left.read_text()) - 2:
            await asyncio.sleep(0.01)  # the others, as those in flight are cancelled
        raise RuntimeError("the judge is out of order")
    await asyncio.sleep(0.005)
    with (HERE / "answered.jsonl").open("a") as log:
        log.write(request)
    return len(solution_str) / 100
"""


@pytest.fixture
def keys(tmp_path: Path, tiny_qwen: Path) -> tuple[str, ...]:
    (tmp_path / "reward.py").write_text(REWARD)
    reward = f"custom_reward_function.path={tmp_path / 'reward.py'}"
    return (*SMALL, f"model.path={tiny_qwen}", reward, f"runs={tmp_path / 'runs'}")


def begin(keys: tuple[str, ...], name: str, *more: str, steps: int = STEPS, code: int = 0) -> None:
    assert main(["run", PIPELINE, *keys, *more, f"steps={steps}", f"name={name}", "--quiet"]) == code


def summary(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "summary.json").read_text()))


def log(tmp_path: Path, name: str) -> Counter[str]:
    return Counter((tmp_path / f"{name}.jsonl").read_text().splitlines())


@pytest.mark.parametrize("policy", ["mini-batch", "both+stream"])
def test_it_ends_with_the_weights_of_a_run_that_never_stopped(
    policy: str, keys: tuple[str, ...], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    begin(keys, "whole", f"policy={policy}")
    whole = log(tmp_path, "asked")
    for name in ("asked", "answered"):
        (tmp_path / f"{name}.jsonl").unlink()
    (tmp_path / "left.txt").write_text(str(8 + 4 * 16 + 10))  # of the validation, four steps, and some
    begin(keys, "stopped", f"policy={policy}", code=1)
    (tmp_path / "left.txt").unlink()
    in_flight = log(tmp_path, "asked") - log(tmp_path, "answered")
    assert main(["resume", str(runs / "stopped"), "--quiet"]) == 0

    first, second = summary(runs / "whole"), summary(runs / "stopped")
    assert second["weights_sha256"] == first["weights_sha256"]
    assert second["steps"] == STEPS
    assert second["status"] == "finished"
    # The judge is asked nothing twice but what it had not answered.
    assert not (log(tmp_path, "asked") - whole) - in_flight
    assert second["rewards"]["cached"] > 0
    # Metrics and trace are those of one run.
    rows = [json.loads(line) for line in (runs / "stopped" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "timing_s/step" in row] == list(range(1, STEPS + 1))
    # Without a gradient, the weights would be equal whatever was lost.
    assert min(row["actor/grad_norm"] for row in rows if "actor/grad_norm" in row) > 0
    assert second["evaluations"] == first["evaluations"]
    check(json.loads((runs / "stopped" / "trace.json").read_text()))
    spans = perfetto.load(str(runs / "stopped")).spans
    alone = perfetto.load(str(runs / "whole")).spans
    saved = {"stage_checkpoint", "keep_samples", "write_checkpoint"}
    assert Counter(s.task for s in spans if s.stage not in saved) == Counter(
        s.task for s in alone if s.stage not in saved
    )


def test_a_run_that_was_killed_after_its_last_checkpoint_is_finished(
    keys: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "runs" / "a"
    begin(keys, "a", "val.every=2", steps=2)
    whole = summary(directory)
    metrics = directory / "metrics.jsonl"
    rows = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(row for row in rows if '"step": 2' not in row or "val-core/" not in row))
    (directory / "summary.json").unlink()
    shutil.rmtree(directory / "model")
    assert main(["resume", str(directory), "--quiet"]) == 0
    found = summary(directory)
    for name in ("status", "steps", "weights_sha256", "evaluations"):
        assert found[name] == whole[name], name
    assert found["evaluations"].keys() == {"0", "2"}
    assert found["rewards"]["cached"] == 8  # the last evaluation, which is not asked again
    assert found["rewards"]["requested"] == whole["rewards"]["requested"] + 8
    assert (directory / "model" / "config.json").exists()

    # Now it is complete, and nothing is done any more.
    def times() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in directory.rglob("*") if file.name != ".lock"}

    before = times()
    capfd.readouterr()
    begin(keys, "a", "val.every=2", "resume=auto", steps=2)
    assert capfd.readouterr().out == f"run '{directory}' is complete: 2 steps.\n"
    assert main(["resume", str(directory), "--quiet"]) == 2
    assert "is complete: 2 steps; give a larger steps= to go on" in capfd.readouterr().err
    assert times() == before


def test_auto_begins_then_resumes_then_begins_again_with_its_ledger(keys: tuple[str, ...], tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "a"
    (tmp_path / "left.txt").write_text("30")
    (tmp_path / "at_once.txt").touch()
    begin(keys, "a", "resume=auto", "policy=both", code=1)
    (tmp_path / "left.txt").unlink()
    assert not list((directory / "checkpoints").glob("step_*"))
    begin(keys, "a", "resume=auto", "policy=both")
    assert summary(directory)["rewards"]["cached"] > 0
    shutil.rmtree(directory / "checkpoints" / f"step_{STEPS:06}")
    (directory / "summary.json").unlink()
    begin(keys, "a", "resume=auto", "policy=both")
    assert summary(directory)["steps"] == STEPS


def test_other_data_is_refused_or_allowed_once(
    keys: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, run = tmp_path / "d.jsonl", tmp_path / "runs" / "x"
    rows = [json.dumps({"question": f"What is {n} + 2?", "answer": f"#### {n + 2}"}) for n in range(16)]
    data.write_text("\n".join(rows))
    begin(keys, "x", f"data.train={data}", "val.every=0", "checkpoint.export=false", steps=2)

    def resume(*more: str) -> tuple[int, str]:
        capfd.readouterr()
        return main(["resume", str(run), "--quiet", *more]), capfd.readouterr().err

    data.write_text("\n".join(reversed(rows)))
    for more in ((), ("resume.allow=[data.val]",)):
        code, said = resume("steps=4", *more)
        assert code == 2
        assert f"data.train={data}: its rows are not those that the run '{run}' was begun with" in said
        assert "allow it with resume.allow=[data]" in said
    assert summary(run)["steps"] == 2, "nothing was started"
    assert resume("steps=4", "resume.allow=[data]")[0] == 0
    data.write_text("\n".join(rows))
    assert resume("steps=6")[0] == 2, "what was allowed once is not allowed for ever"
    data.write_text("\n\n".join(row.replace(": ", ":  ") for row in reversed(rows)))
    assert resume("steps=5")[0] == 0, "the same rows, written in another way"


def test_wrong_input_is_one_sentence(keys: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "runs" / "a"
    begin(tuple(k for k in keys if k != "checkpoint.every=2"), "a", "checkpoint.every=0", steps=2)
    assert main(["run", str(directory / "config.yaml"), "name=b", "--quiet"]) == 0, "it is repeated"
    assert summary(tmp_path / "runs" / "b")["weights_sha256"] == summary(directory)["weights_sha256"]

    def refused(*words: str) -> str:
        capfd.readouterr()
        before = sorted(directory.rglob("*"))
        assert main([*words, "--quiet"]) == 2
        said = capfd.readouterr().err.strip()
        assert len(said.splitlines()) == 1, said
        assert sorted(directory.rglob("*")) == before
        return said

    said = refused("resume", str(directory), "steps=3")
    assert "has no checkpoint to resume from" in said
    assert "resume=auto, which takes the rewards that its ledger holds" in said
    assert "no run at" in refused("resume", str(directory) + "x")
    assert "leave it out, or allow it with resume.allow=[seed]" in refused("resume", str(directory), "seed=5")
    assert "engine.n=4: the run" in refused("resume", str(directory), "engine.n=4")
    assert "leave it out, or allow it" in refused("resume", str(directory), "policy=baseline")
    assert "unknown key 'stepz'" in refused("resume", str(directory), "stepz=5")
    assert "resume=auto: give name=" in refused("run", PIPELINE, *keys, "resume=auto")
    ledger = directory / "rewards.sqlite"
    ledger.rename(tmp_path / "aside")
    assert refused("resume", str(directory), "steps=3").endswith("and resume=auto."), "it paid for no reward"
    ledger.mkdir()
    assert "reward ledger" in refused("resume", str(directory), "steps=3")
    ledger.rmdir()
    (tmp_path / "aside").rename(ledger)
    with locked(directory):
        assert "is still running (process" in refused("resume", str(directory))
    text = (directory / "config.yaml").read_text()
    (directory / "config.yaml").write_text(text.replace("pipelines/gsm8k_grpo.py", "pipelines/gone.py"))
    assert "its pipeline file" in refused("resume", str(directory))
    (directory / "config.yaml").write_text("[1")
    assert "cannot be read" in refused("resume", str(directory))
