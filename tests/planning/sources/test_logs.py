"""Logs of verl: each form gives the same scalars, and each says in one sentence what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from pprint import pformat

import pytest

from dataflow.errors import ConfigError, DataError
from dataflow.planning.sources.logs import printed_settings, read_scalars, reader_of
from dataflow.planning.sources.read import read_workload

GEN, UPDATE = "timing_s/gen", "timing_s/update_actor"
COLUMNS = {
    GEN: {1: 44.75, 2: 44.5},
    UPDATE: {1: 146.5, 2: 126.25},
    "val-core/gsm8k/reward/mean@1": {0: 0.25, 2: 0.5},
    "perf/max_memory": {1: 2.0**-20},
}
CONFIG = {
    "actor_rollout_ref": {
        "actor": {"ppo_mini_batch_size": 32, "loss": "a {brace}"},
        "rollout": {"n": 8, "val_kwargs": {"n": 1}, "prompt": "it's {"},
    },
    "data": {"train_batch_size": 64},
    "trainer": {"balance_batch": False, "logger": ["console"]},
}
STEP = "step:1 - timing_s/gen:20.0 - timing_s/adv:30.0 - timing_s/update_actor:6.0 - timing_s/step:61.0"
RAY = "\x1b[36m(TaskRunner pid=123)\x1b[0m "
Log = Mapping[str, Mapping[int, float]]


def by_step(log: Log) -> dict[int, dict[str, float]]:
    steps = sorted({step for series in log.values() for step in series})
    return {step: {name: series[step] for name, series in log.items() if step in series} for step in steps}


def console(folder: Path, log: Log) -> Path:
    lines = [
        "(TaskRunner pid=7) step:0 of the warm-up",
        "Training Progress:   1%|          | 1/105 [10:17<17:50:32, 617.6s/it]\r",
    ]
    for step, row in by_step(log).items():
        words = [f"{name}:{f'np.float64({v!r})' if '/' in name[10:] else repr(v)}" for name, v in row.items()]
        lines.append(f"{RAY}step:{step} - training/name:nan - {' - '.join(words)}\rTraining Progress: {step}%")
    (folder / "train.log").write_text("\ufeff" + "\r\n".join(lines))
    return folder / "train.log"


def jsonl(folder: Path, log: Log) -> Path:
    rows = [json.dumps({"step": step, "data": {**row, "note": "text"}}) for step, row in by_step(log).items()]
    (folder / "run.jsonl").write_text("\n".join([*rows, '{"step": 3, "data": {"timing_s/ge']))
    return folder / "run.jsonl"


def history(folder: Path, log: Log) -> Path:
    """As W&B's ``run.history().to_csv()``."""
    lines = [",".join(["_step", "val/table", *log])]
    for step, row in by_step(log).items():
        lines.append(",".join([str(step), '"{""_type"": ""table""}"', *(str(row.get(name, "")) for name in log)]))
    (folder / "history.csv").write_text("\n".join(lines))
    return folder / "history.csv"


def events(folder: Path, log: Log) -> Path:
    """As torch's SummaryWriter, which verl uses, writes them."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder / "project" / "run"))
    for tag, series in log.items():
        for step, value in series.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=100 + step, step=step, summary=summary))
    writer.close()
    return folder


@pytest.mark.parametrize("form", [console, jsonl, history, pytest.param(events, marks=pytest.mark.slow)])
def test_each_form_gives_the_same_scalars(form: Callable[[Path, Log], Path], tmp_path: Path) -> None:
    path = form(tmp_path, COLUMNS)
    assert reader_of(path) is not None
    assert read_scalars(path) == COLUMNS


@pytest.mark.heavy  # imports torch, through verl
@pytest.mark.parametrize("form", ["console", "jsonl"])
def test_what_verls_loggers_write_is_read(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy
    from verl.utils.logger import LocalLogger
    from verl.utils.tracking import FileLogger

    path = tmp_path / ("out.txt" if form == "console" else "run.jsonl")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    logger = LocalLogger() if form == "console" else FileLogger("project", "run")
    for step, row in by_step(COLUMNS).items():
        logger.log({name: numpy.float64(value) for name, value in row.items()}, step)
    if form == "console":
        path.write_text(capsys.readouterr().out)
    assert read_scalars(path) == COLUMNS


@pytest.mark.slow
def test_of_a_resumed_run_the_later_value_counts(tmp_path: Path) -> None:
    events(tmp_path, {GEN: {1: 1.0, 2: 2.0}, UPDATE: {1: 4.0}})
    before = next((tmp_path / "project" / "run").iterdir())
    before.rename(before.with_name("events.out.tfevents.0000000001.host.7.0"))
    events(tmp_path, {GEN: {2: 7.0}})
    found = read_scalars(tmp_path)
    assert found[GEN] == {1: 1.0, 2: 7.0}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", '{"step": 1, "data": {}}\n{"st\n{"step": 2}\n', " cannot be read (line 2: "),
        ("a.jsonl", '{"step": 1, "data": {"timing_s/gen": -1}}\n', f": {GEN} at step 1 is -1; give seconds."),
        ("a.log", "no steps\n", ": no step of verl is in it; give verl's console log"),
        ("a.csv", "global_stp,gen\n1,2\n", ": no column global_step; did you mean 'global_stp'?"),
        ("a.csv", "step,timing_s/gem\n1,2\n", f": no step has a value of {GEN}, {UPDATE} (it has timing_s/gem); did"),
        ("a.csv", f"step,{GEN}\n1,x\n", f" cannot be read (line 2, column {GEN}: could not convert"),
        ("a.csv", f"step,{GEN},{UPDATE},overlap/exposed_wait_s\n1,2,3,4\n", " is of a run of dataflow, not of verl's"),
    ],
)  # fmt: skip
def test_a_log_that_cannot_be_used(name: str, text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_scalars(path)
    assert str(caught.value).startswith(f"log {path}{expected}")


def printed(path: Path, text: str, prefix: str = "", between: str = "") -> Path:
    lines = [prefix + line for line in text.splitlines()]
    path.write_text("\n".join(["ray init kwargs: {}", lines[0], *([between] if between else []), *lines[1:], STEP, ""]))
    return path


@pytest.mark.parametrize("prefix", ["", RAY])
def test_the_printed_configuration_is_read(prefix: str, tmp_path: Path) -> None:
    between = "(WorkerDict pid=4) loading {" if prefix else ""
    assert printed_settings(printed(tmp_path / "train.log", pformat(CONFIG), prefix, between)) == CONFIG


def test_a_plan_asks_only_for_what_the_log_does_not_hold(tmp_path: Path) -> None:
    path = printed(tmp_path / "train.log", pformat(CONFIG))
    with pytest.raises(ConfigError, match=r"does not say 'log\.concurrency'"):
        read_workload(str(path))
    workload, _config = read_workload(str(path), ["log.concurrency=4", "mini_batches=4"])
    assert (workload.prompts, workload.responses, workload.mini_batches) == (64, 8, 4)
    assert not workload.rewards.scattered
    assert "prompts=64 responses=8: from the configuration of verl that the log holds." in workload.assumptions
    with pytest.raises(ConfigError, match=r"responses=2: the log's configuration of verl has 8; leave it out\."):
        read_workload(str(path), ["log.concurrency=4", "responses=2"])
