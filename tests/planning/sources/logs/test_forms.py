"""The forms of one log give the same scalars, and each of them says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dataflow.errors import DataError
from dataflow.planning.sources.read import read_workload
from dataflow.planning.sources.scalars import looks_like, read_scalars

GEN, UPDATE = "timing_s/gen", "timing_s/update_actor"
COLUMNS = {
    GEN: {1: 44.7915, 2: 44.6572},
    UPDATE: {1: 146.8262, 2: 126.3988},
    "val-core/gsm8k/reward/mean@1": {2: 0.5},
    "perf/max_memory": {1: 1e-07},
}

Log = Mapping[str, Mapping[int, float]]


def by_step(log: Log) -> dict[int, dict[str, float]]:
    steps = sorted({step for series in log.values() for step in series})
    return {step: {name: series[step] for name, series in log.items() if step in series} for step in steps}


def console(folder: Path, log: Log) -> Path:
    lines = [
        "(TaskRunner pid=7) step:0 of the warm-up",
        "Training Progress:   1%|          | 1/105 [10:17<17:50:32, 617.6s/it]",
    ]
    for step, row in by_step(log).items():
        words = [
            f"{name}:{f'np.float64({value!r})' if '/' in name[10:] else repr(value)}" for name, value in row.items()
        ]
        lines.append(f"\x1b[36m(TaskRunner pid=2719)\x1b[0m step:{step} - training/name:nan - {' - '.join(words)}")
    (folder / "train.log").write_text("\n".join(lines))
    return folder / "train.log"


def jsonl(folder: Path, log: Log) -> Path:
    rows = [json.dumps({"step": step, "data": {**row, "note": "text"}}) for step, row in by_step(log).items()]
    (folder / "run.jsonl").write_text("\n".join([*rows, '{"step": 3, "data": {"timing_s/ge']))
    return folder / "run.jsonl"


def history(folder: Path, log: Log) -> Path:
    """As W&B's ``run.history().to_csv()``."""
    lines = [",".join(["", "_step", "_runtime", "val/table", *log])]
    for at, (step, row) in enumerate(by_step(log).items()):
        cells = [str(row.get(name, "")) for name in log]
        lines.append(",".join([str(at), str(step), "12.5", '"{""_type"": ""table""}"', *cells]))
    (folder / "history.csv").write_text("\n".join(lines))
    return folder / "history.csv"


def chart(folder: Path, log: Log) -> Path:
    """As W&B's page exports a chart of one run."""
    names = [f"qwen - grpo - {name}{end}" for name in log for end in ("", "__MIN", "__MAX")]
    lines = [",".join(f'"{name}"' for name in ("Step", *names))]
    for step, row in by_step(log).items():
        cells = [f'"{row.get(name, "")}"' for name in log for _ in range(3)]
        lines.append(",".join([f'"{step}"', *cells]))
    (folder / "wandb_export.csv").write_text("\n".join(lines))
    return folder / "wandb_export.csv"


def long(folder: Path, log: Log) -> Path:
    """As MLflow's ``get_metric_history`` of each metric, in one table."""
    lines = ["run_id,key,value,timestamp,step"]
    lines += [f"8f2,{name},{value},1700000000,{step}" for name, series in log.items() for step, value in series.items()]
    (folder / "metrics.csv").write_text("\n".join(lines))
    return folder / "metrics.csv"


def mlflow(folder: Path, log: Log) -> Path:
    for name, series in log.items():
        file = folder / "mlruns" / "0" / "8f2" / "metrics" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"1700000000 {value} {step}\n" for step, value in series.items()))
    return folder / "mlruns"


