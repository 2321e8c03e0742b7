"""Runs of pipelines/ppo_critic.py: the same weights of actor and critic under each policy, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.cli import main
from tests.running.test_resume import REWARD, SMALL

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "ppo_critic.py")
STEPS = 4


@pytest.fixture
def keys(tmp_path: Path, tiny_qwen: Path) -> tuple[str, ...]:
    (tmp_path / "reward.py").write_text(REWARD)
    reward = f"custom_reward_function.path={tmp_path / 'reward.py'}"
    plain = ("val.every=0", "samples.every=0", f"model.path={tiny_qwen}", f"runs={tmp_path / 'runs'}")
    return (*(key for key in SMALL if not key.startswith("checkpoint.every")), reward, *plain)


def begin(keys: tuple[str, ...], name: str, *more: str, steps: int = STEPS, every: int = 0, code: int = 0) -> None:
    keys = (*keys, f"steps={steps}", f"checkpoint.every={every}", f"name={name}")
    assert main(["run", PIPELINE, *keys, *more, "--quiet"]) == code


def summary(tmp_path: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "runs" / name / "summary.json").read_text()))


def weights(tmp_path: Path, name: str) -> tuple[str, str]:
    """Digests of the actor and of the critic."""
    found = summary(tmp_path, name)
    return found["weights_sha256"], found["critic_weights_sha256"]


def metrics(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    rows = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, rows) if "timing_s/step" in row]


def test_a_split_step_gives_the_same_weights(keys: tuple[str, ...], tmp_path: Path) -> None:
    for policy in ("baseline", "mini-batch"):
        begin(keys, policy, f"policy={policy}")
    found = {policy: weights(tmp_path, policy) for policy in ("baseline", "mini-batch")}
    assert found["mini-batch"] == found["baseline"]
    assert len({*found["baseline"]}) == 2, "of actor and critic"
    for policy in found:
        rows = metrics(tmp_path, policy)
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        for row in rows:
            assert {"actor/pg_loss", "critic/vf_loss", "critic/values/mean", "critic/vf_explained_var"} <= set(row)
            assert {"timing_s/values", "timing_s/update_critic", "timing_s/update_actor"} <= set(row)


def test_a_resumed_run_ends_with_the_weights_of_actor_and_critic(keys: tuple[str, ...], tmp_path: Path) -> None:
    begin(keys, "whole", "policy=both", every=2)
    (tmp_path / "left.txt").write_text(str(3 * 16 + 4))  # of three steps, and some
    (tmp_path / "asked.jsonl").unlink()
    begin(keys, "stopped", "policy=both", every=2, code=1)
    (tmp_path / "left.txt").unlink()
    saved = tmp_path / "runs" / "stopped" / "checkpoints" / "step_000002"
    assert {"trainer", "critic"} <= {path.name for path in saved.iterdir()}
    assert main(["resume", str(tmp_path / "runs" / "stopped"), "--quiet"]) == 0
    assert weights(tmp_path, "stopped") == weights(tmp_path, "whole")
    exported = tmp_path / "runs" / "stopped" / "model" / "config.json"
    assert json.loads(exported.read_text())["architectures"] == ["Qwen2ForCausalLM"], "the actor"


def test_the_critic_learns_first(keys: tuple[str, ...], tmp_path: Path, tiny_qwen: Path) -> None:
    begin(keys, "a", "policy=mini-batch", "critic.warmup=2", "checkpoint.export=false", steps=3)
    first, second, third = metrics(tmp_path, "a")
    for row in (first, second):
        assert "actor/pg_loss" not in row
        assert row["critic/vf_loss"] > 0
    assert third["actor/lr"] == pytest.approx(2e-4 / 5), "the first step of the actor's own warm-up"


def test_a_policy_that_splits_is_refused_where_a_step_is_whitened(
    keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    begin(keys, "a", "policy=mini-batch", "algorithm.whiten=step", code=2)
    said = capsys.readouterr().err
    assert "needs the whole batch (adv_estimator 'gae' whitens the advantages over the whole batch" in said
    assert "algorithm.whiten=mini-batch" in said
