"""Runs of pipelines/two_judges.py: the judge and the rule are two agents, each with its own files, fate and numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dataflow.cli import main
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.errors import ConfigError
from dataflow.rewards.gsm8k import compute_score
from dataflow.running.resume import check_changes
from dataflow.samples.files import file_of, read
from dataflow.timeline import perfetto
from dataflow.timeline.agents import agents_of

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "two_judges.py")
SMALL = (
    "engine.rollout=hf",
    "steps=2",
    "data.prompts=4",
    "engine.n=2",
    "engine.max_tokens=8",
    "data.max_prompt_length=200",
    "data.train_size=200",
    "trainer.mini_batches=2",
    "val.every=0",
    "checkpoint.export=false",
    "samples.every=1",
    "judge.latency=0.2",
    "judge.time_scale=1",
)
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


def run(tmp_path: Path, model: Path, *more: str, code: int = 0) -> Path:
    where = (f"runs={tmp_path}", "name=a", f"model.path={model}", "--quiet")
    assert main(["run", PIPELINE, *SMALL, *more, *where]) == code
    return tmp_path / "a"


def agents(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())["rewards"]["agents"]
    return found


@pytest.mark.heavy
@pytest.mark.timeout(240)
def test_both_agents_score_each_sample_and_a_resume_pays_none_twice(tmp_path: Path, tiny_qwen: Path) -> None:
    keys = (
        "executor=inline",
        "policy=both+stream",
        "policy.order=index",
        "checkpoint.every=1",
        "checkpoint.keep_last=3",
    )
    directory = run(tmp_path, tiny_qwen, *keys)
    for name, counts in agents(directory).items():
        assert (counts["requested"], counts["scored"]) == (16, 16), name
        assert (counts["failed"], counts["cancelled"]) == (0, 0), name
    samples = [sample for step in (1, 2) for sample in read(file_of(directory / "samples", "step", step))]
    assert len(samples) == 16
    for sample in samples:
        ruled = compute_score(sample["data_source"], sample["response"], sample["ground_truth"])
        assert sample["rule_score"] == ruled
        assert 0 < sample["length_penalty"] <= 1
        parts = 0.5 * sample["judge_score"] + 0.5 * sample["rule_score"] - 0.05 * sample["length_penalty"]
        assert sample["score"] == pytest.approx(parts, abs=1e-6)
    trace = perfetto.load(str(directory))
    assert agents_of(trace) == ["reward", "rule"]
    # The answer of the judge takes 0.2 s; a rule that comes first is not waited for.
    slow = [m.end - m.begin for m in trace.marks if m.resource == "reward"]
    assert len(slow) == 16
    assert min(slow) >= 0.19
    for name in ("rewards.sqlite", "rewards_rule.sqlite"):
        assert (directory / name).is_file()
    shutil.rmtree(directory / "checkpoints" / "step_000002")
    (directory / "summary.json").unlink()
    assert main(["resume", str(directory), "rule.concurrency=4", "steps=3", "--quiet"]) == 0
    for name, counts in agents(directory).items():
        assert (counts["requested"], counts["scored"], counts["failed"]) == (24, 24, 0), name
        assert counts["cached"] == 8, f"step 2 of {name} is in its ledger"


@pytest.mark.heavy
@pytest.mark.timeout(240)
def test_the_death_of_one_agent_costs_no_reward(tmp_path: Path, tiny_qwen: Path) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    rule = (
        f"rule.custom_reward_function.path={tmp_path / 'deadly.py'}",
        f"rule.custom_reward_function.reward_kwargs={{first: {tmp_path / 'first'}}}",
    )
    directory = run(tmp_path, tiny_qwen, "policy=both", *rule)
    assert (tmp_path / "first").exists(), "the agent died"
    for name, counts in agents(directory).items():
        assert (counts["requested"], counts["scored"], counts["failed"]) == (16, 16, 0), name
    samples = [sample for step in (1, 2) for sample in read(file_of(directory / "samples", "step", step))]
    assert [sample["rule_score"] for sample in samples] == [1.0] * 16
    # The judge's agent was left alone: it was asked for each sample once.
    assert agents(directory)["reward"]["cached"] == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("rule.on_failure=replace_group", "rule.extra_groups=1"), "give rule.on_failure=drop_group"),
        (("rule.custom_reward_function.path=no.py",), "no.py"),
        (("rule.floor=9", "rule.concurrency=8"), "rule.floor=9; give 1 to rule.concurrency=8"),
        (("rule.timeout=700",), "raise rule.deadline or lower rule.timeout"),
        (("rule.manager=dappo",), "dappo"),
        (("rule.judge.latency=long",), "latency"),
        (("rule.concurency=8",), "did you mean 'rule.concurrency'"),
    ],
)
def test_a_wrong_key_of_an_agent_is_one_sentence(
    keys: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", PIPELINE, *keys, "executor=inline", f"runs={tmp_path}", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert list(tmp_path.iterdir()) == []


def test_the_limits_of_each_agent_may_change_when_a_run_resumes() -> None:
    def config(*keys: str) -> Any:
        return parse_overrides(load_pipeline_file(PIPELINE).Config, keys)

    before = config("name=a")
    for key in ("rule.concurrency=4", "rule.judge.url=http://judge", "reward.concurrency=4", "rule.timeout=9"):
        check_changes(before, config("name=a", key), Path("a"))
    for key in ("rule.on_failure=score:0", "rule.manager=dapo", "rule.custom_reward_function.path=x.py"):
        with pytest.raises(ConfigError, match="it would be another run"):
            check_changes(before, config("name=a", key), Path("a"))