@pytest.mark.parametrize("form", [console, jsonl, history, chart, long, mlflow])
def test_each_form_gives_the_same_scalars(form: Callable[[Path, Log], Path], tmp_path: Path) -> None:
    path = form(tmp_path, COLUMNS)
    assert looks_like(path)
    found = {name: dict(series) for name, series in read_scalars(path).columns.items()}
    found.pop("_runtime", None)
    found.pop("", None)
    assert found == COLUMNS


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_a_console_log_is_read_in_the_encodings_that_consoles_write(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    lines = [f"step:{at} - {GEN}:{at}.5 - {UPDATE}:2.0\rTraining Progress: {at}%" for at in (1, 2)]
    text = "\r\n".join(lines)
    path.write_bytes((("\ufeff" if encoding == "utf-16-be" else "") + text).encode(encoding))
    assert looks_like(path)
    assert read_scalars(path).columns == {GEN: {1: 1.5, 2: 2.5}, UPDATE: {1: 2.0, 2: 2.0}}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_another_log_in_utf_16_is_refused_with_the_fix(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"step": 1}', encoding="utf-16")
    with pytest.raises(DataError, match="it is UTF-16 or UTF-32 text; save it as UTF-8"):
        read_scalars(path)


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
    assert read_scalars(path).columns == COLUMNS


def test_of_a_resumed_run_in_one_console_log_the_later_value_counts(tmp_path: Path) -> None:
    path = tmp_path / "slurm-17.out"
    path.write_text(f"step:1 - {GEN}:1.0 - {UPDATE}:2.0\nstep:2 - {GEN}:1.5 - {UPDATE}:2.0\nstep:2 - {GEN}:3.0\n")
    assert read_scalars(path).series(GEN) == {1: 1.0, 2: 3.0}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([1, 2, 3, 4], ""),
        ([1, 2, 5, 6], ""),
        ([1, 2, 1, 2], "the log starts again at step 1 after step 2: the later lines were taken for"),
        ([1, 2, 2, 3], "the log starts again at step 2 after step 2: "),
        ([1, 3, 2, 4, 1], "the log starts again at step 2 after step 3, at step 1 after step 4: "),
        ([1, 1, 1, 1, 1, 1], "at step 1 after step 1, at step 1 after step 1 and 2 more times: "),
    ],
)
@pytest.mark.parametrize("form", ["console", "jsonl"])
def test_a_plan_says_where_the_steps_of_a_log_begin_again(
    form: str, steps: list[int], expected: str, tmp_path: Path
) -> None:
    names = (GEN, UPDATE, "timing_s/adv")
    if form == "console":
        lines = [f"step:{step} - {' - '.join(f'{name}:{at}' for name in names)}" for at, step in enumerate(steps)]
        # A validation is no step.
        lines = ["step:0 - val/acc:0.5", *lines, f"step:{steps[-1]} - val/acc:0.5"]
    else:
        lines = [json.dumps({"step": step, **dict.fromkeys(names, at)}) for at, step in enumerate(steps)]
    path = tmp_path / f"run.{form}"
    path.write_text("\n".join(lines) + "\n")
    needed = ["prompts=4", "responses=2", "mini_batches=2", "log.concurrency=4"]
    workload, _ = read_workload(str(path), needed)
    assert [expected in said for said in workload.assumptions if "starts again" in said] == [True] * bool(expected)
    assert read_scalars(path).series(GEN)[steps[-1]] == len(steps) - 1


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", '{"step": 1, "data": {}}\n{"st\n{"step": 2}\n', ", line 2 is not JSON ("),
        ("a.jsonl", '{"loss": 1}\n', ', line 1 is of no step; give objects like {"step": 1'),
        ("a.jsonl", "[1]\n", ", line 1 is of no step; "),
        ("a.jsonl", '{"step": 1.5, "data": {}}\n', ", line 1 is of no step; "),
        ("a.jsonl", '{"step": true, "data": {}}\n', ", line 1 is of no step; "),
        ("a.jsonl", "", f": no step has a value of {GEN}, {UPDATE}; give verl's console log"),
        ("a.jsonl", '{"step": 1, "data": {"timing_s/gen": -1}}\n', f": {GEN} at step 1 is -1; "),
        ("a.log", "step:1 - loss:0.5\n", f": no step has a value of {GEN}, {UPDATE}; "),
        ("a.csv", f'Step,"a - {GEN}","b - {GEN}"\n1,2,3\n', ": it has the runs 'a' and 'b'; export one of them."),
        (
            "a.csv",
            f"run_id,key,value,step\na,{GEN},1,1\nb,{GEN},1,1\n",
            ": its column run_id has the runs 'a' and 'b'; leave the rows",
        ),
        ("a.csv", f"Run,key,value,step\na,{GEN},1,1\nb,{GEN},1,1\n", ": its column Run has the runs 'a' and 'b'; "),
        ("a.csv", f"Run Name,step,{GEN}\na,1,1\nb,1,1\n", ": its column Run Name has the runs 'a' and 'b'; leave"),
        ("a.csv", f"key,value,step\n{GEN},x,1\n", ", line 2, column value: 'x' is not a number; give a number."),
        (
            "a.csv",
            f"key,value,step\n{GEN},1,x\n",
            ", line 2, column step: 'x' is not a number; give the step's number.",
        ),
    ],
)
def test_a_log_that_cannot_be_used(name: str, text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_scalars(path)
    assert str(caught.value).startswith(f"log {path}{expected}")


def test_of_several_runs_of_mlflow_none_is_chosen(tmp_path: Path) -> None:
    for run in ("one", "two"):
        file = tmp_path / run / "metrics" / "timing_s" / "gen"
        file.parent.mkdir(parents=True)
        file.write_text("1 2.0 1\n")
    with pytest.raises(DataError, match="it has the runs one and two; give the directory of one run"):
        read_scalars(tmp_path)
    (tmp_path / "one" / "metrics" / "timing_s" / "gen").write_text("1 2.0\n")
    with pytest.raises(DataError, match=r"gen, line 1: '' is not a number; give lines 'time value step'"):
        read_scalars(tmp_path / "one")


def test_other_files_are_no_logs(tmp_path: Path) -> None:
    for name, text in (("notes.txt", "step: 1 - then step:two - a"), ("train.py", 'print(f"step:{n} - {x}")')):
        (tmp_path / name).write_text(text)
        assert not looks_like(tmp_path / name)
