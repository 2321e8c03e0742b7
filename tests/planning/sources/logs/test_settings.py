"""The settings that a log holds: the configuration that verl prints into the console, MLflow's parameters."""

from __future__ import annotations

from pathlib import Path
from pprint import pformat

import pytest

from dataflow.errors import ConfigError
from dataflow.planning.sources.logs.settings import read_settings
from dataflow.planning.sources.read import read_workload

CONFIG = {
    "actor_rollout_ref": {
        "actor": {"ppo_mini_batch_size": 32, "loss": "a {brace}"},
        "rollout": {"n": 8, "val_kwargs": {"n": 1}, "prompt": "it's {"},
    },
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_batch_size": 64},
    "trainer": {"balance_batch": False, "logger": ["console"]},
}
FOUND = {
    "data.train_batch_size": 64,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    "trainer.balance_batch": False,
}
STEP = "step:1 - timing_s/gen:20.0 - timing_s/adv:30.0 - timing_s/update_actor:6.0 - timing_s/step:61.0"
RAY = "\x1b[36m(TaskRunner pid=123)\x1b[0m "


def console(path: Path, text: str, prefix: str = "", between: str = "") -> Path:
    lines = [prefix + line for line in text.splitlines()]
    path.write_text("\n".join(["ray init kwargs: {}", lines[0], *([between] if between else []), *lines[1:], STEP, ""]))
    return path


@pytest.mark.parametrize("prefix", ["", RAY])
def test_the_printed_configuration_is_read(prefix: str, tmp_path: Path) -> None:
    between = "(WorkerDict pid=4) loading {" if prefix else ""
    path = console(tmp_path / "train.log", pformat(CONFIG), prefix, between)
    assert read_settings(path) == FOUND


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_the_printed_configuration_is_read_behind_a_byte_order_mark(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(pformat(CONFIG), encoding=encoding)
    assert read_settings(path) == FOUND


@pytest.mark.parametrize(
    "text", ["{'actor_rollout_ref': {'actor': {", "{'actor_rollout_ref': {'actor': <object>}}", "x"]
)
def test_what_cannot_be_read_has_to_be_given(text: str, tmp_path: Path) -> None:
    path = console(tmp_path / "train.log", text)
    assert read_settings(path) == {}
    with pytest.raises(ConfigError, match="does not say prompts, responses, mini_batches and log"):
        read_workload(str(path))


def test_a_plan_asks_only_for_what_the_log_does_not_hold(tmp_path: Path) -> None:
    path = console(tmp_path / "train.log", pformat(CONFIG))
    with pytest.raises(ConfigError, match=r"does not say 'log\.concurrency'"):
        read_workload(str(path))
    workload, _config = read_workload(str(path), ["log.concurrency=4", "mini_batches=4"])
    assert (workload.prompts, workload.responses, workload.mini_batches) == (64, 8, 4)
    assert not workload.rewards.scattered
    assert "prompts=64 responses=8: from the configuration of verl that the log holds." in workload.assumptions
    with pytest.raises(ConfigError, match=r"responses=2: the log's configuration of verl has 8; leave it out\."):
        read_workload(str(path), ["log.concurrency=4", "responses=2"])


def test_the_parameters_of_mlflow_are_read(tmp_path: Path) -> None:
    for key, value in FOUND.items():
        file = tmp_path / "params" / key.replace(".", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(value))
    metrics = tmp_path / "metrics" / "timing_s"
    metrics.mkdir(parents=True)
    for name in ("gen", "update_actor"):
        (metrics / name).write_text("1700000000000 20.0 1\n")
    assert read_settings(tmp_path) == FOUND
