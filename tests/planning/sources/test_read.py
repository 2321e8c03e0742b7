"""Costs written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.errors import ConfigError, UserError
from dataflow.planning.sources.read import read_workload

EXAMPLE = Path(__file__).parents[3] / "examples" / "costs.yaml"
GOOD = """
steps: 3
prompts: 4
responses: 2
mini_batches: 2
stages: {rollout: 10, old_log_prob: 5, actor_update: "empirical:update.txt"}
reward: {latency: uniform:1:3, concurrency: 4}
"""


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    (tmp_path / "update.txt").write_text("8\n")
    (tmp_path / "costs.yaml").write_text(GOOD)
    return tmp_path / "costs.yaml"


def test_the_example_is_read() -> None:
    workload, _ = read_workload(str(EXAMPLE))
    assert (workload.steps, workload.prompts, workload.responses) == (100, 512, 8)
    assert workload.times["old_log_prob"].mean == 25
    assert workload.rewards.rpm == 3000
    assert workload.validation is not None
    assert workload.validation.overlap
    assert {"ref_log_prob", "val_rollout", "checkpoint"} <= workload.pipeline.by_name.keys()
    assert not workload.assumptions


def test_the_command_line_goes_over_the_file(costs: Path) -> None:
    workload, _ = read_workload(str(costs), ["reward.concurrency=9", "stages.rollout=uniform:2:4", "steps=7"])
    assert workload.rewards.concurrency == 9
    assert workload.times["rollout"].mean == 3
    assert workload.times["actor_update"].mean == 8
    assert workload.steps == 7
    assert "ref_log_prob" not in workload.pipeline.by_name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["stages.rolout=3"],
            "stages.rolout: no stage that takes time of its own has that name; did you mean 'rollout'?",
        ),
        (["stages.rollout=-3"], "stages.rollout '-3': give seconds of 0 or more"),
        (
            ["stages.rollout=lognromal:1:2"],
            "stages.rollout 'lognromal:1:2': no distribution is named 'lognromal'; did you mean",
        ),
        (["mini_batches=3"], "mini_batches=3 does not divide 4 prompt groups"),
        (["stages.actor_update=empirical:gone.txt"], "cannot read"),
    ],
)
def test_what_is_wrong_is_said(costs: Path, keys: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        read_workload(str(costs), keys)
    assert message in str(error.value)


def test_all_that_costs_do_not_say_is_asked_for_at_once(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("prompts: 8\nresponses: 2\nmini_batches: 2\nstages: {rollout: 10}\n")
    with pytest.raises(ConfigError) as error:
        read_workload(str(tmp_path / "c.yaml"))
    assert "does not say steps, reward.concurrency, stages.actor_update and reward.latency; give steps=100" in str(
        error.value
    )
