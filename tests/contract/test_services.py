"""What a run starts beside itself: a reward model on vLLM, workers of Ray, and nothing that outlives it."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import pytest

from tests.contract.rig import PIPELINE, SMALL, Record, Trainer, classifier, command, problems, until

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(500)]


def test_a_reward_model_is_served_by_the_run_and_scores_each_sample(train: Trainer, tmp_path: Path) -> None:
    """A classifier would need a server of its own, started and watched by hand."""
    model = classifier(tmp_path / "rm")
    run = train(f"reward.models.rm.path={model}", "steps=1", folder=tmp_path)
    assert run.summary["rewards"]["scored"] == 16
    assert len({row["score"] for row in run.samples}) > 1
    assert all(math.isfinite(row["score"]) for row in run.samples)
    me = psutil.Process()
    until(lambda: not any(str(model) in " ".join(p.cmdline()) for p in me.children(recursive=True)), "its end", 30)


def test_a_run_on_ray_trains_as_one_in_a_process_and_leaves_nothing(train: Trainer, tmp_path: Path) -> None:
    """A run on Ray workers would give other weights than the one that was debugged, or leave Ray behind."""
    (tmp_path / "length.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(solution_str.encode()) % 7 / 7\n"
    )
    data = problems(64, tmp_path / "train.jsonl")
    keys = [*SMALL, f"model.path={train.model}", f"data.train={data}", "policy.order=index", f"runs={tmp_path}"]
    keys.append(f"custom_reward_function.path={tmp_path / 'length.py'}")
    digests = []
    for executor in ("inline", "ray"):
        own = [f"executor={executor}" if key.startswith("executor=") else key for key in keys]
        done = command("run", PIPELINE, *own, f"name={executor}", seconds=200)
        assert done.code == 0, done.err
        digests.append(Record(tmp_path / executor).summary["weights_sha256"])
    assert digests[0] == digests[1]
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert not mine
